"""The native interface: names are checked, addresses are checked, what is packed is what a kernel unpacks."""

import weakref
from pathlib import Path

import pytest
import torch

from fastcross.kernels import cpu as cpu_package
from fastcross.kernels.cpu import door, plan
from fastcross.kernels.cpu.compile import compiled
from fastcross.kernels.cpu.fields import fresh, real, rows, rows_like, whole, wide
from fastcross.kernels.cpu.layout import Layout
from fastcross.kernels.cpu.native.unpack import report, take
from fastcross.kernels.cpu.plan import WORD_OF_FOUND, found

BASE = Layout(
    "base",
    items="M",
    work=lambda n: 1 << 16,
    operands={"x": rows("M", "d"), "absent": whole("d", optional=True), "ids": whole("M", kind="index")},
    sizes=("flag",),
    derived={"twice": lambda n: 2 * n.d},
    scalars=("rate",),
    shared={"first": wide(lambda n: 3)},
)
ECHO = Layout(
    "echo",
    extends=BASE,
    items="M",
    work=BASE.work,
    operands={"out": whole("n")},
    results={"y": rows_like("x", "M", "d"), "z": fresh("d", when="flag")},
    scalars=("decay",),
    own={"mine": real(lambda n: 5), "other": wide(lambda n: 1)},
    kernels=("test.echo",),
)
FINDER = Layout("finder", items="M", work=lambda n: 1, operands={"x": whole("M")})
take_base, take_echo, take_finder = take(BASE), take(ECHO), take(FINDER)


def echo(block):
    """Every value of the first chunk but the pointers, through which it reads or writes."""
    task = take_echo(block)
    task.first[0], task.mine[0], task.other[0], task.y[task.stride_y] = 100, 200, 300, 400
    out, x, ids = task.out, task.x, task.ids
    out[0], out[1], out[2], out[3] = task.chunk, task.chunks, task.start, task.stop
    out[4], out[5], out[6], out[7] = task.own_bytes, task.M, task.d, task.n
    out[8], out[9], out[10], out[11] = task.flag, task.twice, task.stride_x, x[task.stride_x]
    out[12], out[13], out[14], out[15] = ids[1], task.rate, task.decay, task.first[0]
    out[16], out[17], out[18], out[19] = task.mine[0], task.other[0], task.has_absent, task.stride_y


def base(block):
    """A kernel of the layout that another extends, on a task of that one."""
    task = take_base(block)
    task.x[0] = task.twice + task.rate + task.ids[0]


def finder(block):
    """Reports where x is not zero, the last first."""
    task = take_finder(block)
    for m in range(task.M - 1, -1, -1):
        if task.x[m] != 0:
            report(block, m)


@pytest.fixture
def right():
    return {
        "x": torch.randn(8, 9)[:, :7],
        "absent": None,
        "ids": torch.arange(8) + 40,
        "out": torch.zeros(20),
        "flag": 0,
        "rate": 0.1,
        "decay": 0.25,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_sees_what_was_packed(right, dtype, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, out = right["x"].to(dtype), right["out"].to(dtype)
    task = ECHO.task(dtype, **right | {"x": x, "out": out})
    compiled(echo, dtype)(task.block)
    expected = [0, 2, 0, 4, 128, 8, 7, 20, 0, 14, x.stride(0), x[1, 0], 41, 0.1, 0.25, 100, 200, 300, 0]
    y, z = task.results
    assert torch.equal(out, torch.tensor([*expected, y.stride(0)], dtype=dtype))
    assert (y.shape, y.stride(), y[1, 0], z) == (x.shape, x.stride(), 400, None)
    compiled(base, dtype)(task.block)
    assert x[0, 0] == torch.tensor(54.1, dtype=dtype)


def test_a_value_that_is_missing_or_foreign_is_an_error(right):
    ECHO.task(torch.float32, **right)
    for missing in right:
        with pytest.raises(TypeError, match=f"echo needs '{missing}'"):
            ECHO.task(torch.float32, **{name: value for name, value in right.items() if name != missing})
    with pytest.raises(TypeError, match=r"echo needs 7 operands, sizes and scalars; got .*'more'"):
        ECHO.task(torch.float32, more=torch.zeros(1), **right)


def test_operands_agree_on_their_sizes(right):
    with pytest.raises(ValueError, match=r"ids must be torch.int64 on cpu, \(8\), contiguous; got .*\(9,\)"):
        ECHO.task(torch.float32, **right | {"ids": torch.arange(9)})
    with pytest.raises(TypeError, match=r"ids must be .*; got NoneType"):
        ECHO.task(torch.float32, **right | {"ids": None})


def test_another_call_of_the_same_sizes_is_checked_anew(right):
    """A plan that was made for one tensor is not taken for another whose dtype, device, layout or strides differ."""
    ECHO.task(torch.float32, **right)
    for wrong in (
        torch.zeros(8, 7, dtype=torch.float64),
        torch.zeros(8, 7, device="meta"),
        torch.zeros(7, 8).T,
        torch.zeros(8, 7).to_sparse(),
        torch.zeros(8, 6),
    ):
        more = {"absent": torch.zeros(7)} if wrong.shape[1] == 6 else {}
        with pytest.raises((TypeError, ValueError), match=r"(x|absent) must be "):
            ECHO.task(torch.float32, **right | {"x": wrong} | more)


CHANGES = {
    "data": lambda t: setattr(t, "data", torch.zeros(5, 7)),
    "set_": lambda t: t.set_(torch.zeros(3, 7)),
    "resize_": lambda t: t.resize_(4, 7),
    "dtype": lambda t: setattr(t, "data", torch.zeros(8, 7, dtype=torch.float64)),
    "strides": lambda t: t.set_(t.untyped_storage(), 0, (8, 7), (1, 8)),
    "freed": lambda t: t.untyped_storage().resize_(0),
    "cut": lambda t: t.untyped_storage().resize_(8 * 7 * 4 - 4),
}


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_was_changed_since_the_last_call_is_checked_anew(right, change, offset):
    x = torch.zeros(offset + 56)[offset:].view(8, 7)
    ECHO.task(torch.float32, **right | {"x": x})
    CHANGES[change](x)
    with pytest.raises((TypeError, ValueError), match=r"(x|ids) must (be|have) "):
        ECHO.task(torch.float32, **right | {"x": x})


def test_an_expanded_tensor_is_read_in_its_own_memory(right):
    """Its shape is that of the call before; its memory is a single row."""
    ECHO.task(torch.float32, **right | {"x": torch.zeros(8, 7)})
    task = ECHO.task(torch.float32, **right | {"x": torch.ones(1, 7).expand(8, 7)})
    compiled(echo, torch.float32)(task.block)
    assert (right["out"][10], right["out"][11]) == (0, 1)


def test_a_name_that_is_declared_twice_is_an_error():
    with pytest.raises(TypeError, match="a name twice"):
        Layout(
            "double",
            items="M",
            work=lambda n: 1,
            operands={"x": whole("M")},
            own={"x": real(lambda n: 1)},
        )


def freed():
    t = torch.zeros(4, 6)
    t.untyped_storage().resize_(0)
    return t


def part_of_what_was_freed():
    """PyTorch gives it an address, its offset from nothing, and crashes itself when it adds 1 to it."""
    t = torch.zeros(6, 6)[2:]
    t.untyped_storage().resize_(0)
    return t


def cut():
    t = torch.zeros(4, 6)
    t.untyped_storage().resize_(4 * 6 * 4 - 1)
    return t


WRONG = {
    "dtype": (lambda: torch.zeros(4, 6, dtype=torch.float64), TypeError),
    "device": (lambda: torch.zeros(4, 6, device="meta"), ValueError),
    "layout": (lambda: torch.zeros(4, 6).to_sparse(), ValueError),
    "shape": (lambda: torch.zeros(4, 5), ValueError),
    "dimensions": (lambda: torch.zeros(24), ValueError),
    "column stride": (lambda: torch.zeros(6, 4).T, ValueError),
    "memory": (freed, ValueError),
    "memory of another": (part_of_what_was_freed, ValueError),
    "less memory": (cut, ValueError),
    "type": (lambda: None, TypeError),
}


def take_address(name, t, dtype, shape, are_rows):
    door.check(name, t, dtype, shape, are_rows)
    return door.addresses_of([name], [t], [door.reach(t)])


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("are_rows", [False, True])
def test_no_address_of_anything_else(are_rows, case):
    make, error = WRONG[case]
    t = make()
    with pytest.raises(error, match=r"x0 must (be .*\(4, 6\)|have memory)"):
        take_address("x0", t, torch.float32, (4, 6), are_rows)


@pytest.mark.parametrize("case", WRONG)
def test_no_table_of_anything_else(case):
    make, error = WRONG[case]
    with pytest.raises(error, match=r"tables must (be .*\(4, 6\)|have memory)"):
        door.table_of("tables", [torch.zeros(4, 6), make()], torch.float32, [(4, 6), (4, 6)])


def test_rows_may_have_any_stride_and_others_none():
    padded, column = torch.zeros(4, 8)[:, :6], torch.zeros(4, 8)[:, 3:4]
    door.check("x0", padded, torch.float32, (4, 6), are_rows=True)
    door.check("x0", column, torch.float32, (4, 1), are_rows=True)
    with pytest.raises(ValueError, match=r"contiguous.*got .*strides \(8, 1\)"):
        door.check("w", padded, torch.float32, (4, 6))
    with pytest.raises(ValueError, match="tables must be 2 tensors; got 1"):
        door.table_of("tables", [padded], torch.float32, [(4, 6), (4, 6)])


def test_no_other_file_takes_an_address():
    folder = Path(cpu_package.__file__).parent
    takers = {path.name for path in folder.rglob("*.py") if "data_ptr" in path.read_text()}
    assert takers == {"door.py"}


def test_a_task_keeps_its_operands(right):
    """A kernel knows addresses only: what the caller has forgotten must not be freed before it runs."""
    out = weakref.ref(right["out"])
    task = ECHO.task(torch.float32, **right)
    right.clear()
    assert out() is not None
    del task
    assert out() is None


def test_two_tasks_at_once_share_neither_block_nor_memory(right):
    first, second = ECHO.task(torch.float32, **right), ECHO.task(torch.float32, **right)
    assert first.block is not second.block
    assert first.memory.data_ptr() != second.memory.data_ptr()


def test_calls_one_after_another_share_block_and_memory(right, monkeypatch):
    """And each begins at the first chunk, with nothing found."""
    seen = []

    def kernel(block):
        seen.append((block, block[0], block[WORD_OF_FOUND]))
        block[0], block[WORD_OF_FOUND] = 7, 3

    monkeypatch.setattr(plan, "compiled", lambda name, dtype: kernel)
    monkeypatch.setattr(plan, "run_in_turn", lambda steps: steps[0][0])  # a kernel that is Python's
    torch.set_num_threads(1)
    ECHO.forget()
    for _ in range(2):
        ECHO.run(**right)
    (first, *before), (second, *again) = seen
    assert first is second
    assert before == again == [0, -1]


def test_the_first_position_that_was_reported_counts():
    task = FINDER.task(torch.float32, x=torch.zeros(100))
    assert found(task) == -1
    x = torch.zeros(100)
    x[[7, 30, 99]] = 1
    task = FINDER.task(torch.float32, x=x)
    compiled(finder, torch.float32)(task.block)
    assert found(task) == 7
