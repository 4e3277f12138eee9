"""Every Triton kernel compiles for every target: no spills, 128-bit words, rows moved as the floor asks.

The whole grid is ``python -m benchmarks.static.offline``. Here: the paper's shape on all targets, all of its shapes on
one target of each vendor. Made with the pinned Triton; numbers move between its releases.
"""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "") not in ("", "0"):
    pytest.skip("an interpreting process cannot compile", allow_module_level=True)

from benchmarks.static import drawn, embedding, multiplicative, offline, row_updates
from benchmarks.static.cases import FLOOR, TARGETS, Case, draw
from benchmarks.static.machine_code import Code, compile_launch
from benchmarks.static.offline import WIDTHS


def faults(cases):
    return [f"{case}: {'; '.join(wrong)}" for case, _, wrong in offline.survey(cases) if wrong]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_paper_shape_on_every_target(dtype):
    assert not faults([Case(target, operator, 1026, 6, dtype, "aligned") for target in TARGETS for operator in FLOOR])


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_every_shape(target):
    operators = ("cross_network_fwd", "cross_network_bwd")
    assert not faults([Case(target, operator, d, 8, "fp32", "aligned") for d in WIDTHS for operator in operators])


def test_packed_rows_take_the_words_their_stride_allows():
    cases = [Case("sm_90", "cross_network_fwd", d, 1, "fp32", "packed") for d in (1026, 429, 624)]
    lines = [line for _, line, wrong in offline.survey(cases, processes=1) if not wrong]
    assert [line[offline.COLUMNS.index("word")] for line in lines] == ["64", "32", "128"]


def test_cases_drawn_at_random_do_not_spill():
    """A slice of the thousand that ``python -m benchmarks.static.drawn`` compiles; its passes over rows only."""
    found = list(drawn.spills(draw(drawn.SEED, 60), processes=2, rows_only=True))
    found += drawn.spills(embedding.draw(drawn.SEED, 8), processes=2)
    assert not found, f"seed {drawn.SEED}: {found}"


def test_bags_that_once_spilled():
    """Rows of one narrow word, and five bags."""
    widths = (2,) * 27
    assert not list(drawn.spills([embedding.EmbeddingCase("sm_90", "bf16", widths, bags=5, height=200)]))


def test_cases_that_once_spilled():
    """One of each class that other seeds have found."""
    some = {"outputs": 1, "bias": True, "needs": (True, True, True)}
    cases = [
        Case("gfx1100", "cross_network_bwd", 3013, 4, "mixed", "packed", **some),  # segments, with a dot before
        Case("gfx1100", "cross_network_bwd", 366, 17, "fp16/32", "packed", **some),  # narrow words, many layers
        Case("gfx1100", "cross_network_bwd", 160, 25, "fp32", "aligned", **some),  # segments, many layers
        Case("gfx1100", "cross_logits_bwd", 6952, 5, "mixed", "packed", outputs=7, bias=False),  # many outputs
        Case("sm_90", "cross_network_bwd", 7058, 1, "fp64", "odd", **some),  # a reduction in float64
        Case("sm_80", "cross_network_fwd", 32, 14, "fp64", "aligned", **some),  # parameters packed in float64
        Case("sm_90", "cross_network_bwd", 1247, 3, "mixed", "aligned", **some),  # the compiler wants more programs
        Case("sm_90", "cross_logits_bwd", 25, 31, "fp16", "packed", outputs=7, bias=False),  # a deep head's scalars
        Case("sm_90", "cross_logits_bwd", 8, 13, "fp16/32", "aligned", keep_p=False),  # groups of layers
        Case("sm_80", "cross_layer_fwd", 82, 11, "fp16", "aligned"),  # a forward pass
    ]
    assert not list(drawn.spills(cases))


def test_faults_are_named():
    case = Case("sm_90", "cross_network_fwd", 1026, 6, "fp32", "aligned")
    good = Code(registers=100, spills=0, words=frozenset({128}), reads=1, writes=1)
    assert offline.describe(case, [good])[1] == []
    bad = Code(registers=255, spills=16, words=frozenset({32, 128}), reads=2, writes=1)
    assert offline.describe(case, [bad])[1] == ["spills 16", "words of 32 bits", "moves 2 + 1, floor 1 + 1"]


def test_command_narrows_and_explains_itself(capsys):
    with pytest.raises(SystemExit, match="0"):
        offline.main(["--help"])
    assert "--targets" in capsys.readouterr().out
    narrowed = ["--targets=sm_80", "--kernels=cross_layer_fwd", "--shapes=54", "--layers=1", "--dtypes=fp32"]
    assert offline.main(narrowed) == 0
    assert "1 case: no spills" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx1100"])
def test_row_updates_do_not_spill(target):
    """One launch each, with few of a thread's registers: rows lie anywhere, and warps hide the way to them.
    No byte of a row moves in a word narrower than the rows allow."""
    every = row_updates.cases([target], ["fp32", "bf16"])
    chosen = [case for case in every if case.on_device and case.widths in row_updates.WIDTHS[:3:2]]
    found = list(row_updates.survey(chosen))
    assert {case.update for case, _ in found} == set(row_updates.UPDATES)
    # bfloat16 of odd widths moves in single elements, each with an address and a mask of its own.
    most = {case: 192 if case.dtype == "bf16" and case.widths[0] % 2 else 128 for case, _ in found}
    assert not [(case, code) for case, code in found if case.wrong(code) or code.registers > most[case]]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx1100"])
def test_embedding_kernels_do_not_spill(target):
    """And move words as wide as the tables' rows allow; ``python -m benchmarks.static.embedding`` has all targets."""
    paper = embedding.EmbeddingCase(target, "bf16", embedding.WIDTHS[1], bags=1, pooling="sum", height=2**31)
    usual = [case for case in embedding.grid((target,), ("fp32",)) if case.widths != embedding.WIDTHS[2]]
    short = embedding.EmbeddingCase(target, "bf16", embedding.WIDTHS[4], bags=1, ids=torch.int32)
    found = list(embedding.survey([*usual, paper, short]))
    assert {launch.kernel for _, launch, _, _ in found} == {"_stack_fwd_kernel", "_sums_kernel", "_runs_kernel"}
    assert not [(case, launch.kernel, wrong) for case, launch, _, wrong in found if wrong]


@pytest.mark.parametrize("target", sorted({*TARGETS} - {"sm_80", "sm_90", "gfx1100"}))
def test_tables_on_every_other_target(target):
    """The kernels of tables that have the least registers to spare: the sums of gradients, and Adam."""
    shapes = (("fp32", embedding.WIDTHS[0], 0), ("bf16", embedding.WIDTHS[0], 2), ("bf16", embedding.WIDTHS[1], 2))
    cases = [embedding.EmbeddingCase(target, *shape) for shape in shapes]
    made = [(case, launch) for case in cases for launch in embedding.launches(case) if launch.kernel == "_sums_kernel"]
    adam = row_updates.Case(target, "adam", "fp16", row_updates.WIDTHS[1], on_device=True)
    *sums, rows = map(compile_launch, [*(launch for _, launch in made), *row_updates.launches(adam)])
    assert len(sums) == 3
    assert not [(case, code) for (case, _), code in zip(made, sums, strict=True) if code.spills]
    assert not any(code.narrow(case.word) for (case, _), code in zip(made, sums, strict=True))
    assert not adam.wrong(rows)


@pytest.mark.parametrize(("target", "dtype"), [("sm_80", "tf32"), ("sm_90", "bf16"), ("gfx942", "bf16")])
def test_dcn_v2_kernels(target, dtype):
    """No spills, GEMMs on tensor cores where there are some, and rows moved as often as the docstrings say."""
    found = list(multiplicative.survey(multiplicative.cases([target], [dtype])))
    kernels = [(case, launch, code) for case, _, made in found for launch, code in made]
    assert not [
        (case, launch.kernel, wrong)
        for case, launch, code in kernels
        if (wrong := multiplicative.faults(case, launch, code))
    ]
    totals = {
        f"{case.operator}_{suffix}": sum(multiplicative.moved(*each) for each in made) for case, suffix, made in found
    }
    row = multiplicative.BATCH * 1026 * multiplicative.DTYPES[dtype].itemsize
    assert totals["cross_matrix_fwd"] == 6 * row
    assert totals["cross_matrix_bwd"] == 17 * row
