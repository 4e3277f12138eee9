"""The native interface: names are checked, addresses are checked, what is packed is what a kernel unpacks."""

import weakref
from pathlib import Path

import pytest
import torch

from fastcross.kernels import cpu as cpu_package
from fastcross.kernels.cpu import door
from fastcross.kernels.cpu.compile import compiled
from fastcross.kernels.cpu.layout import Layout, real, rows, whole, wide
from fastcross.kernels.cpu.unpack import report

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
FINDER = Layout("finder", items="M", work=lambda n: 1, operands={"x": whole("M")}, sizes=("M",))
take_finder = FINDER.take


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


def finder(block):
    """Reports where x is not zero, the last first."""
    task = take_finder(block)
    for m in range(task.M - 1, -1, -1):
        if task.x[m] != 0:
            report(block, m)


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
    assert takers == {"door.py"}


def test_a_task_keeps_its_operands():
    """A kernel knows addresses only: what the caller has forgotten must not be freed before it runs."""
    plan = ECHO.plan(torch.float32, 1, M=1, d=2, n=18, flag=0)
    out = weakref.ref(kept := torch.zeros(18))
    task = plan.task(
        x=torch.zeros(1, 2), ids=torch.zeros(2, dtype=torch.int64)[:1], out=kept, absent=None, rate=1, decay=1
    )
    del kept
    assert out() is not None
    del task
    assert out() is None


def test_the_first_position_that_was_reported_counts():
    plan = FINDER.plan(torch.float32, 1, M=100)
    task = plan.task(x=torch.zeros(100))
    assert plan.found(task) == -1
    x = torch.zeros(100)
    x[[7, 30, 99]] = 1
    task = plan.task(x=x)
    compiled(finder, torch.float32)(task.block)
    assert plan.found(task) == 7
