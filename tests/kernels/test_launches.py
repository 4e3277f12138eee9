"""What the launchers launch, seen without a GPU and without compiling: how often, and how many partial sums."""

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "") not in ("", "0"):
    pytest.skip("an interpreting process has no launches to look at", allow_module_level=True)

from benchmarks.static import embedding, host
from benchmarks.static.cases import BATCH, Case, draw, launches
from benchmarks.static.embedding import EmbeddingCase
from fastcross.kernels.gpu import launch
from fastcross.kernels.gpu.launch import Work

LAUNCHES = {
    "cross_layer_fwd": 1,
    "cross_layer_bwd": 2,
    "cross_network_fwd": 2,
    "cross_network_bwd": 2,
    "cross_logits_fwd": 3,
    "cross_logits_bwd": 2,
}


@pytest.mark.parametrize("operator", LAUNCHES)
@pytest.mark.parametrize("d", [54, 1026])
def test_number_of_launches(operator, d):
    made = launches(Case("sm_90", operator, d, 6, "fp32", "aligned"))
    assert len(made) == LAUNCHES[operator], [each.kernel for each in made]


def test_the_biases_of_logits_take_no_pass_over_rows():
    made = launches(Case("sm_90", "cross_logits_bwd", 1026, 6, "fp32", "aligned", needs=(False, False, True, False)))
    assert [each.kernel for each in made] == ["_recurrence_bwd_kernel", "_reduction_kernel"]


@pytest.mark.parametrize("operator", LAUNCHES)
def test_a_call_enters_few_functions(operator):
    """What no machine's load can move of its time in Python; ``benchmarks.static.host`` has the microseconds."""
    assert host.functions(operator) <= (60 if operator.endswith("fwd") else 75)


@pytest.mark.parametrize("bags", [0, 2])
def test_embedding_takes_one_launch_forward_and_two_beside_the_sort(bags):
    made = embedding.launches(EmbeddingCase("sm_90", "fp32", (16,) * 26, bags))
    assert [each.kernel for each in made] == ["_stack_fwd_kernel", "_sums_kernel", "_runs_kernel"]


@pytest.mark.parametrize("target", ["sm_90", "gfx1100"])
def test_only_nvidias_compiler_is_given_a_number_of_registers(target):
    """AMD's has no such option, and a launch with it would fail."""
    made = embedding.launches(EmbeddingCase(target, "fp32", (16,) * 4, 2))
    assert {launch.maxnreg for launch in made} == ({128, None} if target == "sm_90" else {None})


def test_embedding_is_compiled_once_for_bags_of_any_length():
    """Sizes that change from batch to batch are no part of what Triton compiles for."""
    cases = [EmbeddingCase("sm_90", "fp32", (4, 8), 1, values=values) for values in (1, 2, 16, 33, 4096)]
    assert len({tuple(embedding.launches(case)) for case in cases}) == 1


@pytest.mark.parametrize("layers", [6, 16, 64])
def test_long_rows_and_deep_networks_take_at_most_one_launch_more(layers):
    made = launches(Case("sm_90", "cross_network_bwd", 5000, layers, "fp32", "aligned"))
    assert len(made) <= 4, [each.kernel for each in made]


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_sums_of_the_logits_are_a_tenth_of_the_rows(dtype, size):
    made = launches(Case("sm_90", "cross_logits_bwd", 1026, 6, dtype, "aligned"))
    assert 0 < sum(each.sums for each in made) <= 0.1 * (2 * BATCH * 1026 * size)


def test_a_program_has_one_partial_sum():
    """Rows that lie side by side in a program are added up before they are stored."""
    rows, reduction = launches(Case("sm_90", "cross_network_bwd", 54, 6, "fp32", "aligned"))
    assert dict(rows.constexprs)["ROWS"] > 1
    parts = reduction.sums / ((6 + 1) * 64 * 4)
    assert parts <= BATCH / dict(rows.constexprs)["BLOCK_M"]


def test_a_seed_draws_the_same_cases():
    assert draw(5, 40) == draw(5, 50)[:40] != draw(6, 40)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("layers", [1, 16, 500])
def test_every_shape_has_a_plan_within_the_registers(itemsize, layers):
    for d in (1, 17, 129, 1026, 5000, 40000):
        for align in (1, 16 // itemsize):
            work = Work(itemsize, align, layers, 2, 3, sums=layers + 1, scalars=layers)
            for whole_rows in (True, False):
                plan = launch.backward(d, work, launch.Hardware(132, 32), whole_rows)
                assert plan.registers <= launch.MOST_REGISTERS
                assert plan.groups == 1 or not plan.whole_rows
                assert (plan.maxnreg or 0) * plan.num_warps * plan.resident <= launch.REGISTER_FILE
            # AMD's compiler takes no such option.
            assert launch.backward(d, work, launch.Hardware(132, 32, amd=True)).maxnreg is None
            one = launch.forward(d, work._replace(held=1, sums=0, scalars=0, dots=1), launch.Hardware(132, 32))
            assert one.registers <= launch.MOST_REGISTERS
