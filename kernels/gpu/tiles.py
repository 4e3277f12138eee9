"""Jit helpers: a tile of rows is a tuple of CHUNKS chunks (BLOCK_M, BLOCK_N), in the accumulation dtype.

Rows are loaded and stored in words of ALIGN elements, which divides every row stride. Where it does not divide N, the
last N % ALIGN columns of a row (only those: REST chunks from the end may hold them) take narrow words of their own:
one mask for both would make every word narrow.
"""

# mypy: disable-error-code=assignment

from typing import TypeVar

import triton
import triton.language as tl
from torch import Tensor

Parameter = TypeVar("Parameter", Tensor, Tensor | None)


def unit_columns(parameter: Parameter) -> Parameter:
    """A parameter as the kernels read it, with unit column stride; None stays None."""
    if parameter is None or parameter.stride(-1) == 1 or parameter.shape[-1] == 1:
        return parameter
    return parameter.contiguous()


def carve(like: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Uninitialised vectors of at least ``sizes`` elements in one allocation, each aligned to 16 elements."""
    padded = [-(-size // 16) * 16 for size in sizes]
    return like.new_empty(sum(padded)).split_with_sizes(padded)


@triton.jit
def row_offsets(offs_m, stride, ALIGN: tl.constexpr):
    # A product with ALIGN says what tl.multiple_of would say, which the compiler (3.7) loses for a tile of one row.
    return offs_m.to(tl.int64)[:, None] * (stride // ALIGN * ALIGN)


@triton.jit
def limit_word(ptr, ALIGN: tl.constexpr):
    """The same address, of which the compiler does not know that it allows vectors of more than ALIGN elements."""
    return ptr + tl.program_id(2) // tl.num_programs(2) * ALIGN


@triton.jit
def load_rows(
    ptr, offs_m, mask_m, first, N, stride,
    DTYPE: tl.constexpr, ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    ptrs = ptr + row_offsets(offs_m, stride, ALIGN)
    aligned = N // ALIGN * ALIGN
    rows = ()
    for k in tl.static_range(CHUNKS):
        offs_n = first + k * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        chunk = tl.load(ptrs + offs_n, mask=mask_m[:, None] & (offs_n < aligned), other=0.0).to(DTYPE)
        if k >= CHUNKS - REST:
            rest = mask_m[:, None] & (offs_n >= aligned) & (offs_n < N)
            chunk += tl.load(ptrs + offs_n, mask=rest, other=0.0).to(DTYPE)
        rows = rows + (chunk,)
    return rows


@triton.jit
def store_rows(
    ptr, rows, offs_m, mask_m, first, N, stride,
    ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    ptrs = ptr + row_offsets(offs_m, stride, ALIGN)
    aligned = N // ALIGN * ALIGN
    for k in tl.static_range(CHUNKS):
        offs_n = first + k * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(ptrs + offs_n, rows[k], mask=mask_m[:, None] & (offs_n < aligned))
        if k >= CHUNKS - REST:
            rest = mask_m[:, None] & (offs_n >= aligned) & (offs_n < N)
            tl.store(ptrs + offs_n, rows[k], mask=rest)


@triton.jit
def load_vector(
    ptr, first, N,
    DTYPE: tl.constexpr, ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A parameter of one layer, as CHUNKS chunks (1, BLOCK_N)."""
    aligned = N // ALIGN * ALIGN
    vector = ()
    for k in tl.static_range(CHUNKS):
        offs_n = first + k * BLOCK_N + tl.arange(0, BLOCK_N)
        chunk = tl.load(ptr + offs_n, mask=offs_n < aligned, other=0.0).to(DTYPE)
        if k >= CHUNKS - REST:
            chunk += tl.load(ptr + offs_n, mask=(offs_n >= aligned) & (offs_n < N), other=0.0).to(DTYPE)
        vector = vector + (chunk[None, :],)
    return vector


@triton.jit
def load_packed(
    ptr, first, columns, DTYPE: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One row of parameters that ``pack`` has padded with zeros, for each of BLOCK_M rows.

    It is loaded for the ROWS rows that lie side by side, so that each thread has the columns that it has of a row, and
    no word goes from thread to thread. RAGGED chunks from the end may reach beyond its columns.
    """
    vector = ()
    ptrs = ptr + tl.zeros((ROWS, 1), tl.int32)
    for k in tl.static_range(CHUNKS):
        offs_n = first + k * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        if k >= CHUNKS - RAGGED:
            chunk = tl.load(ptrs + offs_n, mask=offs_n < columns, other=0.0)
        else:
            chunk = tl.load(ptrs + offs_n)
        tall = tl.broadcast_to(chunk.to(DTYPE)[None, :, :], (BLOCK_M // ROWS, ROWS, BLOCK_N))
        vector = vector + (tl.reshape(tall, (BLOCK_M, BLOCK_N)),)
    return vector


@triton.jit
def dot(left, right, CHUNKS: tl.constexpr):
    """Per row, the sum over columns of left · right: chunk by chunk within a thread, then once across threads."""
    total = left[0] * right[0]
    for k in tl.static_range(1, CHUNKS):
        total += left[k] * right[k]
    return tl.sum(total, 1)


@triton.jit
def scale(column, rows, CHUNKS: tl.constexpr):
    """One scalar per row times the row; for a vector, the outer product."""
    product = ()
    for k in tl.static_range(CHUNKS):
        product = product + (column[:, None] * rows[k],)
    return product


@triton.jit
def add(left, right, CHUNKS: tl.constexpr):
    total = ()
    for k in tl.static_range(CHUNKS):
        total = total + (left[k] + right[k],)
    return total


@triton.jit
def zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr):
    chunks = ()
    for _ in tl.static_range(COUNT):
        chunks = chunks + (tl.zeros((ROWS, BLOCK_N), DTYPE),)
    return chunks


@triton.jit
def fold(rows, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """Sums the rows that one thread holds, (BLOCK_M, BLOCK_N) -> (ROWS, BLOCK_N): no thread waits for another."""
    sums = ()
    for k in tl.static_range(CHUNKS):
        tall = tl.reshape(rows[k], (rows[k].shape[0] // ROWS, ROWS, rows[k].shape[1]))
        sums = sums + (tl.sum(tall, 0),)
    return sums


@triton.jit
def store_sums(ptr, sums, first, columns, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr):
    """Adds the rows that the threads cover side by side, which leaves one partial sum to a program, and stores it."""
    for k in tl.static_range(CHUNKS):
        offs_n = first + k * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(ptr + offs_n, tl.sum(sums[k], 0), mask=offs_n < columns)


@triton.jit
def sum_segments(ptr, offs_m, mask_m, segments, stride, DTYPE: tl.constexpr):
    """A dot taken segment by segment, put together in a fixed order."""
    total = tl.zeros(offs_m.shape, DTYPE)
    for _ in range(segments):
        total += tl.load(ptr + offs_m, mask=mask_m, other=0.0)
        ptr += stride
    return total
