"""Triton: the tables' gradients, each row's in a fixed order: one sort and two launches for all tables.

The keys first_key + id of all tables are sorted at once, stably; a table keeps its own places, since its keys lie
between those of its neighbours. Then, of the sorted entries of each table:

    sums     a block of 32 entries is summed from its end: at the head of each run of equal ids and at the start of the
             block stands the sum from there to the end of the run or of the block, at all other entries 0
    runs     the head of a run that leaves its block adds up what stands at the starts of the blocks that the run
             enters, in their order, and puts 0 there

No atomics, and the same bits from run to run. ``kernels/fixed_rows.py`` says what the result means. An id that was not
in its table counts as the table's last, and adds 0 to it.
"""

# mypy: disable-error-code=assignment

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels import fixed_rows
from fastcross.kernels.gpu import hardware
from fastcross.kernels.gpu.embedding import block_of, describe, odd, word_of
from fastcross.kernels.rows import accumulation_dtype

FIELDS = tl.constexpr(5)  # of a table: width, height, column of dx0, first key, columns of the tables before it
BLOCK = tl.constexpr(32)  # entries that are summed one after another
RUN_COLUMNS = 32  # of a tile in which a run's parts are added up


@triton.jit
def _places(fields_ptr, table, M, singles, sizes, BAGS: tl.constexpr, ALIGN: tl.constexpr):
    """Of a table: its entries, and where they begin in the buffers of rows and of values."""
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
    fields_ptr = tables_ptr + table * FIELDS
    width, height = tl.load(fields_ptr).to(tl.int32) // ALIGN * ALIGN, tl.load(fields_ptr + 1)
    column, first_key = tl.load(fields_ptr + 2).to(tl.int32) // ALIGN * ALIGN, tl.load(fields_ptr + 3)
    n, first, first_value = _places(fields_ptr, table, M, singles, sizes, BAGS, ALIGN)
    starts = (tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)) * BLOCK

    for first_n in range(0, tl.maximum(width, 1), BLOCK_N):  # the rows are written of a table without columns, too
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
                # Beside wrong offsets, the row of a value may be anything.
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
    fields_ptr = tables_ptr + table * FIELDS
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
                offs_n = first_n + tl.arange(0, BLOCK_N)
                mask_n = offs_n < width
                total = tl.load(values_ptr + head * width + offs_n, mask=mask_n, other=0.0)
                begin, goes_on = end, 1
                while goes_on > 0:
                    entered = begin + tl.arange(0, BLOCK) * BLOCK
                    of_run = tl.load(rows_ptr + entered, mask=entered < n, other=-1) == row
                    value_ptrs = values_ptr + (entered * width)[:, None] + offs_n[None, :]
                    mask = of_run[:, None] & mask_n[None, :]
                    total += tl.sum(tl.load(value_ptrs, mask=mask, other=0.0), 0)
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
    K, M, widths, first = len(counts) - bags, dx0.shape[0], sizes[1::2], fixed_rows.first_keys(sizes[::2], counts)
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
    align = word_of(dx0.element_size(), [*widths, dx0.stride(0)], [dx0.data_ptr()])
    block = block_of(widths, align)
    ordered, order = keys.sort(stable=True)
    described, singles, most = describe(dx0.device, tuple(fields)), sum(map(bool, counts[:K])), max(counts)
    groups = max(1, hardware.of(dx0.device).warp_size * align // block)
    options = {"BAGS": len(places) // 3, "ALIGN": align}
    # Entries that are loaded before the first is added: as many as compile without a spill.
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
        BLOCK_N=min(block, RUN_COLUMNS), num_warps=4, **options,
    )  # fmt: skip
    return rows, values
