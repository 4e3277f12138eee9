"""launch.py's model against the compiler: registers, resident programs, warp instructions and bytes per row.

Made with the pinned Triton. A release whose code the model no longer describes is noticed here, and not by plans that
spill or leave processors idle.
"""

import os
from unittest import mock

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "") not in ("", "0"):
    pytest.skip("an interpreting process cannot compile", allow_module_level=True)

from benchmarks.static.cases import DTYPES, Case, launches
from benchmarks.static.machine_code import compile_launch, longest_loop
from fastcross.kernels.gpu import launch as model

CASES = [
    Case("sm_80", "cross_network_bwd", 1026, 6, "fp32", "aligned"),
    Case("sm_80", "cross_network_bwd", 1026, 6, "fp32", "packed"),
    Case("sm_80", "cross_network_bwd", 972, 6, "mixed", "aligned"),
    Case("sm_80", "cross_network_bwd", 54, 16, "fp32", "aligned"),
    Case("sm_80", "cross_network_bwd", 172, 22, "mixed", "odd"),
    Case("sm_80", "cross_logits_bwd", 1026, 6, "bf16", "aligned"),
]


def predicted_and_compiled(case):
    with mock.patch.object(model, "backward", wraps=model.backward) as backward:
        launch = next(launch for launch in launches(case) if "cross_network_bwd" in launch.kernel)
    return model.backward(*backward.call_args.args), launch, compile_launch(launch, count_instructions=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operator} {case.d} {case.layers} {case.dtype}")
def test_prediction(case):
    plan, launch, code = predicted_and_compiled(case)
    assert code.spills == 0
    # The compiler gives what is over to loads ahead of their use, up to the next number of resident programs.
    assert abs(plan.registers - code.registers) <= 32
    given = -(-code.registers // 8) * 8
    assert plan.resident <= model.REGISTER_FILE // (given * launch.num_warps)
    per_row = code.loop * launch.num_warps / plan.BLOCK_M
    assert per_row == pytest.approx(plan.instructions, rel=0.25)
    moved = (code.reads + code.writes) * DTYPES[case.dtype][0].itemsize
    assert moved * case.d == (plan.bytes if plan.whole_rows else pytest.approx(plan.bytes, rel=1e-6))


def test_paper_shape_occupies_three_chunks_and_lets_three_programs_run():
    plan, launch, code = predicted_and_compiled(CASES[0])
    assert (plan.columns, plan.num_warps) == (1536, 4)
    assert model.REGISTER_FILE // (code.registers * launch.num_warps) == 3


@pytest.mark.parametrize("layout", ["aligned", "packed", "odd"])
def test_weights_lie_over_the_threads_as_rows_do(layout):
    """Per layer and row no more words go from thread to thread than a dot takes; per tile of a backward pass it waits
    as often as for one."""
    forward, backward = (Case("sm_80", f"cross_network_{way}", 1026, 6, "fp32", layout) for way in ("fwd", "bwd"))
    launch = next(launch for launch in launches(forward) if "cross_network_fwd" in launch.kernel)
    code = compile_launch(launch, count_instructions=True)
    assert 0 < code.shuffles / dict(launch.constexprs)["BLOCK_M"] <= 11
    assert predicted_and_compiled(backward)[2].barriers <= 3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_long_rows_stay_in_registers(dtype):
    """16 warps have the registers of an SM: d = 4096 and L = 6 move what the floor moves. AMD takes segments."""
    case = Case("sm_80", "cross_network_bwd", 4096, 6, dtype, "aligned")
    plan, launch, code = predicted_and_compiled(case)
    assert plan.whole_rows
    assert launch.num_warps == 16
    assert (code.spills, code.reads, code.writes) == (0, 2, 1)
    plan, _, code = predicted_and_compiled(case._replace(target="gfx1100"))
    assert not plan.whole_rows
    assert code.spills == 0


def test_rows_of_halves_leave_few_lanes_idle():
    plan, _, code = predicted_and_compiled(Case("sm_90", "cross_network_bwd", 1026, 6, "bf16", "aligned"))
    assert (plan.columns, plan.ALIGN) == (1536, 4)
    assert code.words == {64}


def test_scalars_come_before_the_dot():
    """After its barriers the backward pass reads nothing but the weights: 3 chunks of 6 layers."""
    case = Case("sm_90", "cross_network_bwd", 1026, 6, "fp32", "aligned")
    code = predicted_and_compiled(case)[2]
    assert code.late_loads == 18


def test_loops_are_counted_from_the_branch_back():
    sass = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;   /* 0x00 */
        /*0010*/                   FADD R2, R2, R3 ;        /* 0x00 */
        /*0020*/                   ISETP.GE P0, R2, R4 ;    /* 0x00 */
        /*0030*/              @!P0 BRA 0x10 ;               /* 0x00 */
        /*0040*/                   EXIT ;                   /* 0x00 */
        /*0050*/                   BRA 0x50;                /* 0x00 */
"""
    assert longest_loop(sass) == 3
