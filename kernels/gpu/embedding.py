"""Triton: embedding and stacking: forward one launch for all tables, bags and dense values, backward a sort and two.

    x0[m, columns of table k] = table_k[ids[m, k]]                      (eq. 1 and 2)
    x0[m, columns of a bag]   = Σ_n coefficient_n table[values_n]       over the values n of row m, in their order

A program processes BLOCK_M rows of one feature. Each table is a separate tensor, so the kernel reads addresses and
sizes from a small tensor on the device, made once per set of tables. Ids and offsets are checked where they are read:
for a wrong one x0 is NaN, no memory is read, and ``faults`` records it.

For the backward pass the kernel also writes a key first_key + id for each id, table by table, and for each value of a
bag its row and its coefficient. One stable sort orders the keys of all tables; each table keeps its range of places,
because its keys lie between those of its neighbours. Then, for the sorted entries of each table:

    sums     each block of 32 entries is summed from its end: the head of each run of equal ids, and the start of the
             block, get the sum from there to the end of the run or of the block; all other entries get 0
    runs     the head of a run that leaves its block adds the sums at the starts of the blocks that the run enters, in
             their order, and sets those to 0

There are no atomics, and the same bits from run to run. ``kernels/embedding.py`` defines the result. An id outside its
table counts as the table's last id, and adds 0 to it.
"""

# mypy: disable-error-code=assignment

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels import embedding as plain
from fastcross.kernels.gpu import launch
from fastcross.kernels.layout import accumulation_dtype

FIELDS = tl.constexpr(6)  # of a table: address, width, height, column of x0, first key, number among those with keys
NONE = tl.constexpr(plain.NO_FAULT)
WARPS, VALUES = 4, 128  # of a program of the forward pass: values of a bag that it checks at a time


@triton.jit
def record(fault_ptr, bad, position, found):
    """Record the minimum of ``position << 32 | found`` over bad entries, found truncated to 32 bits: see ``faults``."""
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
    """Pool the values of each row, in a loop over the values of the tile's longest row."""
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
            id = tl.load(values_ptr + start + i, mask=inside, other=0).to(tl.int64)
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
        table_ptr = tl.multiple_of(tl.load(field_ptr).to(tl.pointer_type(x0_ptr.dtype.element_ty)), BYTES)
        width, height = tl.load(field_ptr + 1) // ALIGN * ALIGN, tl.load(field_ptr + 2)
        x0_ptrs += tl.load(field_ptr + 3) // ALIGN * ALIGN
        first_key, number = tl.load(field_ptr + 4), tl.load(field_ptr + 5)
        if k < K:
            id_ptrs = ids_ptr + offs_m.to(tl.int64) * stride_ids_m + k * stride_ids_k
            id = tl.load(id_ptrs, mask=mask_m, other=0).to(tl.int64)
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
                start = tl.load(offsets_ptr + offs_m, mask=mask_m, other=0).to(tl.int64)
                before = tl.load(offsets_ptr + offs_m - 1, mask=mask_m & (offs_m > 0), other=0)
                end = tl.load(offsets_ptr + offs_m + 1, mask=offs_m + 1 < M, other=0).to(tl.int64)
                end = tl.where(offs_m + 1 < M, end, n)
                bad = mask_m & ((start < before) | (start > n) | ((offs_m == 0) & (start != 0)))
                if tl.max(bad.to(tl.int32), 0) > 0:
                    # With another batch's number of values the message would be wrong: these offsets are not recorded.
                    told = tl.atomic_cas(faults_ptr + K + BAGS + 2 * j + 1, NONE, n, sem="relaxed")
                    record(faults_ptr + K + BAGS + 2 * j, bad & ((told == NONE) | (told == n)), offs_m, start)
                usable = mask_m & ~bad & (start >= 0) & (end >= start) & (end <= n)
                count = tl.where(usable, end - start, 0)
                _pool(
                    table_ptr, x0_ptrs, values_ptr, weights_ptr, offs_m, start, count, mask_m, usable, height, width,
                    rows_ptr + kept, coefficients_ptr + kept, kept >= 0,
                    MEAN, KEEP, DTYPE, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                # All values, also those outside all rows: each needs a key, and is checked once.
                for first in range(tl.program_id(0) * BLOCK_V, n, tl.num_programs(0) * BLOCK_V):
                    offs_v = first + tl.arange(0, BLOCK_V)
                    id = tl.load(values_ptr + offs_v, mask=offs_v < n, other=0).to(tl.int64)
                    outside = (offs_v < n) & ((id < 0) | (id >= height))
                    record(faults_ptr + k, outside, offs_v, id)
                    if KEEP:
                        key = first_key + tl.where(outside, height, id)
                        tl.store(keys_ptr + single_keys + kept + offs_v, key, mask=(offs_v < n) & (kept >= 0))


_CAPTURED: list[Tensor] = []  # a CUDA graph reads them as long as it lives


def describe(device: torch.device, fields: tuple[tuple[int, ...], ...]) -> Tensor:
    """The tables' fields as a tensor on the device; cached, so that a step copies nothing to the device."""
    described = _on_device(device, fields)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(described)
    return described


@functools.lru_cache(maxsize=256)
def _on_device(device: torch.device, fields: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.tensor(fields, dtype=torch.int64).to(device)


def odd(*numbers: int) -> tuple[int, ...]:
    """2n + 3, for which Triton compiles no variants, as it would for 1 and multiples of 16 in a tuple."""
    return tuple(2 * n + 3 for n in numbers)


def block_of(widths: Sequence[int], align: int) -> int:
    """Columns of a tile: those of a median table. Narrower tables leave threads idle; wider ones take several turns.

    At most what a warp holds at once, because the addresses of narrow loads fill registers.
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
    """x0; for tables that need a gradient, the keys; for bags, each value's row and coefficient.

    ``bags``: all bags' values, all their offsets, all their weights or None.
    """
    (M, K), x0, values = ids.shape, plain.empty_x0(dense, tables), bags[: len(bags) // 3]
    heights, widths = [table.shape[0] for table in tables], [table.shape[1] for table in tables]
    counts = plain.entries(ids, values, needs)
    first = plain.first_keys(heights, counts)
    keys = ids.new_empty(sum(counts), dtype=plain.key_dtype(heights, counts))
    rows = ids.new_empty(sum(counts[K:]), dtype=torch.int32)
    coefficients = dense.new_empty(sum(counts[K:]), dtype=accumulation_dtype(x0))
    if M == 0:
        for k, value in enumerate(values, start=K):
            if len(value):
                raise plain.bad_offsets(k, len(value), "none")
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
    align = launch.word_of(x0.element_size(), widths, [field[0] for field in fields])
    dense = dense if dense.stride(1) == 1 else dense.contiguous()
    block = block_of(widths, align)
    words = 1 if values else 4  # vectors per thread that compile without a spill
    device = launch.hardware_of(x0.device)
    block_m = max(1, words * WARPS * device.warp_size * align // block)
    # Without a limit NVIDIA's compiler spills some of 56 registers, for more warps at a time.
    limit = {} if device.amd or not values else {"maxnreg": 128}
    _stack_fwd_kernel[(-(-M // block_m), programs)](
        described, ids, dense, x0, keys, rows, coefficients, faults, by_bag,
        M, K, dense.shape[1], sum(widths), sum(counts[:K]), tuple(sizes),
        ids.stride(0), ids.stride(1), dense.stride(0), x0.stride(0),
        BAGS=len(values), MEAN=pooling == "mean", KEEP=len(keys) > 0,
        DTYPE=tl.float64 if x0.dtype == torch.float64 else tl.float32,
        ALIGN=align, BYTES=align * x0.element_size(), BLOCK_M=block_m, BLOCK_N=block, BLOCK_V=VALUES, num_warps=WARPS,
        **limit,
    )  # fmt: skip
    return x0, keys, rows, coefficients


SUM_FIELDS = tl.constexpr(5)  # of a table: width, height, column of dx0, first key, columns of the tables before it
BLOCK = tl.constexpr(32)  # entries that are summed one after another
RUN_COLUMNS = 32  # of a tile in which a run's parts are added up


@triton.jit
def _places(fields_ptr, table, M, singles, sizes, BAGS: tl.constexpr, ALIGN: tl.constexpr):
    """A table's number of entries, and their start in the buffers of rows and of values."""
    n, first = M.to(tl.int64), table.to(tl.int64) * M
    first_value = tl.load(fields_ptr + 4) * M
    for j in tl.static_range(BAGS):
        if table == singles + j:
            n, first = sizes[3 * j].to(tl.int64) // 2 - 1, sizes[3 * j + 1].to(tl.int64) // 2 - 1
            first_value = sizes[3 * j + 2].to(tl.int64) // 2 - 1
    return n, first, first_value // ALIGN * ALIGN


@triton.jit(do_not_specialize=["M", "singles"])
def _sums_kernel(
    # pointers
    tables_ptr, keys_ptr, order_ptr, bag_rows_ptr, coefficients_ptr, dx0_ptr, rows_ptr, values_ptr,
    # sizes
    M, singles, sizes,
    # strides
    stride_dx0_m,
    # constexprs
    BAGS: tl.constexpr, ALIGN: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    table = tl.program_id(1)
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    fields_ptr = tables_ptr + table * SUM_FIELDS
    width, height = tl.load(fields_ptr).to(tl.int32) // ALIGN * ALIGN, tl.load(fields_ptr + 1)
    column, first_key = tl.load(fields_ptr + 2).to(tl.int32) // ALIGN * ALIGN, tl.load(fields_ptr + 3)
    n, first, first_value = _places(fields_ptr, table, M, singles, sizes, BAGS, ALIGN)
    starts = (tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)) * BLOCK

    for first_n in range(0, tl.maximum(width, 1), BLOCK_N):  # rows are written for a table without columns, too
        offs_n = first_n + tl.arange(0, BLOCK_N)[None, :]
        mask_n = offs_n < width
        total = tl.zeros((GROUPS, BLOCK_N), DTYPE)
        after = tl.full((GROUPS,), -1, tl.int64)  # the row of the entry that was added last
        for piece in range(BLOCK // AHEAD):
            last = starts + (BLOCK - 1 - piece * AHEAD)
            loaded, found = (), ()
            for i in tl.static_range(AHEAD):
                inside = last - i < n
                id = tl.load(keys_ptr + first + last - i, mask=inside, other=0).to(tl.int64) - first_key
                place = tl.load(order_ptr + first + last - i, mask=inside, other=0)
                row = place - first
                coefficient = tl.full((GROUPS,), 1.0, DTYPE)
                if BAGS:
                    bag = inside & (table >= singles)
                    row = tl.where(bag, tl.load(bag_rows_ptr + place - singles * M, mask=bag, other=0), row)
                    loaded_coefficient = tl.load(coefficients_ptr + place - singles * M, mask=bag, other=1.0)
                    coefficient = tl.where(bag, loaded_coefficient, coefficient)
                # With wrong offsets, the row of a value may be anything.
                good = inside & (id < height) & (row >= 0) & (row < M)
                dx0_ptrs = dx0_ptr + (row * (stride_dx0_m // ALIGN * ALIGN))[:, None] + column + offs_n
                dx0 = tl.load(dx0_ptrs, mask=good[:, None] & mask_n, other=0.0).to(DTYPE)
                if BAGS:
                    dx0 = tl.where(good[:, None], coefficient[:, None] * dx0, 0.0)
                loaded = loaded + (dx0,)
                found = found + (tl.where(inside, tl.minimum(id, height - 1), -1),)
            before = tl.load(keys_ptr + first + last - AHEAD, mask=(last >= AHEAD) & (last - AHEAD < n), other=0)
            before = tl.minimum(before.to(tl.int64) - first_key, height - 1)
            found = found + (tl.where(last >= AHEAD, before, -2),)
            for i in tl.static_range(AHEAD):
                inside = last - i < n
                total = tl.where((found[i] == after)[:, None], total, 0.0) + loaded[i]
                stays = (found[i] != found[i + 1]) | (last - i == starts)
                value_ptrs = values_ptr + first_value + ((last - i) * width)[:, None] + offs_n
                tl.store(value_ptrs, tl.where(stays[:, None], total, 0.0), mask=inside[:, None] & mask_n)
                tl.store(rows_ptr + first + last - i, found[i], mask=inside & (first_n == 0))
                after = found[i]


@triton.jit(do_not_specialize=["M", "singles"])
def _runs_kernel(
    # pointers
    tables_ptr, rows_ptr, values_ptr,
    # sizes
    M, singles, sizes,
    # constexprs
    BAGS: tl.constexpr, ALIGN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    table = tl.program_id(1)
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    fields_ptr = tables_ptr + table * SUM_FIELDS
    width = tl.load(fields_ptr) // ALIGN * ALIGN
    n, first, first_value = _places(fields_ptr, table, M, singles, sizes, BAGS, ALIGN)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    end = start + BLOCK
    if end < n:
        rows_ptr += first
        values_ptr += first_value
        row = tl.load(rows_ptr + end - 1)
        before = tl.load(rows_ptr + start - 1, mask=start > 0, other=-1)
        if (tl.load(rows_ptr + end) == row) & (before != row):
            head = end - tl.sum((tl.load(rows_ptr + start + tl.arange(0, BLOCK)) == row).to(tl.int64), 0)
            for first_n in range(0, width, BLOCK_N):
                offs_n = first_n + tl.arange(0, BLOCK_N)[None, :]
                mask_n = offs_n < width
                total = tl.load(values_ptr + head * width + offs_n, mask=mask_n, other=0.0)
                begin, goes_on = end, 1
                while goes_on > 0:
                    entered = begin + tl.arange(0, BLOCK) * BLOCK
                    of_run = tl.load(rows_ptr + entered, mask=entered < n, other=-1) == row
                    value_ptrs = values_ptr + (entered * width)[:, None] + offs_n
                    mask = of_run[:, None] & mask_n
                    total += tl.sum(tl.load(value_ptrs, mask=mask, other=0.0), 0, keep_dims=True)
                    tl.store(value_ptrs, tl.zeros((BLOCK, BLOCK_N), DTYPE), mask=mask)
                    goes_on = tl.min(of_run.to(tl.int32), 0)
                    begin += BLOCK * BLOCK
                tl.store(values_ptr + head * width + offs_n, total, mask=mask_n)


def embedding_stack_keyed_bwd(
    dx0: Tensor,
    keys: Tensor,
    bag_rows: Tensor,
    coefficients: Tensor,
    sizes: Sequence[int],
    counts: Sequence[int],
    bags: int,
) -> tuple[Tensor, Tensor]:
    """All tables' rows, and all their values; ``sizes``: heights and widths of all tables, ``counts``: entries."""
    K, M, widths, first = len(counts) - bags, dx0.shape[0], sizes[1::2], plain.first_keys(sizes[::2], counts)
    fields: list[tuple[int, ...]] = []
    places: list[int] = []
    column = kept_columns = place = value = 0
    for k, count in enumerate(counts):
        if count:
            fields.append((widths[k], sizes[2 * k], column, first[k], kept_columns))
            places += odd(count, place, value) if k >= K else ()
            kept_columns, place, value = kept_columns + widths[k], place + count, value + count * widths[k]
        column += widths[k]
    rows = keys.new_empty(keys.shape, dtype=torch.int64)
    values = dx0.new_empty(value, dtype=accumulation_dtype(dx0))
    if place == 0:
        return rows, values
    align = launch.word_of(dx0.element_size(), [*widths, dx0.stride(0)], [dx0.data_ptr()])
    block = block_of(widths, align)
    ordered, order = keys.sort(stable=True)
    described, singles, most = describe(dx0.device, tuple(fields)), sum(map(bool, counts[:K])), max(counts)
    groups = max(1, launch.hardware_of(dx0.device).warp_size * align // block)
    options = {"BAGS": len(places) // 3, "ALIGN": align}
    # Number of entries that are loaded before the first is added: as many as compile without a spill.
    ahead = 2 if places else 8 if align == 1 else 4
    _sums_kernel[(-(-most // (BLOCK.value * groups)), len(fields))](
        described, ordered, order, bag_rows, coefficients, dx0, rows, values,
        M, singles, tuple(places),
        dx0.stride(0),
        GROUPS=groups, BLOCK_N=block, AHEAD=ahead, num_warps=1, **options,
    )  # fmt: skip
    _runs_kernel[(-(-most // BLOCK.value), len(fields))](
        described, rows, values,
        M, singles, tuple(places),
        BLOCK_N=min(block, RUN_COLUMNS), num_warps=1, **options,
    )  # fmt: skip
    return rows, values
