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
# no shift lies below: beyond, its rounding alone would be an exponent that overflows. 2^29 is 3.7e8 nats
LOWEST_SHIFT = tl.constexpr(-536870912.0)
# with a tail scale below this the tail may be a difference: its error, 1e-7 of the total, stays below 1e-5
LARGEST_TAIL_SCALE_BY_SUBTRACTION = tl.constexpr(64.0)


@triton.jit
def shift_of(peak, sharpness):
    """The row's shift in base 2, finite for every peak below +inf: logits that mask with −inf, or with −3e38, sum to 0
    wherever they stand alone, and −inf − (−inf) never arises."""
    return tl.maximum(peak * sharpness, LOWEST_SHIFT)


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
    row, width, column_stride, sharpness,
    CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """First sweep: (peak, Σ 2^d, Σ d·2^d) of the first ``width`` columns, in fp32.

    A NaN or +inf anywhere makes the sum NaN; a row of −inf gives (−inf, 0, 0). Every thread sums what it read,
    relative to its own peak, and the threads meet once, at the end: no barrier in the loop.
    """
    peak = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    moment = tl.zeros((LANES,), tl.float32)
    whole = width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        peak, total, moment = _absorb(
            row, start, width, column_stride, sharpness, peak, total, moment,
            False, CONTIGUOUS, BLOCK, LANES, VECTOR,
        )  # fmt: skip
    for start in range(whole, width, LANES * VECTOR):
        peak, total, moment = _absorb(
            row, start, width, column_stride, sharpness, peak, total, moment,
            True, CONTIGUOUS, LANES * VECTOR, LANES, VECTOR,
        )  # fmt: skip
    top = tl.max(peak, 0)
    total, moment = _rescaled(total, moment, peak, shift_of(top, sharpness), sharpness)
    return top, tl.sum(total, 0), tl.sum(moment, 0)


@triton.jit
def _absorb(
    row, start, width, column_stride, sharpness, peak, total, moment,
    MASKED: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Merge a tile into sums ``[LANES]``, rescaling them where their peak rises."""
    x = load_round(row, start, width, column_stride, MASKED, CONTIGUOUS, LANES, VECTOR)
    tile = (x,)
    best = x
    for step in tl.static_range(LANES * VECTOR, BLOCK, LANES * VECTOR):
        x = load_round(row, start + step, width, column_stride, MASKED, CONTIGUOUS, LANES, VECTOR)
        tile = tile + (x,)  # type: ignore[assignment]  # noqa: RUF005 - the compiler knows no unpacking
        best = tl.maximum(best, x)
    new_peak = tl.maximum(peak, tl.max(best, 1))
    shift = shift_of(new_peak, sharpness)
    d = tl.fma(tile[0], sharpness, -shift[:, None])
    exps = tl.exp2(d)
    moments = exps * tl.maximum(d, _LOWEST)
    for i in tl.static_range(1, BLOCK // (LANES * VECTOR)):
        d = tl.fma(tile[i], sharpness, -shift[:, None])
        power = tl.exp2(d)
        exps += power
        moments = tl.fma(power, tl.maximum(d, _LOWEST), moments)
    total, moment = _rescaled(total, moment, peak, shift, sharpness)
    return new_peak, total + tl.sum(exps, 1), moment + tl.sum(moments, 1)


@triton.jit
def _rescaled(total, moment, peak, shift, sharpness):
    """Sums relative to ``peak``, made relative to a ``shift`` that is at least as high."""
    back = shift_of(peak, sharpness) - shift
    factor = tl.exp2(back)
    return factor * total, factor * tl.fma(back, total, moment)


@triton.jit
def exact_sum(
    row, width, column_stride, sharpness, shift,
    CONTIGUOUS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Σ 2^d with fp64 accumulation, for rows whose tail is a small difference of large sums.

    Each addend is the same fp32 number as where a candidate's 2^d is computed, so subtracting the candidates'
    own fp64 sum leaves the tail alone, to all its digits.
    """
    total = tl.zeros((LANES,), tl.float64)
    step: tl.constexpr = LANES * VECTOR
    whole = width // step * step
    for start in range(0, whole, step):
        x = load_round(row, start, width, column_stride, False, CONTIGUOUS, LANES, VECTOR)
        total += tl.sum(tl.exp2(tl.fma(x, sharpness, -shift)).to(tl.float64), 1)
    if whole < width:
        x = load_round(row, whole, width, column_stride, True, CONTIGUOUS, LANES, VECTOR)
        total += tl.sum(tl.exp2(tl.fma(x, sharpness, -shift)).to(tl.float64), 1)
    return tl.sum(total, 0)


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
        TAIL: tl.constexpr = BLOCK // 4
        for start in range(whole, width, TAIL):
            columns, offsets = column_offsets(start, column_stride, CONTIGUOUS, TAIL)
            x = tl.load(row + offsets, mask=columns < width, other=float("-inf")).to(tl.float32)
            values = _slope_at(x, sharpness, shift, level, slope, SLOPED)
            _, offsets = column_offsets(start, out_column_stride, CONTIGUOUS, TAIL)
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
