"""A training step on the Triton path never waits for the device, and launches few kernels: counted without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "") not in ("", "0"):
    pytest.skip("launches are counted, not interpreted", allow_module_level=True)

from benchmarks.static.step import ALL, OURS, HostSync, count, counted, floor, make_step, table_rows
from fastcross import DCN


def test_a_step_waits_for_nothing_and_launches_little():
    """26 features as at the paper's size: the launches do not depend on sizes."""
    found = count(make_step(16, dims=(4,) * 26, deep=(8, 8)))
    assert 0 < found.operators["sort"] == 1
    assert found.kernels["_stack_fwd_kernel"] == found.kernels["_adam_rows_kernel"] == 1
    assert found.ours <= OURS == 16
    assert found.all <= ALL == 90
    assert count(make_step(40, dims=(4,) * 3, deep=(8, 8))).all == found.all  # as many for three features
    half = count(make_step(16, dims=(4,) * 26, deep=(8, 8), bf16=True))
    assert half.operators["_to_copy"] > found.operators["_to_copy"]
    assert half.ours == found.ours
    assert half.all <= ALL


@pytest.mark.parametrize("bags", [0, 2])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "clip_norm"), [("adam", 0.0), ("adamw", 1.0), ("sgd", 1.0)])
def test_no_step_that_can_be_captured_waits(name, clip_norm, bf16, bags):
    """Every optimiser of such steps, clipped or not; bags, with weights and without."""
    options = {"name": name, "clip_norm": clip_norm, "bf16": bf16, "bags": bags}
    found = count(make_step(16, dims=(4, 3, 8, 4), deep=(8,), **options))
    assert found.operators["sort"] == found.kernels["_stack_fwd_kernel"] == found.kernels["_sums_kernel"] == 1
    assert found.kernels["_sgd_rows_kernel" if name == "sgd" else "_adam_rows_kernel"] == 1
    assert found.ours <= OURS
    assert found.all <= ALL


def test_bytes_are_counted_by_kernel():
    """Near the floor: beyond it are the tables' gradients, written and read again, and little else."""
    rows, dims = 512, (39,) * 26
    found = count(make_step(rows, dims, deep=(8,)))
    assert {*found.bytes} == {*found.kernels, "sort"}
    gradients = 2 * 4 * rows * sum(dims)
    assert found.bytes.total() + table_rows(rows, dims) <= 1.12 * (floor(rows, dims) + gradients)


def values():
    return torch.tensor([0.0, 1.0, 2.0])


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t[0].item(),
        lambda t: bool(t[0]),
        lambda t: float(t[0]),
        lambda t: int(t[0]),
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: t.cpu(),
        lambda t: t.to("cpu"),
        lambda t: t.nonzero(),
        lambda t: torch.where(t > 0),
        lambda t: t.unique(),
        lambda t: torch.unique_consecutive(t),
        lambda t: t[t > 0],
        lambda t: t.masked_select(t > 0),
        lambda t: t.index_put_((t > 0,), t[:1]),
        lambda t: torch.equal(t, t.clone()),
        lambda t: torch.is_nonzero(t[:1]),
        lambda t: torch.sparse_coo_tensor(torch.zeros(1, 3).long(), t, (3,), check_invariants=False).coalesce(),
        lambda t: torch.repeat_interleave(t.long()),
    ],
)
def test_whatever_waits_is_found(wait):
    t = values()
    with counted(), pytest.raises(HostSync, match="the host would wait"):
        wait(t)


def test_what_does_not_wait_passes():
    t = values()
    with counted() as found:
        t.view(3, 1)[1:].unsqueeze(0).expand(4, 2, 1)
        torch.empty(5)
    assert found.all == 0
    with counted() as found:
        t.relu().sort()
    assert found.operators == {"relu": 1, "sort": 1}
    assert found.ours == 1


def test_autograd_takes_the_gradients_of_tables_over_without_a_copy():
    """Which the count takes for granted: under its own eyes PyTorch makes one."""
    model = DCN([9, 9], 1, 4, cross_layers=1, deep_layers=(4,), sparse_gradients=True, backend="torch")
    given = []
    for table in model.embedding.tables:
        table.register_hook(lambda gradient: given.append(gradient._values().data_ptr()))
    model(torch.zeros(3, 1), torch.tensor([[1, 2], [3, 4], [1, 1]])).sum().backward()
    assert sorted(given) == sorted(table.grad._values().data_ptr() for table in model.embedding.tables)


def test_training_in_the_interpreter():
    """A process of its own, since one either interprets or counts."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    file = Path(__file__).parent / "test_triton_step.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    run = subprocess.run(command, cwd=file.parents[2], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
