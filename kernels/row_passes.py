"""Row passes: the device functions that the kernels are made of, passes over one row of logits.

Everything is in base 2 and relative to ``shift = row_max · log2e_over_temp`` with log2e_over_temp = log2(e) /
temperature: ``d = x · log2e_over_temp − shift`` is one fused multiply-add and ``2^d`` one instruction. The rounding
of ``shift`` moves every d of a row alike and cancels. Rows start at int64 offsets, columns within a row count in
int32 where they are contiguous. The main loops are unmasked, which is what lets accesses be 128 bits wide; one
masked tile ends a row.
"""

# device functions have no types that mypy could check
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"
from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
# 2^_LOWEST is 0; finite, so that 0 · _LOWEST is 0 where 0 · −inf would be NaN
LOWEST_D = tl.constexpr(-1.0e4)
# no shift lies below: beyond, its rounding alone would be an exponent that overflows. 2^29 is 3.7e8 nats
LOWEST_SHIFT = tl.constexpr(-536870912.0)
# below this tail scale 1 − P_H may be computed by subtraction: the error, 1e-7 of the total, stays below 1e-5
LARGEST_TAIL_SCALE_BY_SUBTRACTION = tl.constexpr(64.0)


@triton.jit
def shift_of(row_max, log2e_over_temp):
    """The row's shift in base 2, finite for every maximum below +inf: logits that mask with −inf, or with −3e38,
    sum to 0 where a row holds nothing else, and −inf − (−inf) never arises."""
    return tl.maximum(row_max * log2e_over_temp, LOWEST_SHIFT)


@triton.jit
def column_offsets(start, column_stride, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr):
    """(columns, their offsets in memory) of one tile."""
    columns = start + tl.arange(0, BLOCK)
    offsets = columns if CONTIGUOUS else columns.to(tl.int64) * column_stride
    return columns, offsets


@triton.jit
def load_round(
    row, start, width, column_stride,
    MASKED: tl.constexpr, CONTIGUOUS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """``[LANES, VECTOR]`` columns in fp32: a lane is a thread, a vector one 128-bit access.

    What is reduced over vectors, and over rounds, never leaves its thread. MASKED: −inf beyond ``width``.
    """
    columns = start + (tl.arange(0, LANES) * VECTOR)[:, None] + tl.arange(0, VECTOR)[None, :]
    offsets = columns if CONTIGUOUS else columns.to(tl.int64) * column_stride
    if MASKED:
        x = tl.load(row + offsets, mask=columns < width, other=float("-inf"))
    else:
        x = tl.load(row + offsets, eviction_policy="evict_last")
    return x.to(tl.float32)


@triton.jit
def row_sums(
    row, width, column_stride, log2e_over_temp,
    CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """First pass: (row_max, Σ 2^d, Σ d·2^d) of the first ``width`` columns, in fp32.

    A NaN or +inf anywhere makes the sum NaN; a row of −inf gives (−inf, 0, 0). Every thread sums what it read,
    relative to its own maximum, and the sums are combined once, at the end: no barrier in the loop.
    """
    row_max = tl.full((LANES,), float("-inf"), tl.float32)
    sum_exp = tl.zeros((LANES,), tl.float32)
    sum_d_exp = tl.zeros((LANES,), tl.float32)
    whole = width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        row_max, sum_exp, sum_d_exp = online_update(
            row, start, width, column_stride, log2e_over_temp, row_max, sum_exp, sum_d_exp,
            False, CONTIGUOUS, BLOCK, LANES, VECTOR,
        )  # fmt: skip
    for start in range(whole, width, LANES * VECTOR):
        row_max, sum_exp, sum_d_exp = online_update(
            row, start, width, column_stride, log2e_over_temp, row_max, sum_exp, sum_d_exp,
            True, CONTIGUOUS, LANES * VECTOR, LANES, VECTOR,
        )  # fmt: skip
    largest = tl.max(row_max, 0)
    sum_exp, sum_d_exp = rescaled(
        sum_exp, sum_d_exp, row_max, shift_of(largest, log2e_over_temp), log2e_over_temp
    )
    return largest, tl.sum(sum_exp, 0), tl.sum(sum_d_exp, 0)


@triton.jit
def online_update(
    row, start, width, column_stride, log2e_over_temp, row_max, sum_exp, sum_d_exp,
    MASKED: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Merge a tile into sums ``[LANES]``, rescaling them where their maximum rises."""
    x = load_round(row, start, width, column_stride, MASKED, CONTIGUOUS, LANES, VECTOR)
    tile = (x,)
    largest = x
    for step in tl.static_range(LANES * VECTOR, BLOCK, LANES * VECTOR):
        x = load_round(row, start + step, width, column_stride, MASKED, CONTIGUOUS, LANES, VECTOR)
        tile = tile + (x,)  # type: ignore[assignment]  # noqa: RUF005 - the compiler knows no unpacking
        largest = tl.maximum(largest, x)
    new_max = tl.maximum(row_max, tl.max(largest, 1))
    shift = shift_of(new_max, log2e_over_temp)
    d = tl.fma(tile[0], log2e_over_temp, -shift[:, None])
    exps = tl.exp2(d)
    moments = exps * tl.maximum(d, LOWEST_D)
    for i in tl.static_range(1, BLOCK // (LANES * VECTOR)):
        d = tl.fma(tile[i], log2e_over_temp, -shift[:, None])
        power = tl.exp2(d)
        exps += power
        moments = tl.fma(power, tl.maximum(d, LOWEST_D), moments)
    sum_exp, sum_d_exp = rescaled(sum_exp, sum_d_exp, row_max, shift, log2e_over_temp)
    return new_max, sum_exp + tl.sum(exps, 1), sum_d_exp + tl.sum(moments, 1)


@triton.jit
def rescaled(sum_exp, sum_d_exp, row_max, shift, log2e_over_temp):
    """Sums relative to ``row_max``, made relative to a ``shift`` that is at least as high."""
    shift_change = shift_of(row_max, log2e_over_temp) - shift
    factor = tl.exp2(shift_change)
    return factor * sum_exp, factor * tl.fma(shift_change, sum_exp, sum_d_exp)


@triton.jit
def exact_sum(
    row, width, column_stride, log2e_over_temp, shift,
    CONTIGUOUS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Σ 2^d with fp64 accumulation, for rows whose tail is a small difference of large sums.

    Each addend is the same fp32 number as where a candidate's 2^d is computed, so subtracting the candidates'
    own fp64 sum leaves the tail alone, to all its digits.
    """
    sum_exp = tl.zeros((LANES,), tl.float64)
    step: tl.constexpr = LANES * VECTOR
    whole = width // step * step
    for start in range(0, whole, step):
        x = load_round(row, start, width, column_stride, False, CONTIGUOUS, LANES, VECTOR)
        sum_exp += tl.sum(tl.exp2(tl.fma(x, log2e_over_temp, -shift)).to(tl.float64), 1)
    if whole < width:
        x = load_round(row, whole, width, column_stride, True, CONTIGUOUS, LANES, VECTOR)
        sum_exp += tl.sum(tl.exp2(tl.fma(x, log2e_over_temp, -shift)).to(tl.float64), 1)
    return tl.sum(sum_exp, 0)


@triton.jit
def exact_head(candidate_logits, first, last, K_BLOCK: tl.constexpr):
    """Σ 2^d over a row's candidates with fp64 accumulation."""
    sum_exp = tl.zeros((), tl.float64)
    for start in range(first, last, K_BLOCK):
        slots = start + tl.arange(0, K_BLOCK)
        d = tl.load(candidate_logits + slots, mask=slots < last, other=float("-inf"))
        sum_exp += tl.sum(tl.exp2(d).to(tl.float64), 0)
    return sum_exp


@triton.jit
def write_row(
    row, out, width, column_stride, out_column_stride, log2e_over_temp, shift, intercept, slope,
    SLOPED: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Second pass: write ``2^d · (intercept + slope · d)`` to ``out``, in reverse, where the row is still in cache.

    A row whose gradient lives on its candidates only is not read again: it receives zeros.
    """
    all_zero = intercept == 0.0
    if SLOPED:
        all_zero = all_zero & (slope == 0.0)
    if all_zero:
        clear_row(out, width, out_column_stride, CONTIGUOUS, BLOCK)
    else:
        whole = width // BLOCK * BLOCK
        TAIL: tl.constexpr = BLOCK // 4
        for start in range(whole, width, TAIL):
            columns, offsets = column_offsets(start, column_stride, CONTIGUOUS, TAIL)
            x = tl.load(row + offsets, mask=columns < width, other=float("-inf")).to(tl.float32)
            values = _slope_at(x, log2e_over_temp, shift, intercept, slope, SLOPED)
            _, offsets = column_offsets(start, out_column_stride, CONTIGUOUS, TAIL)
            tl.store(out + offsets, values.to(out.dtype.element_ty), mask=columns < width)
        for step in range(0, whole, BLOCK):
            start = whole - BLOCK - step
            _, offsets = column_offsets(start, column_stride, CONTIGUOUS, BLOCK)
            x = tl.load(row + offsets, eviction_policy="evict_first").to(tl.float32)
            values = _slope_at(x, log2e_over_temp, shift, intercept, slope, SLOPED)
            _, offsets = column_offsets(start, out_column_stride, CONTIGUOUS, BLOCK)
            tl.store(out + offsets, values.to(out.dtype.element_ty), eviction_policy="evict_first")


@triton.jit
def _slope_at(x, log2e_over_temp, shift, intercept, slope, SLOPED: tl.constexpr):
    d = tl.fma(x, log2e_over_temp, -shift)
    return tl.exp2(d) * (tl.fma(tl.maximum(d, LOWEST_D), slope, intercept) if SLOPED else intercept)


@triton.jit
def clear_row(out, width, column_stride, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr):
    """Write 0 to the first ``width`` columns, whatever they held."""
    zeros = tl.zeros((BLOCK,), out.dtype.element_ty)
    whole = width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        _, offsets = column_offsets(start, column_stride, CONTIGUOUS, BLOCK)
        tl.store(out + offsets, zeros, eviction_policy="evict_first")
    if whole < width:
        columns, offsets = column_offsets(whole, column_stride, CONTIGUOUS, BLOCK)
        tl.store(out + offsets, zeros, mask=columns < width)


@triton.jit
def gather(
    row, ids, candidate_logits, first, last, first_id, width, column_stride, log2e_over_temp, shift,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write d of a row's candidates to ``candidate_logits``; −inf for ids outside ``[first_id, first_id + width)``."""
    for start in range(first, last, K_BLOCK):
        slots = start + tl.arange(0, K_BLOCK)
        columns = tl.load(ids + slots, mask=slots < last, other=-1).to(tl.int64) - first_id
        here = (slots < last) & (columns >= 0) & (columns < width)
        x = tl.load(row + columns * column_stride, mask=here, other=float("-inf")).to(tl.float32)
        d = tl.where(here, tl.fma(x, log2e_over_temp, -shift), float("-inf"))
        tl.store(candidate_logits + slots, d, mask=slots < last)


@triton.jit
def gather_one(row, token, first_id, width, column_stride, log2e_over_temp, shift):
    """d of one id; −inf where it lies outside the shard."""
    column = token - first_id
    here = (column >= 0) & (column < width)
    x = tl.load(row + column * column_stride, mask=here, other=float("-inf")).to(tl.float32)
    return tl.where(here, tl.fma(x, log2e_over_temp, -shift), float("-inf"))


@triton.jit
def scatter(out, ids, values, first, last, first_id, width, column_stride, K_BLOCK: tl.constexpr):
    """Store a row's candidate gradients, each rounded once from fp32. Call behind a barrier."""
    for start in range(first, last, K_BLOCK):
        slots = start + tl.arange(0, K_BLOCK)
        columns = tl.load(ids + slots, mask=slots < last, other=-1).to(tl.int64) - first_id
        here = (slots < last) & (columns >= 0) & (columns < width)
        value = tl.load(values + slots, mask=slots < last, other=0.0)
        tl.store(out + columns * column_stride, value.to(out.dtype.element_ty), mask=here)


@triton.jit
def scatter_one(out, token, value, first_id, width, column_stride):
    """Store the sampled token's gradient where it lies on this shard. Call behind a barrier."""
    column = token - first_id
    here = (column >= 0) & (column < width)
    tl.store(out + column * column_stride, value.to(out.dtype.element_ty), mask=here)
