"""The cross operators on the CPU: allocate, split the rows over threads, call the compiled kernels.

The kernels are native functions without state, called through ctypes, which releases the interpreter lock. Sums over
the threads' rows join in the order of the rows, so results depend on the number of threads alone.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numba
import torch
from numba import types
from torch import Tensor

from fastcross.kernels import cpu_kernels
from fastcross.kernels.huge_pages import in_huge_pages
from fastcross.kernels.rows import accumulation_dtype, empty_rows
from fastcross.kernels.threads import run

# Multiply-adds below which a second thread (tens of microseconds to wake) costs more than it saves.
WORK_PER_THREAD = 1 << 19
# Pointers and integers of each kernel, in the order of its arguments.
_ARGUMENTS = {
    "cross_layer_fwd": (5, 8),
    "cross_layer_bwd": (6, 13),
    "cross_layer_finish": (2, 4),
    "cross_network_fwd": (5, 10),
    "cross_network_bwd": (6, 13),
    "cross_network_finish": (4, 7),
}


def cross_layer_fwd(x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    dtype = accumulation_dtype(x0, x, w, b)
    rows, x, w, b = x0.to(dtype), x.to(dtype), _parameter(w, dtype), _parameter(b, dtype)
    (M, d), y = rows.shape, in_huge_pages(empty_rows(rows))
    kernel = _compiled("cross_layer_fwd", dtype)
    pointers = (_ptr(rows), _ptr(x), _ptr(w), _ptr(b), _ptr(y))
    sizes = (d, rows.stride(0), x.stride(0), y.stride(0), b is not None)
    run(_chunks(M, 2 * d), lambda _, start, stop: kernel(*pointers, M, start, stop, *sizes))
    return y.to(x0.dtype)


def cross_layer_bwd(
    dy: Tensor, x0: Tensor, x: Tensor, w: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(x0, x, w)
    g, rows, x_rows, vector = dy.to(dtype), x0.to(dtype), x.to(dtype), _parameter(w, dtype)
    M, d = rows.shape
    dx0, dx = (
        in_huge_pages(empty_rows(t)) if needed else t.new_empty(0)
        for t, needed in zip((rows, x_rows), needs, strict=False)
    )
    dw, db = (vector.new_empty(d if needed else 0) for needed in needs[2:])
    chunks = _chunks(M, 4 * d)
    totals = torch.empty((len(chunks), 2 * d), dtype=torch.float64)
    kernel = _compiled("cross_layer_bwd", dtype)
    pointers = (_ptr(g), _ptr(rows), _ptr(x_rows), _ptr(vector), _ptr(dx0), _ptr(dx))
    strides = (g.stride(0), rows.stride(0), x_rows.stride(0), dx0.stride(0), dx.stride(0))
    address = totals.data_ptr()
    run(
        chunks,
        lambda i, start, stop: kernel(*pointers, address + 16 * d * i, M, start, stop, d, *strides, *needs),
    )
    finish = _compiled("cross_layer_finish", dtype)
    finish(_ptr(dw), _ptr(db), address, len(chunks), d, *needs[2:])
    return dx0.to(x0.dtype), dx.to(x.dtype), dw.to(w.dtype), db.to(w.dtype)


def cross_network_fwd(x0: Tensor, w: Tensor, b: Tensor | None, keep_p: bool) -> tuple[Tensor, Tensor]:
    return _network_fwd(x0, w, b, None, keep_p)


def cross_logits_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, keep_p: bool) -> tuple[Tensor, Tensor]:
    return _network_fwd(x0, w, b, v, keep_p)


def cross_network_bwd(
    dy: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, p: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    dx0, dw, db, _ = _network_bwd(dy, x0, w, b, None, p, [*needs, False])
    return dx0, dw, db


def cross_logits_bwd(
    dz: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, p: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _network_bwd(dz, x0, w, b, v, p, needs)


def _network_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor | None, keep_p: bool) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(x0, w, b, v)
    rows, w, b, v = x0.to(dtype), _parameter(w, dtype), _parameter(b, dtype), _parameter(v, dtype)
    (M, d), L, C = rows.shape, w.shape[0], 0 if v is None else v.shape[0]
    vectors = w if v is None else torch.cat((w, v))
    out = in_huge_pages(empty_rows(rows)) if v is None else rows.new_empty((M, C))
    p = rows.new_empty((L + C, M) if keep_p else 0)
    kernel = _compiled("cross_network_fwd", dtype)
    pointers = (_ptr(rows), _ptr(vectors), _ptr(b), _ptr(out), _ptr(p))
    sizes = (d, L, C, rows.stride(0), out.stride(0), b is not None, keep_p)
    run(_chunks(M, (L + C + 1) * d), lambda _, start, stop: kernel(*pointers, M, start, stop, *sizes))
    return out.to(x0.dtype), p


def _network_bwd(
    dout: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor | None, p: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(x0, w, b, v)
    g, rows, layers = dout.to(dtype), x0.to(dtype), _parameter(w, dtype)
    bias, head = _parameter(b, dtype), _parameter(v, dtype)
    (M, d), L, C = rows.shape, w.shape[0], 0 if v is None else v.shape[0]
    need_dx0, need_dvectors, need_db = needs[0], needs[1] or needs[3], needs[2]
    vectors = layers if head is None else torch.cat((layers, head))
    dx0 = in_huge_pages(empty_rows(rows)) if need_dx0 else rows.new_empty(0)
    dvectors = rows.new_empty((L + C, d) if need_dvectors else 0)
    db = rows.new_empty((L, d) if need_db else 0)
    chunks = _chunks(M, (2 * (L + C) + 3) * d)
    totals = torch.empty((len(chunks), (L + C + 1) * d + L + C), dtype=torch.float64)
    kernel = _compiled("cross_network_bwd", dtype)
    pointers = (_ptr(g), _ptr(rows), _ptr(vectors), _ptr(bias), _ptr(p), _ptr(dx0))
    sizes = (d, L, C, g.stride(0), rows.stride(0), dx0.stride(0), bias is not None, need_dx0, need_dvectors, need_db)
    address, size = totals.data_ptr(), 8 * totals.shape[1]
    run(chunks, lambda i, start, stop: kernel(*pointers, address + size * i, M, start, stop, *sizes))
    if need_dvectors or need_db:
        finish = _compiled("cross_network_finish", dtype)
        shared = (len(chunks), d, L, C, bias is not None, need_dvectors, need_db)
        finish(_ptr(vectors), _ptr(bias), _ptr(dvectors), _ptr(db), address, *shared)
    dw = dvectors[:L] if needs[1] else rows.new_empty(0)
    dv = dvectors[L:].clone() if needs[3] else rows.new_empty(0)  # a copy, since results may not share memory
    return dx0.to(x0.dtype), dw.to(w.dtype), db.to((w if b is None else b).dtype), dv.to((w if v is None else v).dtype)


def _parameter(t: Any, dtype: torch.dtype) -> Any:
    return None if t is None else t.to(dtype).contiguous()


def _ptr(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _chunks(M: int, work: int) -> list[tuple[int, int]]:
    """Ranges of rows, one per thread; a single one where the work is small."""
    count = min(torch.get_num_threads(), M * work // WORK_PER_THREAD)
    if count < 2:
        return [(0, M)]
    step = -(-M // (4 * count)) * 4
    return [(start, min(start + step, M)) for start in range(0, M, step)]


@functools.cache
def _compiled(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """The kernel for one dtype as a native function, compiled once per machine where a cache can be written."""
    real = types.float32 if dtype == torch.float32 else types.float64
    pointers, integers = _ARGUMENTS[name]
    totals = () if name.endswith("fwd") else (types.CPointer(types.float64),)
    operands = (types.CPointer(real),) * pointers
    signature = types.void(*operands, *totals, *(types.int64,) * integers)
    function = getattr(cpu_kernels, name)
    try:
        native = numba.cfunc(signature, cache=True, **cpu_kernels.OPTIONS)(function)
    except RuntimeError:  # nowhere to keep the cache: neither the package's folder nor the user's can be written
        native = numba.cfunc(signature, **cpu_kernels.OPTIONS)(function)
    prototype = ctypes.CFUNCTYPE(None, *(ctypes.c_void_p,) * (pointers + len(totals)), *(ctypes.c_int64,) * integers)
    call: Any = prototype(native.address)  # type: ignore[arg-type]
    call.native = native  # keeps the machine code alive
    return call
