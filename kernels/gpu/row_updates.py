"""Triton: updates of the rows of tables, one launch for all tables of a dtype.

    adam_rows      m += (1-β₁)(g-m),  v += (1-β₂)(g²-v),  w = shrink w - rate m / (√v scale + ε)
    adagrad_rows   s += g², or mean(g²) for a whole row,  w -= lr g / (√s + ε)
    sgd_rows       w -= lr g

with rate = lr / (1-β₁^step), scale = (1-β₂^step)^-½ and shrink = 1 - lr · weight_decay. A gradient's rows are ascending
and may repeat. Only a row's first entry, its head, is read, and rows outside the table are skipped. A program processes
BLOCK_M entries of one table of any width, BLOCK_N columns at a time. Per row of n_e elements: Adam reads 4 n_e and
writes 3 n_e, Adagrad 3 and 2, SGD 2 and 1 (row-wise Adagrad reads g twice, the second time from a cache), and for each
entry its row and the one before it. Arithmetic is in float32 for all dtypes. Rows of thousands of columns are slow,
because one program processes each of them.

The tables' addresses and sizes are in an int64 tensor on the device. It is made once per set of tables, moments and
places of gradients, and cached, so that a step copies nothing to the device. A gradient's place is relative to the
first table's, which is constant if all gradients are slices of one buffer. ``_check`` alone ensures that these
addresses are valid for the kernels.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels import row_updates as plain
from fastcross.kernels.gpu import launch as plans
from fastcross.kernels.row_updates import RowGradient


@triton.jit
def _field(tables_ptr, k, K, FIELD: tl.constexpr):
    return tl.load(tables_ptr + FIELD * K + k)


@triton.jit
def _pointer(tables_ptr, k, K, FIELD: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    pointer = _field(tables_ptr, k, K, FIELD).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, ALIGN * (DTYPE.primitive_bitwidth // 8))


@triton.jit
def _open(
    tables_ptr, rows_ptr, g_ptr, K,
    DTYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """A program's table k, its width, its rows of w and of g, and the row that each entry updates, if any."""
    offs_k = tl.arange(0, BLOCK_K)
    programs = tl.load(tables_ptr + offs_k, mask=offs_k < K, other=2**31)
    k = tl.sum((programs <= tl.program_id(0)).to(tl.int32), 0) - 1
    offs_m = (tl.program_id(0) - _field(tables_ptr, k, K, 0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    height, width = _field(tables_ptr, k, K, 1), _field(tables_ptr, k, K, 2).to(tl.int32) // ALIGN * ALIGN
    mask_m = offs_m < _field(tables_ptr, k, K, 3)
    rows_ptr += _field(tables_ptr, k, K, 4)
    row = tl.load(rows_ptr + offs_m, mask=mask_m, other=-1)
    before = tl.load(rows_ptr + offs_m - 1, mask=mask_m & (offs_m > 0), other=-1)
    is_head = (row != before) & (row >= 0) & (row < height)
    g_rows = g_ptr + _field(tables_ptr, k, K, 5) // ALIGN * ALIGN + (offs_m * width)[:, None]
    w_rows = _pointer(tables_ptr, k, K, 6, DTYPE, ALIGN) + (row * width)[:, None]
    return k, width, row, is_head[:, None], w_rows, g_rows


@triton.jit
def _correction(step, log_beta):
    """1 - β^step = -expm1(step ln β), by its series if the difference would lose digits."""
    x = step * log_beta
    series = 1.0
    for i in tl.static_range(8):
        series = 1.0 + x * series / (9 - i)
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def _sgd_rows_kernel(
    # pointers
    tables_ptr, rows_ptr, g_ptr, lr_ptr,
    # sizes
    K,
    # scalars
    lr,
    # constexprs
    DTYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    _, width, _, is_head, w_rows, g_rows = _open(tables_ptr, rows_ptr, g_ptr, K, DTYPE, ALIGN, BLOCK_K, BLOCK_M)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    for first in range(0, width, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)[None, :]
        mask = is_head & (offs_n < width)
        g = tl.load(g_rows + offs_n, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_rows + offs_n, mask=mask, other=0.0).to(tl.float32)
        tl.store(w_rows + offs_n, (w - lr * g).to(DTYPE), mask=mask)


@triton.jit
def _adam_rows_kernel(
    # pointers
    tables_ptr, rows_ptr, g_ptr, lr_ptr, step_ptr,
    # sizes
    K,
    # scalars
    rate, scale, shrink, decay1, decay2, eps, weight_decay, log_beta1, log_beta2,
    # constexprs
    DTYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    k, width, row, is_head, w_rows, g_rows = _open(tables_ptr, rows_ptr, g_ptr, K, DTYPE, ALIGN, BLOCK_K, BLOCK_M)
    m_rows = _pointer(tables_ptr, k, K, 7, DTYPE, ALIGN) + (row * width)[:, None]
    v_rows = _pointer(tables_ptr, k, K, 8, DTYPE, ALIGN) + (row * width)[:, None]
    if lr_ptr is not None:
        lr, step = tl.load(lr_ptr).to(tl.float32), tl.load(step_ptr).to(tl.float32)
        rate = lr / _correction(step, log_beta1)
        scale = 1.0 / tl.sqrt(_correction(step, log_beta2))
        shrink = 1.0 - lr * weight_decay
    for first in range(0, width, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)[None, :]
        mask = is_head & (offs_n < width)
        g = tl.load(g_rows + offs_n, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(m_rows + offs_n, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_rows + offs_n, mask=mask, other=1.0).to(tl.float32)
        w = tl.load(w_rows + offs_n, mask=mask, other=0.0).to(tl.float32)
        m += decay1 * (g - m)
        v += decay2 * (g * g - v)
        w = shrink * w - tl.div_rn(rate * m, tl.sqrt_rn(v) * scale + eps)
        tl.store(m_rows + offs_n, m.to(DTYPE), mask=mask)
        tl.store(v_rows + offs_n, v.to(DTYPE), mask=mask)
        tl.store(w_rows + offs_n, w.to(DTYPE), mask=mask)


@triton.jit
def _adagrad_rows_kernel(
    # pointers
    tables_ptr, rows_ptr, g_ptr, lr_ptr,
    # sizes
    K,
    # scalars
    lr, eps,
    # constexprs
    ROW_WISE: tl.constexpr,
    DTYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    k, width, row, is_head, w_rows, g_rows = _open(tables_ptr, rows_ptr, g_ptr, K, DTYPE, ALIGN, BLOCK_K, BLOCK_M)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    if ROW_WISE:
        squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, width, BLOCK_N):
            offs_n = first + tl.arange(0, BLOCK_N)[None, :]
            g = tl.load(g_rows + offs_n, mask=is_head & (offs_n < width), other=0.0).to(tl.float32)
            squares += g * g
        s_ptrs = (_pointer(tables_ptr, k, K, 7, DTYPE, 1) + row)[:, None]
        s = tl.load(s_ptrs, mask=is_head, other=1.0).to(tl.float32) + tl.sum(squares, 1)[:, None] / width
        tl.store(s_ptrs, s.to(DTYPE), mask=is_head)
    else:
        s_rows = _pointer(tables_ptr, k, K, 7, DTYPE, ALIGN) + (row * width)[:, None]
    for first in range(0, width, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)[None, :]
        mask = is_head & (offs_n < width)
        g = tl.load(g_rows + offs_n, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_rows + offs_n, mask=mask, other=0.0).to(tl.float32)
        if not ROW_WISE:
            s = tl.load(s_rows + offs_n, mask=mask, other=1.0).to(tl.float32) + g * g
            tl.store(s_rows + offs_n, s.to(DTYPE), mask=mask)
        w -= tl.div_rn(lr * g, tl.sqrt_rn(s) + eps)
        tl.store(w_rows + offs_n, w.to(DTYPE), mask=mask)


def adam_rows(
    tables: Sequence[Tensor],
    moments: Sequence[tuple[Tensor, Tensor]],
    gradients: Sequence[RowGradient],
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    step: int | Tensor,
    weight_decay: float = 0.0,
) -> None:
    """As :func:`fastcross.kernels.row_updates.adam_rows`."""
    if tables[0].dtype not in DTYPES:
        return plain.adam_rows(tables, moments, gradients, lr, betas, eps, step, weight_decay)
    first, second = ([pair[i] for pair in moments] for i in (0, 1))
    launch = launch_over(tables, gradients, first, second)
    scalars: tuple[float, ...] = (0.0, 0.0, 0.0)
    if isinstance(lr, Tensor) or isinstance(step, Tensor):
        lr, step = (_on_device(value, tables[0]) for value in (lr, step))
    else:
        corrections = [1 - beta**step for beta in betas]
        scalars = lr / corrections[0], corrections[1] ** -0.5, 1 - lr * weight_decay
    logarithms = [math.log(beta) if beta else -1e4 for beta in betas]  # exp of which is 0
    with torch.cuda.device_of(tables[0]):
        _adam_rows_kernel[(launch.programs,)](
            *launch.pointers(gradients), _tensor(lr), _tensor(step), len(tables),
            *scalars, *(1 - beta for beta in betas), eps, weight_decay, *logarithms,
            **launch.blocks, num_warps=WARPS,
        )  # fmt: skip


def adagrad_rows(
    tables: Sequence[Tensor],
    sums: Sequence[Tensor],
    gradients: Sequence[RowGradient],
    lr: float | Tensor,
    eps: float,
    row_wise: bool,
) -> None:
    """As :func:`fastcross.kernels.row_updates.adagrad_rows`."""
    if tables[0].dtype not in DTYPES:
        return plain.adagrad_rows(tables, sums, gradients, lr, eps, row_wise)
    launch = launch_over(tables, gradients, sums)
    with torch.cuda.device_of(tables[0]):
        _adagrad_rows_kernel[(launch.programs,)](
            *launch.pointers(gradients), _tensor(lr), len(tables), _number(lr), eps,
            ROW_WISE=row_wise, **launch.blocks, num_warps=WARPS,
        )  # fmt: skip


def sgd_rows(tables: Sequence[Tensor], gradients: Sequence[RowGradient], lr: float | Tensor) -> None:
    """As :func:`fastcross.kernels.row_updates.sgd_rows`."""
    if tables[0].dtype not in DTYPES:
        return plain.sgd_rows(tables, gradients, lr)
    launch = launch_over(tables, gradients)
    with torch.cuda.device_of(tables[0]):
        _sgd_rows_kernel[(launch.programs,)](
            *launch.pointers(gradients), _tensor(lr), len(tables), _number(lr), **launch.blocks, num_warps=WARPS
        )


def _tensor(value: float | Tensor) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def _number(value: float | Tensor) -> float:
    return 0.0 if isinstance(value, Tensor) else float(value)


def _on_device(value: float | Tensor, table: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float32, device=table.device)


DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
WARPS, MOST_COLUMNS = 4, 32  # of a program, and of its tile, which has one vector per thread
KEPT = 64  # launches


class RowLaunch(NamedTuple):
    tables: Tensor  # (fields, K): first program, height, width, entries, places of rows and values, addresses
    programs: int
    blocks: dict[str, Any]

    def pointers(self, gradients: Sequence[RowGradient]) -> tuple[Tensor, Tensor, Tensor]:
        """The tables, and the rows and values that the places are relative to."""
        return self.tables, *gradients[0]


_LAUNCHES: dict[tuple[Any, ...], RowLaunch] = {}
_CAPTURED: list[RowLaunch] = []  # a CUDA graph reads them as long as it lives


def launch_over(tables: Sequence[Tensor], gradients: Sequence[RowGradient], *kept: Sequence[Tensor]) -> RowLaunch:
    """The launch over these rows; ``kept`` are the tables' moments, or for each row of a table one."""
    rows, values = [each for each, _ in gradients], [each for _, each in gradients]
    places = _places(rows), _places(values)
    lists = {"tables": tables, "rows": rows, "values": values, **{f"moments {i}": each for i, each in enumerate(kept)}}
    addresses = tuple(tuple(t.data_ptr() for t in each) for each in (tables, *kept))
    key = addresses, places, values[0].data_ptr() % 16, *(tuple(map(_metadata, each)) for each in lists.values())
    found = _LAUNCHES.get(key)
    if found is None:
        _check(lists)
        while len(_LAUNCHES) >= KEPT:
            del _LAUNCHES[next(iter(_LAUNCHES))]
        found = _LAUNCHES[key] = _make(lists, places, addresses)
    if tables[0].is_cuda and torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(found)
    return found


def _make(lists: dict[str, Sequence[Tensor]], places: Any, addresses: Any) -> RowLaunch:
    tables, counts = lists["tables"], [len(rows) for rows in lists["rows"]]
    heights, widths = [table.shape[0] for table in tables], [table.shape[1] for table in tables]
    whole = [t for name, each in lists.items() if name != "rows" for t in each if t.dim() == 2]
    align = plans.word_of(tables[0].itemsize, widths, [t.data_ptr() for t in whole])
    columns = min(MOST_COLUMNS, triton.next_power_of_2(max(1, *widths)))
    threads = WARPS * plans.hardware_of(tables[0].device).warp_size
    entries = threads * plans.WORD // tables[0].itemsize // columns
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] + -(-count // entries))
    fields = [firsts[:-1], heights, widths, counts, *places, *addresses]
    blocks = {"BLOCK_K": triton.next_power_of_2(len(tables)), "BLOCK_M": entries, "BLOCK_N": columns}
    return RowLaunch(
        torch.tensor(fields, device="cpu").to(tables[0].device, non_blocking=True),  # blocking, it would wait
        firsts[-1],
        {"DTYPE": DTYPES[tables[0].dtype], "ALIGN": align, **blocks},
    )


def _places(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """In elements, relative to the first."""
    first = tensors[0].data_ptr()
    return tuple((t.data_ptr() - first) // t.itemsize for t in tensors)


def _metadata(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.device, t.layout, *t.shape, t.is_contiguous()


def _check(lists: dict[str, Sequence[Tensor]]) -> None:
    """Raises unless all tensors lie together and are as large as the kernels take them to be."""
    tables = lists["tables"]
    for name, tensors in lists.items():
        if len(tensors) != len(tables):
            raise ValueError(f"{name} must be {len(tables)} tensors; got {len(tensors)}")
        for t, table, rows in zip(tensors, tables, lists["rows"], strict=True):
            shapes = {"tables": table.shape, "rows": rows.shape[:1], "values": (len(rows), table.shape[1])}
            shape = tuple(shapes.get(name, table.shape[: t.dim()]))  # a moment is like its table, or like a column
            dtype = torch.int64 if name == "rows" else tables[0].dtype
            fits = t.dtype == dtype and t.shape == shape and t.device == tables[0].device
            if not (fits and t.layout is torch.strided and t.is_contiguous()):
                wanted = f"{dtype} on {tables[0].device}, {shape}, contiguous"
                raise ValueError(f"{name} must be {wanted}; got {t.dtype} on {t.device}, {tuple(t.shape)}")
            memory = t.untyped_storage()
            if t.numel() and t.data_ptr() + t.nbytes > memory.data_ptr() + memory.nbytes():
                raise ValueError(f"{name} must have memory of its own, {t.nbytes} bytes; got {memory.nbytes()}")
