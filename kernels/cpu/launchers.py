"""The cross operators on the CPU: allocate, split the rows into chunks, hand them to the compiled kernels as a task.

Sums over the chunks' rows join in the order of the rows, so results depend on the number of threads alone, whichever of
them took which chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcross.kernels.cpu import layer as cpu_layer
from fastcross.kernels.cpu import network as cpu_network
from fastcross.kernels.cpu.buffers import empty_output
from fastcross.kernels.cpu.simd import lane_count
from fastcross.kernels.cpu.tasks import compiled, pack
from fastcross.kernels.cpu.threads import run_task
from fastcross.kernels.rows import accumulation_dtype, empty_rows

# Multiply-adds that are worth a thread of their own, and a chunk of their own.
WORK_PER_THREAD, WORK_PER_CHUNK = 1 << 16, 1 << 20
CHUNKS_PER_THREAD = 4
# Rows from which on packing the vectors costs less than it saves.
PACK_ROWS = 16


def cross_layer_fwd(x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    dtype = accumulation_dtype(x0, x, w, b)
    rows, x, w, b = _cast(x0, dtype), _cast(x, dtype), _parameter(w, dtype), _parameter(b, dtype)
    (M, d), y = rows.shape, empty_output(rows)
    (threads, chunks, chunk_rows), own = _chunks(M, 2 * d), _whole_lines(4 + 12 * _padded(d, dtype), dtype)
    scratch = torch.empty(own * chunks, dtype=dtype, device="cpu")
    operands = (_ptr(rows), _ptr(x), _ptr(w), _ptr(b), _ptr(y), _ptr(scratch))
    sizes = (chunks, chunk_rows, own, M, d, rows.stride(0), x.stride(0), y.stride(0), b is not None)
    run_task(compiled(cpu_layer.cross_layer_fwd, dtype), pack(operands, (), sizes), threads)
    return _rows_as(x0, y)


def cross_layer_bwd(
    dy: Tensor, x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(x0, x, w, b)
    g, rows, x_rows, vector = _cast(dy, dtype), _cast(x0, dtype), _cast(x, dtype), _parameter(w, dtype)
    M, d = rows.shape
    dx0 = empty_output(rows) if needs[0] else rows.new_empty(0)
    dx = empty_output(x_rows) if needs[1] else rows.new_empty(0)
    dw, db = (vector.new_empty(d if needed else 0) for needed in needs[2:])
    (threads, chunks, chunk_rows), padded = _chunks(M, 4 * d), _padded(d, dtype)
    own = _whole_lines(8 + 22 * padded, dtype)
    scratch, totals = (
        torch.empty(own * chunks, dtype=dtype, device="cpu"),
        torch.empty(2 * padded * chunks, dtype=torch.float64, device="cpu"),
    )
    operands = (_ptr(g), _ptr(rows), _ptr(x_rows), _ptr(vector), _ptr(dx0), _ptr(dx), _ptr(scratch))
    strides = (g.stride(0), rows.stride(0), x_rows.stride(0), dx0.stride(0), dx.stride(0))
    sizes = (chunks, chunk_rows, own, 2 * padded, M, d, *strides, *needs)
    run_task(compiled(cpu_layer.cross_layer_bwd, dtype), pack(operands, (_ptr(totals),), sizes), threads)
    if needs[2] or needs[3]:
        finish = compiled(cpu_layer.cross_layer_finish, dtype)
        finish(pack((_ptr(dw), _ptr(db)), (_ptr(totals),), (chunks, d, *needs[2:])))
    return _rows_as(x0, dx0), _rows_as(x, dx), _cast(dw, w.dtype), _cast(db, (w if b is None else b).dtype)


def cross_network_fwd(x0: Tensor, w: Tensor, b: Tensor | None, keep_p: bool) -> tuple[Tensor, Tensor]:
    return _network_fwd(x0, w, b, None, keep_p)


def cross_logits_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, keep_p: bool) -> tuple[Tensor, Tensor]:
    return _network_fwd(x0, w, b, v, keep_p)


def cross_network_bwd(
    dy: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, p: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    dx0, dw, db = _network_bwd(dy, x0, w, b, None, p, needs[0], needs[1], needs[2])
    return _rows_as(x0, dx0), _cast(dw, w.dtype), _cast(db, (w if b is None else b).dtype)


def cross_logits_bwd(
    dz: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, p: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx0, dvectors, db = _network_bwd(dz, x0, w, b, v, p, needs[0], needs[1] or needs[3], needs[2])
    # Copies, since results may not share memory.
    dw = dvectors[: len(w)].clone() if needs[1] else dvectors.new_empty(0)
    dv = dvectors[len(w) :].clone() if needs[3] else dvectors.new_empty(0)
    bias = w if b is None else b
    return _rows_as(x0, dx0), _cast(dw, w.dtype), _cast(db, bias.dtype), _cast(dv, v.dtype)


def _network_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor | None, keep_p: bool) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(x0, w, b, v)
    rows, b, vectors = _cast(x0, dtype), _parameter(b, dtype), _vectors(w, v, dtype)
    (M, d), L, K = rows.shape, len(w), len(vectors)
    out = empty_output(rows) if v is None else rows.new_empty((M, K - L))
    p = rows.new_empty((K, M) if keep_p else 0)
    threads, chunks, chunk_rows = _chunks(M, (K + 1) * d)
    own = _whole_lines(4 * (K + 1) + 8 * _padded(d, dtype), dtype)
    prepared = _prepare(rows, vectors, b, L, own=own * chunks, totals=0)
    operands = (_ptr(rows), prepared.vectors, prepared.beta, _ptr(out), _ptr(p), prepared.scratch)
    sizes = (chunks, chunk_rows, own, M, d, L, K - L, *prepared.steps, rows.stride(0), out.stride(0), keep_p)
    run_task(compiled(cpu_network.cross_network_fwd, dtype), pack(operands, (prepared.c,), sizes), threads)
    return _rows_as(x0, out) if v is None else _cast(out, x0.dtype), p


def _network_bwd(
    dout: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor | None, p: Tensor,
    need_dx0: bool, need_dvectors: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx0, the gradients of the layers' and the head's vectors, db; in the accumulation dtype."""
    dtype = accumulation_dtype(x0, w, b, v)
    g, rows, b, vectors = _cast(dout, dtype), _cast(x0, dtype), _parameter(b, dtype), _vectors(w, v, dtype)
    (M, d), L, K = rows.shape, len(w), len(vectors)
    dx0 = empty_output(rows) if need_dx0 else rows.new_empty(0)
    dvectors = rows.new_empty((K, d) if need_dvectors else 0)
    db = rows.new_empty((L, d) if need_db else 0)
    padded, (threads, chunks, chunk_rows) = _padded(d, dtype), _chunks(M, (2 * K + 3) * d)
    own, own_totals = _whole_lines(4 * (K + 1) + (K + 13) * padded, dtype), (K + 1) * padded + K
    prepared = _prepare(rows, vectors, b, L, own=own * chunks, totals=own_totals * chunks)
    operands = (_ptr(g), _ptr(rows), prepared.vectors, _ptr(p), _ptr(dx0), prepared.scratch)
    sizes = (chunks, chunk_rows, own, own_totals, M, d, L, K - L, *prepared.steps)
    strides = (g.stride(0), rows.stride(0), dx0.stride(0))
    task = pack(operands, (prepared.c, prepared.totals), (*sizes, *strides, need_dx0, need_dvectors, need_db))
    run_task(compiled(cpu_network.cross_network_bwd, dtype), task, threads)
    if need_dvectors or need_db:
        results = (_ptr(vectors), _ptr(b), _ptr(dvectors), _ptr(db))
        shared = (chunks, d, L, K - L, b is not None, need_dvectors, need_db)
        compiled(cpu_network.cross_network_finish, dtype)(pack(results, (prepared.totals,), shared))
    return dx0, dvectors, db


class _Prepared(NamedTuple):
    """What a network's chunks work with; addresses, but for ``memory``, which they point into."""

    memory: Tensor
    c: int  # c_l and β_L·v_c, float64
    totals: int  # float64
    beta: int  # β_L
    vectors: int  # packed, or as they are
    scratch: int
    steps: tuple[int, int]  # from one register's width of a vector to the next, and from a vector to the next


def _prepare(rows: Tensor, vectors: Tensor, b: Tensor | None, L: int, *, own: int, totals: int) -> _Prepared:
    """Takes memory for a call, in one allocation, and runs what comes before the rows."""
    (M, d), K, dtype = rows.shape, len(vectors), rows.dtype
    padded, lanes, packs = _padded(d, dtype), lane_count(dtype.itemsize), M >= PACK_ROWS
    wide = 8 * _whole_lines(K + padded + totals, torch.float64)
    memory = torch.empty(wide + dtype.itemsize * (own + padded * (1 + K * packs)), dtype=torch.uint8, device="cpu")
    c = memory.data_ptr()
    scratch = c + wide
    beta = scratch + dtype.itemsize * own
    packed = beta + dtype.itemsize * padded
    sizes = (d, L, K - L, b is not None, packs)
    compiled(cpu_network.cross_network_prepare, dtype)(pack((_ptr(vectors), _ptr(b), packed, beta), (c,), sizes))
    where, steps = (packed, (K * lanes, lanes)) if packs else (_ptr(vectors), (lanes, d))
    return _Prepared(memory, c, c + 8 * (K + padded), beta, where, scratch, steps)


def _vectors(w: Tensor, v: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The layers' vectors, then the head's: (K, d)."""
    return _parameter(w if v is None else torch.cat((_cast(w, dtype), _cast(v, dtype))), dtype)


def _padded(d: int, dtype: torch.dtype) -> int:
    """d, rounded up to whole vectors."""
    lanes = lane_count(dtype.itemsize)
    return -(-d // lanes) * lanes


def _whole_lines(elements: int, dtype: torch.dtype) -> int:
    """Rounded up to whole cache lines, which no two threads should share."""
    return -(-elements * dtype.itemsize // 64) * 64 // dtype.itemsize


def _cast(t: Any, dtype: torch.dtype) -> Any:
    if t is None or t.dtype == dtype:  # .to() takes a microsecond to find nothing to do
        return t
    # By default a cast chooses strides, where rows overlap or are expanded, and the kernels need unit column stride.
    return t.to(dtype, memory_format=torch.contiguous_format)


def _rows_as(x0: Tensor, y: Tensor) -> Tensor:
    """The rows ``y`` in the dtype of ``x0``, and, where that is another, with the padding between its rows."""
    return y if y.dtype == x0.dtype else empty_rows(x0).copy_(y) if y.dim() == 2 else y.to(x0.dtype)


def _parameter(t: Any, dtype: torch.dtype) -> Any:
    return None if t is None else _cast(t, dtype).contiguous()


def _ptr(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


class _Chunks(NamedTuple):
    """Ranges of rows: more than threads where they are large, for a core may be slower than another."""

    threads: int
    number: int
    rows: int  # of each but the last


def _chunks(M: int, work: int) -> _Chunks:
    """For ``work`` multiply-adds per row; a single range where they are few."""
    threads = min(torch.get_num_threads(), M * work // WORK_PER_THREAD)
    if threads < 2:
        return _Chunks(1, 1, M)
    number = threads * min(CHUNKS_PER_THREAD, max(1, M * work // (threads * WORK_PER_CHUNK)))
    rows = -(-M // (4 * number)) * 4
    return _Chunks(threads, -(-M // rows), rows)
