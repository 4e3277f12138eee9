"""Nothing wrong is timed, nobody is dropped in silence, and all compute the same from the same weights."""

from dataclasses import replace

import pytest
import torch

import fastcross
from benchmarks.contestants import (
    CLOSED_FORM,
    COPY,
    DEEPCTR,
    DNN,
    EAGER,
    EMPTY,
    GRAPHS,
    OURS,
    PEERS,
    PRODUCTS,
    TORCHFM,
    TORCHREC,
    WHOLE_TABLE_ADAM,
    Peer,
    deep,
    high,
    same_adam,
    swapped,
)
from benchmarks.harness import measure, memory
from benchmarks.harness.measure import Missing, Refused
from benchmarks.suites import GATED, LOGITS, LOW_RANK, MATRIX, MIXTURE, NETWORK, OPERATORS
from benchmarks.workloads import counts, rivals
from benchmarks.workloads.models import Shape
from benchmarks.workloads.operators import Depths, Problem
from benchmarks.workloads.steps import Heights, Request, TrainingStep

PROBLEM = Problem(NETWORK, 40, 24, 3)
SHAPES = {DEEPCTR: Shape(32, 20, (4,) * 3, 2, 2, (8, 8)), TORCHFM: Shape(32, 20, (4,) * 3, 0, 2, (8, 8))}


def run(workload, *contestants):
    return measure.measure(workload, contestants, budget=0.01)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
@pytest.mark.parametrize("backward", [True, False])
def test_every_backend_competes(operator, backward):
    everyone = OURS, CLOSED_FORM, EAGER, COPY
    case = run(Problem(operator, 40, 24, 3, backward=backward), *everyone)
    assert set(case["contestants"]) == {contestant.name for contestant in everyone}
    results = {"y"} | ({f"d{name}" for name, _ in operator.operands} if backward else set())
    assert set(case["contestants"][OURS.name]["errors"]) == results


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_peers_compete_with_our_weights(peer):
    pytest.importorskip(peer.peer.path.split(".")[0])
    case = run(PROBLEM, peer, swapped(peer))
    kept = {name: record["kept_bytes"] for name, record in case["contestants"].items()}
    assert kept[swapped(peer).name] < kept[peer.name]
    assert not run(Problem(LOGITS, 40, 24, 3), peer)["missing"]


@pytest.mark.parametrize("operator", [MATRIX, LOW_RANK, MIXTURE, GATED], ids=lambda operator: operator.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peers_of_the_family_compete_with_our_weights(operator, dtype):
    for peer in operator.peers:
        pytest.importorskip(peer.peer.path.split(".")[0])
    problem = Problem(operator, 40, 24, 3, dtype, rank=6, experts=3)
    everyone = OURS, EAGER, *operator.peers, PRODUCTS
    assert set(run(problem, *everyone)["contestants"]) == {contestant.name for contestant in everyone}


def test_a_network_is_no_contestant_for_a_layer():
    pytest.importorskip("torchfm")
    case = run(Problem(OPERATORS[0], 16, 8), OURS, TORCHFM)
    assert "whole network" in case["missing"][TORCHFM.name]


@pytest.mark.parametrize("wrong", ["output", "gradient", "nan"])
def test_a_wrong_kernel_is_refused(wrong, monkeypatch):
    original = fastcross.cross_network

    def broken(x0, w, b, **options):
        y = original(x0, w, b, **options)
        if wrong == "output":
            return y + 1e-3
        if wrong == "nan":
            return torch.where(torch.arange(len(y))[:, None] == 7, torch.nan, y)
        return y + 1e-3 * (x0 - x0.detach())

    monkeypatch.setattr(fastcross, "cross_network", broken)
    with pytest.raises(Refused, match="fastcross is wrong, its time does not count"):
        run(PROBLEM, OURS, EAGER)


def test_a_wrong_row_of_a_large_batch_is_refused(monkeypatch):
    problem = Problem(NETWORK, 5000, 1024, 1)
    assert len(problem.sample) < problem.rows
    original = fastcross.cross_network
    monkeypatch.setattr(fastcross, "cross_network", lambda *a, **k: torch.cat((original(*a, **k)[:-1], a[0][-1:])))
    with pytest.raises(Refused):
        measure.verify(OURS.name, problem.enter(OURS), problem.expected())


def test_a_peer_that_is_not_installed_is_named():
    absent = replace(TORCHREC, peer=Peer("no_such_package.CrossNet"))
    assert "requirements-peers.txt" in run(PROBLEM, OURS, absent)["missing"]["TorchRec"]


def test_what_does_not_fit_into_memory_is_named(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1e3)
    with pytest.raises(Missing, match="needs about"):
        PROBLEM.enter(EAGER)
    assert PROBLEM.enter(OURS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_graphs_compete():
    assert not run(PROBLEM, OURS, *GRAPHS)["missing"]


def test_kept_bytes_are_those_of_the_closed_form_and_of_the_loop():
    rows, d, layers = PROBLEM.rows, PROBLEM.d, PROBLEM.layers
    case = run(PROBLEM, OURS, EAGER)["contestants"]
    assert case[OURS.name]["kept_bytes"] == 4 * rows * layers
    assert case[EAGER.name]["kept_bytes"] == 4 * rows * (d * (layers - 1) + layers)


def test_byte_counts_of_the_closed_form():
    floors = {operator.name: [operator.floor_copies(backward) for backward in (False, True)] for operator in OPERATORS}
    assert floors == {"cross_layer": [1.5, 4], "cross_network": [1, 2.5], "cross_logits": [0.5, 1.5]}
    assert Problem(NETWORK, 10, 8, 32).describe()["floor_bytes"] == 5 * 10 * 8 * 4
    assert counts.OURS.bytes(32, 4) == counts.OURS.bytes(1, 4) == 5 * 4
    assert counts.LAYER_BY_LAYER[EAGER.name].bytes(32, 4) == 32 * 23 * 4
    assert [counts.OURS.operations(6), counts.LAYER_BY_LAYER[EAGER.name].operations(6)] == [42, 84]


def test_an_empty_function_is_the_floor_of_a_call():
    times = {
        name: record["times"] for name, record in run(Problem(NETWORK, 1, 8, 3), EMPTY, EAGER)["contestants"].items()
    }
    assert min(times[EMPTY.name]) < min(times[EAGER.name])


def test_depths_are_verified_each_by_its_own():
    case = run(Depths(Problem(NETWORK, 8, 6)), deep(OURS, 1), deep(OURS, 12), deep(EAGER, 12))["contestants"]
    assert case["fastcross, L = 12"]["kept_bytes"] == 12 * case["fastcross, L = 1"]["kept_bytes"]


@pytest.mark.parametrize("rival", SHAPES, ids=lambda rival: rival.name)
def test_whole_models_compute_the_same_before_they_are_timed(rival):
    pytest.importorskip(rival.peer.path.split(".")[0])
    shape = SHAPES[rival]
    case = run(TrainingStep(shape, rival), OURS, rival, same_adam(rival), WHOLE_TABLE_ADAM)
    assert len(case["contestants"]) == 4
    assert all("cross weight" in record["errors"] for record in case["contestants"].values())
    assert not run(TrainingStep(shape), OURS, EAGER, DNN)["missing"]
    case = run(Request(shape), OURS, EAGER, rival)
    assert len(case["contestants"][rival.name]["times"]) == 20


@pytest.mark.parametrize("rival", SHAPES, ids=lambda rival: rival.name)
def test_the_same_adam_makes_the_same_steps(rival):
    """Rows that no batch names keep their values, and after three steps all tables and layers agree with ours."""
    pytest.importorskip(rival.peer.path.split(".")[0])
    shape = replace(SHAPES[rival], cardinality=500)
    ours, theirs = shape.model(sparse_gradients=True), rivals.their_model(same_adam(rival), shape)
    before = [embedding.weight.detach().clone() for embedding in rivals.embeddings(theirs.module)]
    from benchmarks.workloads.steps import our_step, their_step

    for step in (our_step(ours, shape), their_step(theirs, shape, lazy_adam=True)):
        for _ in range(3):
            step()
    kept = [(a == b.weight).all(1) for a, b in zip(before, rivals.embeddings(theirs.module), strict=True)]
    assert 0 < sum(int(rows.sum()) for rows in kept) < sum(len(rows) for rows in kept)
    for what, (our_names, their_names) in rivals.RIVALS[rival.peer].places(shape).items():
        a = torch.cat([ours.get_parameter(name).flatten() for name in our_names])
        b = torch.cat([theirs.module.get_parameter(name).flatten() for name in their_names])
        # Adam divides by the gradient's size: where that is all rounding, a step of lr in either direction is right.
        assert ((a - b).abs() > 1e-4).float().mean() < 0.01, what


def test_a_model_with_other_weights_is_refused(monkeypatch):
    pytest.importorskip("torchfm")
    rival, shape = rivals.RIVALS[TORCHFM.peer], SHAPES[TORCHFM]
    places = {what: names for what, names in rival.places(shape).items() if what != "deep 0"}
    monkeypatch.setitem(rivals.RIVALS, TORCHFM.peer, replace(rival, places=lambda _: places))
    with pytest.raises(Refused, match="torchfm is wrong"):
        run(TrainingStep(shape, TORCHFM), TORCHFM)


def test_heights_of_tables_see_the_same_ids():
    case = run(Heights(replace(SHAPES[DEEPCTR], cardinality=10)), high(OURS, 10), high(OURS, 1000))["contestants"]
    assert [*case] == ["fastcross, 10 ids", "fastcross, 1,000 ids"]
