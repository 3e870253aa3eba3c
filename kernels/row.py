"""Sweeps over one row of logits: what the fused loss, the shards and the log-prob pair are made of.

Everything is in base 2 and relative to ``shift = peak · sharpness``, where ``sharpness = log2(e) / temperature``:
``d = x · sharpness − shift`` is one fused multiply-add and ``2^d`` one instruction. The rounding of ``shift`` moves
every d of a row alike and cancels. Rows start at int64 offsets, columns within a row count in int32 where they are
contiguous. The main loops are unmasked, which is what lets accesses be 128 bits wide; one masked tile ends a row.
"""

# device functions have no types that mypy could check
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"
from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
# 2^_LOWEST is 0; finite, so that 0 · _LOWEST is 0 where 0 · −inf would be NaN
_LOWEST = tl.constexpr(-1.0e4)
# with a tail scale below this the tail may be a difference: its error, 1e-7 of the total, stays below 1e-5
LARGEST_TAIL_SCALE_BY_SUBTRACTION = tl.constexpr(64.0)


@triton.jit
def shift_of(peak, sharpness):
    """The row's shift in base 2; 0 where no logit is finite yet, so that −inf − (−inf) never arises."""
    return tl.where(peak == float("-inf"), 0.0, peak * sharpness)


@triton.jit
def column_offsets(start, column_stride, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr):
    """(columns, their offsets in memory) of one tile."""
    columns = start + tl.arange(0, BLOCK)
    offsets = columns if CONTIGUOUS else columns.to(tl.int64) * column_stride
    return columns, offsets


@triton.jit
def row_sums(row, width, column_stride, sharpness, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr):
    """First sweep: (peak, Σ 2^d, Σ d·2^d) of the first ``width`` columns, in fp32.

    A NaN or +inf anywhere makes the sum NaN; a row of −inf gives (−inf, 0, 0).
    """
    peak = float("-inf")
    total = 0.0
    moment = 0.0
    whole = width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        _, offsets = column_offsets(start, column_stride, CONTIGUOUS, BLOCK)
        x = tl.load(row + offsets, eviction_policy="evict_last").to(tl.float32)
        peak, total, moment = _absorb(x, peak, total, moment, sharpness)
    if whole < width:
        columns, offsets = column_offsets(whole, column_stride, CONTIGUOUS, BLOCK)
        x = tl.load(row + offsets, mask=columns < width, other=float("-inf")).to(tl.float32)
        peak, total, moment = _absorb(x, peak, total, moment, sharpness)
    return peak, total, moment


@triton.jit
def _absorb(x, peak, total, moment, sharpness):
    """Merge a tile into running sums, rescaling them where the peak rises."""
    new_peak = tl.maximum(peak, tl.max(x, 0))
    shift = shift_of(new_peak, sharpness)
    d = tl.fma(x, sharpness, -shift)
    exps = tl.exp2(d)
    # before the first finite logit there is nothing to rescale: a factor of 0, never exp2(−inf + inf)
    back = tl.where(peak == float("-inf"), _LOWEST, shift_of(peak, sharpness) - shift)
    factor = tl.exp2(back)
    moment = factor * tl.fma(back, total, moment) + tl.sum(exps * tl.maximum(d, _LOWEST), 0)
    total = tl.fma(factor, total, tl.sum(exps, 0))
    return new_peak, total, moment


@triton.jit
def exact_sum(row, width, column_stride, sharpness, shift, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr):
    """Σ 2^d with fp64 accumulation, for rows whose tail is a small difference of large sums.

    Each addend is the same fp32 number as where a candidate's 2^d is computed, so subtracting the candidates'
    own fp64 sum leaves the tail alone, to all its digits.
    """
    total = tl.zeros((), tl.float64)
    whole = width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        _, offsets = column_offsets(start, column_stride, CONTIGUOUS, BLOCK)
        x = tl.load(row + offsets).to(tl.float32)
        total += tl.sum(tl.exp2(tl.fma(x, sharpness, -shift)).to(tl.float64), 0)
    if whole < width:
        columns, offsets = column_offsets(whole, column_stride, CONTIGUOUS, BLOCK)
        x = tl.load(row + offsets, mask=columns < width, other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp2(tl.fma(x, sharpness, -shift)).to(tl.float64), 0)
    return total


@triton.jit
def exact_head(shifted, first, last, K_BLOCK: tl.constexpr):
    """Σ 2^d over a row's candidates with fp64 accumulation."""
    total = tl.zeros((), tl.float64)
    for start in range(first, last, K_BLOCK):
        slots = start + tl.arange(0, K_BLOCK)
        d = tl.load(shifted + slots, mask=slots < last, other=float("-inf"))
        total += tl.sum(tl.exp2(d).to(tl.float64), 0)
    return total


@triton.jit
def write_row(
    row, out, width, column_stride, out_column_stride, sharpness, shift, level, slope,
    SLOPED: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Second sweep: write ``2^d · (level + slope · d)`` to ``out``, in reverse, where the row is still in cache.

    A row whose gradient lives on its candidates only is not read again: it receives zeros.
    """
    dead = level == 0.0
    if SLOPED:
        dead = dead & (slope == 0.0)
    if dead:
        clear_row(out, width, out_column_stride, CONTIGUOUS, BLOCK)
    else:
        whole = width // BLOCK * BLOCK
        if whole < width:
            columns, offsets = column_offsets(whole, column_stride, CONTIGUOUS, BLOCK)
            x = tl.load(row + offsets, mask=columns < width, other=float("-inf")).to(tl.float32)
            values = _slope_at(x, sharpness, shift, level, slope, SLOPED)
            _, offsets = column_offsets(whole, out_column_stride, CONTIGUOUS, BLOCK)
            tl.store(out + offsets, values.to(out.dtype.element_ty), mask=columns < width)
        for step in range(0, whole, BLOCK):
            start = whole - BLOCK - step
            _, offsets = column_offsets(start, column_stride, CONTIGUOUS, BLOCK)
            x = tl.load(row + offsets, eviction_policy="evict_first").to(tl.float32)
            values = _slope_at(x, sharpness, shift, level, slope, SLOPED)
            _, offsets = column_offsets(start, out_column_stride, CONTIGUOUS, BLOCK)
            tl.store(out + offsets, values.to(out.dtype.element_ty), eviction_policy="evict_first")


@triton.jit
def _slope_at(x, sharpness, shift, level, slope, SLOPED: tl.constexpr):
    d = tl.fma(x, sharpness, -shift)
    return tl.exp2(d) * (tl.fma(tl.maximum(d, _LOWEST), slope, level) if SLOPED else level)


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
    row, ids, shifted, first, last, first_id, width, column_stride, sharpness, shift, K_BLOCK: tl.constexpr
):
    """Write d of a row's candidates to ``shifted``; −inf for ids outside ``[first_id, first_id + width)``."""
    for start in range(first, last, K_BLOCK):
        slots = start + tl.arange(0, K_BLOCK)
        columns = tl.load(ids + slots, mask=slots < last, other=-1).to(tl.int64) - first_id
        here = (slots < last) & (columns >= 0) & (columns < width)
        x = tl.load(row + columns * column_stride, mask=here, other=float("-inf")).to(tl.float32)
        d = tl.where(here, tl.fma(x, sharpness, -shift), float("-inf"))
        tl.store(shifted + slots, d, mask=slots < last)


@triton.jit
def gather_one(row, token, first_id, width, column_stride, sharpness, shift):
    """d of one id; −inf where it lies outside the shard."""
    column = token - first_id
    here = (column >= 0) & (column < width)
    x = tl.load(row + column * column_stride, mask=here, other=float("-inf")).to(tl.float32)
    return tl.where(here, tl.fma(x, sharpness, -shift), float("-inf"))


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
