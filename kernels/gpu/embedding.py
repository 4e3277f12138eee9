"""Triton: embedding and stacking, forward: one launch for all tables, bags and dense values.

    x0[m, columns of table k] = table_k[ids[m, k]]                      (eq. 1 and 2)
    x0[m, columns of a bag]   = Σ_n coefficient_n table[values_n]       over the values n of row m, in their order

A program takes BLOCK_M rows of one feature. Each table is a tensor of its own, so the kernel reads addresses and sizes
from a small tensor on the device, made once for each set of tables. Ids and offsets are checked where they are read:
x0 is NaN where one is wrong, nothing is read for it, and ``faults`` records it.

For the backward pass the kernel writes what it has in hand: a key first_key + id for each id, table by table, and for
each value of a bag its row and its coefficient.
"""

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels import faults as faults_of
from fastcross.kernels import fixed_rows
from fastcross.kernels.embedding import bad_offsets, empty_x0
from fastcross.kernels.gpu.launch import WORD
from fastcross.kernels.rows import accumulation_dtype, as_rows

FIELDS = tl.constexpr(
    6
)  # of a table: address, width, height, column of x0, first key, number among those that have keys
NONE = tl.constexpr(faults_of.NONE)
THREADS = 128


@triton.jit
def record(fault_ptr, bad, position, found):
    """The least ``position << 32 | found`` of those that are bad, found cut to 32 bits: see ``kernels/faults.py``."""
    cut = tl.minimum(tl.maximum(found, -(2**31)), 2**31 - 1) & (2**32 - 1)
    tl.atomic_min(fault_ptr + position * 0, (position.to(tl.int64) << 32) | cut, mask=bad, sem="relaxed")


@triton.jit
def _gather(table_ptr, x0_ptrs, id, mask_m, bad, width, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr):
    """One row of the table for each row of x0; NaN for a bad id."""
    for first in range(0, width, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)[None, :]
        inside = mask_m[:, None] & (offs_n < width)
        row = tl.load(table_ptr + (id * width)[:, None] + offs_n, mask=inside & ~bad[:, None], other=0.0).to(DTYPE)
        tl.store(x0_ptrs + offs_n, tl.where(bad[:, None], float("nan"), row), mask=inside)


@triton.jit
def _weight(weights_ptr, at, inside, DTYPE: tl.constexpr):
    if weights_ptr is None:
        return tl.where(inside, 1.0, 0.0).to(DTYPE)
    else:
        return tl.load(weights_ptr + at, mask=inside, other=0.0).to(DTYPE)


@triton.jit
def _pool(
    table_ptr, x0_ptrs, values_ptr, weights_ptr, offs_m, start, count, mask_m, usable, height, width,
    rows_ptr, coefficients_ptr, keep,
    MEAN: tl.constexpr, KEEP: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The values of each row in turn, as many times as the longest row of the tile has values."""
    most = tl.max(count, 0)
    inverse = tl.full((BLOCK_M,), 1.0, DTYPE)
    if MEAN:
        total = tl.zeros((BLOCK_M,), DTYPE)
        for i in range(most):
            total += _weight(weights_ptr, start + i, i < count, DTYPE)
        inverse = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total)).to(DTYPE)
    if KEEP:
        for i in range(most):
            kept = (i < count) & keep
            tl.store(rows_ptr + start + i, offs_m, mask=kept)
            weight = _weight(weights_ptr, start + i, i < count, DTYPE)
            tl.store(coefficients_ptr + start + i, weight * inverse, mask=kept)
    for first in range(0, width, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)[None, :]
        pooled = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
        for i in range(most):
            inside = i < count
            id = tl.load(values_ptr + start + i, mask=inside, other=0)
            bad = inside & ((id < 0) | (id >= height))
            mask = (inside & ~bad)[:, None] & (offs_n < width)
            row = tl.load(table_ptr + (id * width)[:, None] + offs_n, mask=mask, other=0.0).to(DTYPE)
            coefficient = _weight(weights_ptr, start + i, inside, DTYPE) * inverse
            pooled += tl.where(bad[:, None], float("nan"), coefficient[:, None] * row)
        pooled = tl.where(usable[:, None], pooled, float("nan"))
        tl.store(x0_ptrs + offs_n, pooled, mask=mask_m[:, None] & (offs_n < width))


@triton.jit(do_not_specialize=["M", "K", "dense_columns", "embedded", "single_keys"])
def _stack_fwd_kernel(
    # pointers
    tables_ptr, ids_ptr, dense_ptr, x0_ptr, keys_ptr, rows_ptr, coefficients_ptr, faults_ptr, bags,
    # sizes
    M, K, dense_columns, embedded, single_keys, sizes,
    # strides
    stride_ids_m, stride_ids_k, stride_dense_m, stride_x0_m,
    # constexprs
    BAGS: tl.constexpr, MEAN: tl.constexpr, KEEP: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr,
    BYTES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    x0_ptrs = x0_ptr + offs_m.to(tl.int64)[:, None] * (stride_x0_m // ALIGN * ALIGN)

    if k == K + BAGS:
        for first in range(0, dense_columns, BLOCK_N):
            offs_n = first + tl.arange(0, BLOCK_N)[None, :]
            inside = mask_m[:, None] & (offs_n < dense_columns)
            dense = tl.load(dense_ptr + offs_m.to(tl.int64)[:, None] * stride_dense_m + offs_n, mask=inside, other=0.0)
            tl.store(x0_ptrs + embedded + offs_n, dense.to(DTYPE), mask=inside)
    else:
        field_ptr = tables_ptr + k * FIELDS
        # Products with the word's length say how far addresses are aligned; tl.multiple_of would be lost.
        table_ptr = (tl.load(field_ptr) // BYTES * BYTES).to(tl.pointer_type(x0_ptr.dtype.element_ty))
        width, height = tl.load(field_ptr + 1) // ALIGN * ALIGN, tl.load(field_ptr + 2)
        x0_ptrs += tl.load(field_ptr + 3) // ALIGN * ALIGN
        first_key, number = tl.load(field_ptr + 4), tl.load(field_ptr + 5)
        if k < K:
            id = tl.load(ids_ptr + offs_m.to(tl.int64) * stride_ids_m + k * stride_ids_k, mask=mask_m, other=0)
            bad = mask_m & ((id < 0) | (id >= height))
            record(faults_ptr + k, bad, offs_m, id)
            _gather(table_ptr, x0_ptrs, id, mask_m, bad, width, DTYPE, BLOCK_N)
            if KEEP:
                key = first_key + tl.where(bad, height, id)
                tl.store(keys_ptr + number * M + offs_m, key, mask=mask_m & (number >= 0))
        for j in tl.static_range(BAGS):
            if k == K + j:
                values_ptr, offsets_ptr, weights_ptr = bags[j]
                n, kept = sizes[2 * j].to(tl.int64) // 2 - 1, sizes[2 * j + 1].to(tl.int64) // 2 - 2
                start = tl.load(offsets_ptr + offs_m, mask=mask_m, other=0)
                before = tl.load(offsets_ptr + offs_m - 1, mask=mask_m & (offs_m > 0), other=0)
                end = tl.load(offsets_ptr + offs_m + 1, mask=offs_m + 1 < M, other=0)
                end = tl.where(offs_m + 1 < M, end, n)
                bad = mask_m & ((start < before) | (start > n) | ((offs_m == 0) & (start != 0)))
                if tl.max(bad.to(tl.int32), 0) > 0:
                    # Beside another batch's number of values these offsets would be told wrongly: they are left out.
                    told = tl.atomic_cas(faults_ptr + K + BAGS + 2 * j + 1, NONE, n, sem="relaxed")
                    record(faults_ptr + K + BAGS + 2 * j, bad & ((told == NONE) | (told == n)), offs_m, start)
                usable = mask_m & ~bad & (start >= 0) & (end >= start) & (end <= n)
                count = tl.where(usable, end - start, 0)
                _pool(
                    table_ptr, x0_ptrs, values_ptr, weights_ptr, offs_m, start, count, mask_m, usable, height, width,
                    rows_ptr + kept, coefficients_ptr + kept, kept >= 0,
                    MEAN, KEEP, DTYPE, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                # All values, also those of no row: each must have a key, and is checked once.
                for first in range(tl.program_id(0) * BLOCK_V, n, tl.num_programs(0) * BLOCK_V):
                    offs_v = first + tl.arange(0, BLOCK_V)
                    id = tl.load(values_ptr + offs_v, mask=offs_v < n, other=0)
                    outside = (offs_v < n) & ((id < 0) | (id >= height))
                    record(faults_ptr + k, outside, offs_v, id)
                    if KEEP:
                        key = first_key + tl.where(outside, height, id)
                        tl.store(keys_ptr + single_keys + kept + offs_v, key, mask=(offs_v < n) & (kept >= 0))


_CAPTURED: list[Tensor] = []  # a CUDA graph reads them as long as it lives


def describe(device: torch.device, fields: tuple[tuple[int, ...], ...]) -> Tensor:
    """Numbers of tables on the device; kept, so that a step copies nothing to it."""
    described = _on_device(device, fields)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(described)
    return described


@functools.lru_cache(maxsize=256)
def _on_device(device: torch.device, fields: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.tensor(fields, dtype=torch.int64).to(device)


def odd(*numbers: int) -> tuple[int, ...]:
    """2n + 3: what Triton compiles no variant for, as it would for a 1 and for multiples of 16 in a tuple."""
    return tuple(2 * n + 3 for n in numbers)


def word_of(itemsize: int, lengths: Sequence[int], addresses: Sequence[int]) -> int:
    """Elements per word of which all lengths are multiples, and that all addresses are aligned to."""
    return math.gcd(WORD, *(length * itemsize for length in lengths), *addresses) // itemsize


def block_of(widths: Sequence[int], align: int) -> int:
    """Columns of a tile: those of a middling table, for a narrower one wastes threads and a wider one takes turns.

    No more than a warp has at once: addresses of narrow words fill registers.
    """
    middling = sum(widths) // max(1, len(widths))
    return min(32 * min(align, 4), max(16, 1 << max(0, middling - 1).bit_length()))


def embedding_stack_keyed_fwd(
    dense: Tensor,
    ids: Tensor,
    bags: Sequence[Any],
    tables: Sequence[Tensor],
    faults: Tensor,
    pooling: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x0; and, of the tables that need a gradient, the keys, and of bags each value's row and coefficient.

    ``bags``: all bags' values, all their offsets, all their weights or None.
    """
    (M, K), x0, values = ids.shape, empty_x0(dense, tables), bags[: len(bags) // 3]
    heights, widths = [table.shape[0] for table in tables], [table.shape[1] for table in tables]
    counts = fixed_rows.entries(ids, values, needs)
    first = fixed_rows.first_keys(heights, counts)
    keys = ids.new_empty(sum(counts), dtype=fixed_rows.key_dtype(heights, counts))
    rows = ids.new_empty(sum(counts[K:]), dtype=torch.int32)
    coefficients = dense.new_empty(sum(counts[K:]), dtype=accumulation_dtype(x0))
    if M == 0:
        for k, value in enumerate(values, start=K):
            if len(value):
                raise bad_offsets(k, len(value), "none")
    programs = len(tables) + (dense.shape[1] > 0)
    if M == 0 or programs == 0:
        return x0, keys, rows, coefficients
    if (largest := max([M, *map(len, values)])) >= 2**31:
        raise ValueError(f"a batch must have less than {2**31} rows and values; got {largest}")
    columns, numbers = accumulate(widths, initial=0), accumulate(map(bool, counts), initial=0)
    fields = tuple(
        (table.data_ptr(), *table.shape[::-1], column, key, number if count else -1)
        for table, column, key, number, count in zip(tables, columns, first, numbers, counts, strict=False)
    )
    described = describe(ids.device, fields) if fields else ids
    contiguous = [None if t is None else t.contiguous() for t in bags]
    by_bag = tuple(tuple(contiguous[i :: len(values)]) for i in range(len(values)))
    places = [sum(counts[K:k]) if counts[k] else -1 for k in range(K, len(tables))]
    sizes = [size for value, place in zip(values, places, strict=True) for size in odd(len(value), place + 1)]
    align = word_of(x0.element_size(), widths, [field[0] for field in fields])
    dense, block = as_rows(dense), block_of(widths, align)
    words = 2 if values and x0.element_size() < 8 else 4  # of each thread: what compiles without a spill
    block_m = max(1, words * THREADS * align // block)
    _stack_fwd_kernel[(-(-M // block_m), programs)](
        described, ids, dense, x0, keys, rows, coefficients, faults, by_bag,
        M, K, dense.shape[1], sum(widths), sum(counts[:K]), tuple(sizes),
        ids.stride(0), ids.stride(1), dense.stride(0), x0.stride(0),
        BAGS=len(values), MEAN=pooling == "mean", KEEP=len(keys) > 0,
        DTYPE=tl.float64 if x0.dtype == torch.float64 else tl.float32,
        ALIGN=align, BYTES=align * x0.element_size(), BLOCK_M=block_m, BLOCK_N=block, BLOCK_V=THREADS, num_warps=4,
    )  # fmt: skip
    return x0, keys, rows, coefficients
