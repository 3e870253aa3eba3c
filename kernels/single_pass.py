"""One sweep at a time, for when something must happen in between: collectives, or other people's autograd.

`row_statistics` reads each row once; `row_gradient` reads it once more and writes a gradient of the general form
``p (dense + entropy (log p + H))`` with given values on the candidates. Their twin is `offpolicy_corr.softmax`.
"""

# device functions have no types that mypy could check
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"
from __future__ import annotations

import triton
import triton.language as tl

from .row_passes import (
    LARGEST_TAIL_SCALE_BY_SUBTRACTION,
    clear_row,
    exact_head,
    exact_sum,
    gather,
    gather_one,
    row_sums,
    scatter,
    scatter_one,
    shift_of,
    write_row,
)


@triton.jit
def row_statistics(
    logits, statistics, shifted, tokens, trained, sharpness, ids, offsets, q_tail,
    rows, row_stride, column_stride, width, first_id, tail_floor,
    CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """(peak, total, tail, moment, token) of every row into fp32 ``[5, rows]``, d of the candidates into ``[nnz]``.

    In base 2 and relative to the row's own peak; masked rows, which are not read, get (0, 1, 1, 0, 0). ``width`` may
    be 0. Ids outside the shard give −inf. With ``q_tail`` (fp32 ``[rows]``, 1 − Q_H) given, the tail is summed directly
    where it is so small that the rule's α could multiply its rounding.
    """
    t = tl.program_id(0).to(tl.int64)
    row = logits + t * row_stride
    live = True
    if trained is not None:
        live = tl.load(trained + t) != 0
    if live:
        heat = tl.load(sharpness + t)
        peak, total, moment = row_sums(row, width, column_stride, heat, CONTIGUOUS, BLOCK, LANES, VECTOR)
        shift = shift_of(peak, heat)
        tail = total
        if ids is not None:
            first = tl.load(offsets + t)
            last = tl.load(offsets + t + 1)
            gather(row, ids, shifted, first, last, first_id, width, column_stride, heat, shift, K_BLOCK)
            tl.debug_barrier()
            tail = tl.maximum(total - _head_mass(shifted, first, last, K_BLOCK), 0.0)
            if q_tail is not None:
                # a shard's own share of the tail bounds what its rounding can do to the whole row
                unrecorded = tl.maximum(tl.load(q_tail + t), tail_floor)
                if unrecorded * total > LARGEST_TAIL_SCALE_BY_SUBTRACTION * tail:
                    whole = exact_sum(row, width, column_stride, heat, shift, CONTIGUOUS, LANES, VECTOR)
                    tail = (whole - exact_head(shifted, first, last, K_BLOCK)).to(tl.float32)
        tl.store(statistics + t, peak)
        tl.store(statistics + rows + t, total)
        tl.store(statistics + 2 * rows + t, tail)
        tl.store(statistics + 3 * rows + t, moment)
        token = tl.load(tokens + t).to(tl.int64)
        d = gather_one(row, token, first_id, width, column_stride, heat, shift)
        tl.store(statistics + 4 * rows + t, d)
    else:
        tl.store(statistics + t, 0.0)
        tl.store(statistics + rows + t, 1.0)
        tl.store(statistics + 2 * rows + t, 1.0)
        tl.store(statistics + 3 * rows + t, 0.0)
        tl.store(statistics + 4 * rows + t, 0.0)
        if ids is not None:
            last = tl.load(offsets + t + 1)
            for start in range(tl.load(offsets + t), last, K_BLOCK):
                slots = start + tl.arange(0, K_BLOCK)
                tl.store(shifted + slots, tl.zeros((K_BLOCK,), tl.float32), mask=slots < last)


@triton.jit
def _head_mass(shifted, first, last, K_BLOCK: tl.constexpr):
    mass = 0.0
    for start in range(first, last, K_BLOCK):
        slots = start + tl.arange(0, K_BLOCK)
        mass += tl.sum(tl.exp2(tl.load(shifted + slots, mask=slots < last, other=float("-inf"))), 0)
    return mass


@triton.jit
def row_gradient(
    logits, gradient, tokens, trained, sharpness, peaks, level, slope,
    ids, offsets, on_candidates, on_token, listed,
    row_stride, column_stride, out_row_stride, out_column_stride, width, first_id,
    SLOPED: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``2^d (level + slope d)`` to every row and the given values to its candidates and its sampled token.

    peaks, level, on_token, where SLOPED slope: fp32 ``[rows]``; on_candidates: fp32 ``[nnz]``; all for raw logits.
    ``listed``: bool ``[rows]``, the token is a candidate, whose value then holds. Masked rows receive 0.
    """
    t = tl.program_id(0).to(tl.int64)
    out = gradient + t * out_row_stride
    live = True
    if trained is not None:
        live = tl.load(trained + t) != 0
    if live:
        heat = tl.load(sharpness + t)
        shift = shift_of(tl.load(peaks + t), heat)
        rise = 0.0
        if SLOPED:
            rise = tl.load(slope + t)
        write_row(
            logits + t * row_stride, out, width, column_stride, out_column_stride, heat, shift,
            tl.load(level + t), rise, SLOPED, CONTIGUOUS, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()  # every dense gradient has landed before the sparse ones replace some
        alone = True
        if ids is not None:
            alone = tl.load(listed + t) == 0
        if alone:
            token = tl.load(tokens + t).to(tl.int64)
            scatter_one(out, token, tl.load(on_token + t), first_id, width, out_column_stride)
        if ids is not None:
            first = tl.load(offsets + t)
            last = tl.load(offsets + t + 1)
            scatter(out, ids, on_candidates, first, last, first_id, width, out_column_stride, K_BLOCK)
    else:
        clear_row(out, width, out_column_stride, CONTIGUOUS, BLOCK)
