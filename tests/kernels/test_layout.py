"""The native interface: names are checked, what is packed is what a kernel unpacks, scratch is as large as is used."""

from pathlib import Path

import pytest
import torch

from fastcross.kernels import cpu as cpu_package
from fastcross.kernels.cpu import door, layer, layout, network, network_bwd
from fastcross.kernels.cpu import launchers as cpu
from fastcross.kernels.cpu.compile import compiled
from fastcross.kernels.cpu.layout import Layout, real, rows, whole, wide

ECHO = Layout(
    "echo",
    items="M",
    work=lambda n: 1 << 16,
    operands={
        "x": rows("M", "d"),
        "absent": whole("d", when="flag"),
        "ids": whole("M", kind="index"),
        "out": whole("n"),
    },
    sizes=("M", "d", "n", "flag"),
    derived={"twice": lambda n: 2 * n.d},
    scalars=("rate", "decay"),
    shared={"first": wide(lambda n: 3)},
    own={"mine": real(lambda n: 5), "other": wide(lambda n: 1)},
)
take_echo = ECHO.take


def echo(block):
    """Every value of the first chunk but the pointers, through which it reads or writes."""
    task = take_echo(block)
    task.first[0], task.mine[0], task.other[0] = 100, 200, 300
    out, x, ids = task.out, task.x, task.ids
    out[0], out[1], out[2], out[3], out[4], out[5] = (
        task.chunk,
        task.chunks,
        task.start,
        task.stop,
        task.own_bytes,
        task.M,
    )
    out[6], out[7], out[8], out[9], out[10], out[11] = (
        task.d,
        task.n,
        task.flag,
        task.twice,
        task.stride_x,
        x[task.stride_x],
    )
    out[12], out[13], out[14], out[15], out[16], out[17] = (
        ids[1],
        task.rate,
        task.decay,
        task.first[0],
        task.mine[0],
        task.other[0],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_sees_what_was_packed(dtype):
    x, ids, out = torch.randn(8, 9, dtype=dtype)[:, :7], torch.arange(8) + 40, torch.zeros(18, dtype=dtype)
    plan = ECHO.plan(dtype, 2, M=8, d=7, n=18, flag=0)
    task = plan.task(rate=0.1, ids=ids, x=x, out=out, absent=None, decay=0.25)
    compiled(echo, dtype)(task.block)
    expected = [0, 2, 0, 4, 128, 8, 7, 18, 0, 14, 9, x[1, 0], 41, 0.1, 0.25, 100, 200, 300]
    assert torch.equal(out, torch.tensor(expected, dtype=dtype))


def test_a_size_or_an_operand_that_is_missing_or_foreign_is_an_error():
    with pytest.raises(TypeError, match=r"echo needs the sizes \['M', 'd', 'flag', 'n'\]; got \['M', 'd', 'flag'\]"):
        ECHO.plan(torch.float32, 1, M=1, d=2, flag=0)
    plan = ECHO.plan(torch.float32, 1, M=1, d=2, n=18, flag=0)
    right = {"x": torch.zeros(1, 2), "ids": torch.zeros(1, dtype=torch.int64), "out": torch.zeros(18), "absent": None}
    right |= {"rate": 1.0, "decay": 1.0}
    plan.task(**right)
    for wrong in (
        {name: value for name, value in right.items() if name != "ids"},
        right | {"more": torch.zeros(1)},
        {("id" if name == "ids" else name): value for name, value in right.items()},
        {("decays" if name == "decay" else name): value for name, value in right.items()},
    ):
        with pytest.raises(TypeError, match=r"echo (needs '(ids|decay)'|knows nothing of \['more'\])"):
            plan.task(**wrong)


def test_a_name_that_is_declared_twice_is_an_error():
    with pytest.raises(TypeError, match="a name twice"):
        Layout(
            "double",
            items="M",
            work=lambda n: 1,
            operands={"x": whole("M")},
            sizes=("M",),
            own={"x": real(lambda n: 1)},
        )


def freed():
    t = torch.zeros(4, 6)
    t.untyped_storage().resize_(0)
    return t


WRONG = {
    "dtype": (lambda: torch.zeros(4, 6, dtype=torch.float64), TypeError),
    "device": (lambda: torch.zeros(4, 6, device="meta"), ValueError),
    "layout": (lambda: torch.zeros(4, 6).to_sparse(), ValueError),
    "shape": (lambda: torch.zeros(4, 5), ValueError),
    "dimensions": (lambda: torch.zeros(24), ValueError),
    "column stride": (lambda: torch.zeros(6, 4).T, ValueError),
    "memory": (freed, ValueError),
    "type": (lambda: None, TypeError),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("take", [door.address, door.address_of_rows])
def test_no_address_of_anything_else(take, case):
    make, error = WRONG[case]
    with pytest.raises(error, match=r"x0 must be .*\(4, 6\)"):
        take("x0", make(), torch.float32, (4, 6))


def test_rows_may_have_any_stride_and_others_none():
    padded = torch.zeros(4, 8)[:, :6]
    assert door.address_of_rows("x0", padded, torch.float32, (4, 6)) == (padded.data_ptr(), 8)
    column = torch.zeros(4, 8)[:, 3:4]
    assert door.address_of_rows("x0", column, torch.float32, (4, 1)) == (column.data_ptr(), 8)
    with pytest.raises(ValueError, match=r"contiguous.*got .*strides \(8, 1\)"):
        door.address("w", padded, torch.float32, (4, 6))
    with pytest.raises(ValueError, match="tables must be 2 tensors; got 1"):
        door.addresses("tables", [padded], torch.float32, [(4, 6), (4, 6)])


def test_no_other_file_takes_an_address():
    folder = Path(cpu_package.__file__).parent
    takers = {path.name for path in folder.glob("*.py") if "data_ptr" in path.read_text()}
    assert takers - {"embedding.py"} == {"door.py"}


def run_all(M, d, L, dtype):
    """Every operator, with every gradient."""
    x0, x, dy = (torch.randn(M, d, dtype=dtype) for _ in range(3))
    w, b, v, dz = (torch.randn(n, d, dtype=dtype) for n in (L, L, 3, M))
    cpu.cross_layer_fwd(x0, x, w[0], b[0])
    cpu.cross_layer_bwd(dy, x0, x, w[0], b[0], [True] * 4)
    _, p = cpu.cross_network_fwd(x0, w, b, True)
    cpu.cross_network_bwd(dy, x0, w, b, p, [True] * 3)
    dz = torch.randn(M, 3, dtype=dtype)
    _, p = cpu.cross_logits_fwd(x0, w, b, v, True)
    cpu.cross_logits_bwd(dz, x0, w, b, v, p, [True] * 4)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 2), (7, 33, 3), (21, 17, 1), (135, 9, 5), (2100, 130, 2)], ids=str)
def test_nothing_is_written_outside_the_pieces_of_scratch(shape, monkeypatch):
    """Between the pieces lies a gap, which stays as it was."""
    for each in (layer.FORWARD, layer.BACKWARD, network.FORWARD, network_bwd.BACKWARD):
        each.plan.cache_clear()
    monkeypatch.setattr(layout, "ALIGNMENT", 4096)
    monkeypatch.setattr(layout, "WORK_PER_THREAD", 1 << 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    plans, memories, names = [], [], set()
    place, take = layout.Plan._place, door.scratch
    monkeypatch.setattr(layout.Plan, "_place", lambda plan: plans.append(plan) or place(plan))

    def scratch(size):
        memory, start = take(size)
        memories.append(memory.fill_(0xA5))
        return memory, start

    monkeypatch.setattr(layout, "scratch", scratch)
    for dtype in (torch.float32, torch.float64):
        run_all(*shape, dtype)
    assert len(plans) == len(memories) == 12
    for plan, memory in zip(plans, memories, strict=True):
        inside = torch.zeros(plan.bytes, dtype=torch.bool)
        shared = len(plan.layout.shared)
        end = plan.pieces[shared][1]
        own = (plan.bytes - end) // plan.chunks
        for i, (name, offset, size) in enumerate(plan.pieces):
            for chunk in range(plan.chunks if i >= shared else 1):
                inside[offset + chunk * own :][:size] = True
            names.add(name)
        assert bool((memory[~inside] == 0xA5).all()), (plan.layout.name, plan.dtype)
        assert not bool(inside.all())
    for each in (layer.FORWARD, layer.BACKWARD, network.FORWARD, network_bwd.BACKWARD):
        each.plan.cache_clear()
    assert {"sums", "totals", "packed", "spare_dx", "ends"} <= names
