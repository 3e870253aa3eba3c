"""Row passes: single-pass kernels, for callers that need a collective, or their own autograd, between the passes.

`row_stats` reads each row once; `row_gradient` reads it once more and writes a gradient of the general form
``p (prob_coef + entropy_coef (log p + H))`` with given values on the candidates. The PyTorch twin is
`offpolicy_corr.row_passes`.
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
def row_stats(
    logits, sums, candidate_logits, tokens, trained, log2e_over_temps, ids, offsets, sampler_tail,
    rows, row_stride, column_stride, width, first_id, tail_floor,
    CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """(row_max, sum_exp, tail_sum_exp, sum_d_exp, token_logit) of every row into ``sums``, fp32 ``[5, rows]``.

    ``candidate_logits`` ``[nnz]`` receives d of the candidates. In base 2 and relative to the row's own maximum;
    masked rows, which are not read, get (0, 1, 1, 0, 0). ``width`` may be 0. Ids outside the shard give −inf. With
    ``sampler_tail`` (fp32 ``[rows]``, 1 − Q_H) given, the tail is summed directly where it is so small that the
    rule's α could multiply its rounding.
    """
    t = tl.program_id(0).to(tl.int64)
    row = logits + t * row_stride
    is_trained = True
    if trained is not None:
        is_trained = tl.load(trained + t) != 0
    if is_trained:
        log2e_over_temp = tl.load(log2e_over_temps + t)
        row_max, sum_exp, sum_d_exp = row_sums(
            row, width, column_stride, log2e_over_temp, CONTIGUOUS, BLOCK, LANES, VECTOR
        )
        shift = shift_of(row_max, log2e_over_temp)
        tail = sum_exp
        if ids is not None:
            first = tl.load(offsets + t)
            last = tl.load(offsets + t + 1)
            gather(
                row,
                ids,
                candidate_logits,
                first,
                last,
                first_id,
                width,
                column_stride,
                log2e_over_temp,
                shift,
                K_BLOCK,
            )
            tl.debug_barrier()
            tail = tl.maximum(sum_exp - _head_mass(candidate_logits, first, last, K_BLOCK), 0.0)
            if sampler_tail is not None:
                # the shard's own share of the tail bounds the effect of its rounding on the whole row
                sampler_tail_mass = tl.maximum(tl.load(sampler_tail + t), tail_floor)
                if sampler_tail_mass * sum_exp > LARGEST_TAIL_SCALE_BY_SUBTRACTION * tail:
                    whole = exact_sum(
                        row, width, column_stride, log2e_over_temp, shift, CONTIGUOUS, LANES, VECTOR
                    )
                    tail = (whole - exact_head(candidate_logits, first, last, K_BLOCK)).to(tl.float32)
        tl.store(sums + t, row_max)
        tl.store(sums + rows + t, sum_exp)
        tl.store(sums + 2 * rows + t, tail)
        tl.store(sums + 3 * rows + t, sum_d_exp)
        token = tl.load(tokens + t).to(tl.int64)
        d = gather_one(row, token, first_id, width, column_stride, log2e_over_temp, shift)
        tl.store(sums + 4 * rows + t, d)
    else:
        tl.store(sums + t, 0.0)
        tl.store(sums + rows + t, 1.0)
        tl.store(sums + 2 * rows + t, 1.0)
        tl.store(sums + 3 * rows + t, 0.0)
        tl.store(sums + 4 * rows + t, 0.0)
        if ids is not None:
            last = tl.load(offsets + t + 1)
            for start in range(tl.load(offsets + t), last, K_BLOCK):
                slots = start + tl.arange(0, K_BLOCK)
                tl.store(candidate_logits + slots, tl.zeros((K_BLOCK,), tl.float32), mask=slots < last)


@triton.jit
def _head_mass(candidate_logits, first, last, K_BLOCK: tl.constexpr):
    mass = 0.0
    for start in range(first, last, K_BLOCK):
        slots = start + tl.arange(0, K_BLOCK)
        mass += tl.sum(tl.exp2(tl.load(candidate_logits + slots, mask=slots < last, other=float("-inf"))), 0)
    return mass


@triton.jit
def row_gradient(
    logits, gradient, tokens, trained, log2e_over_temps, row_maxima, intercepts, slopes,
    ids, offsets, candidate_grads, token_grads, token_is_candidate,
    row_stride, column_stride, out_row_stride, out_column_stride, width, first_id,
    SLOPED: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``2^d (intercept + slope d)`` to every row and the given values to its candidates and its sampled token.

    row_maxima, intercepts, token_grads, where SLOPED slopes: fp32 ``[rows]``; candidate_grads: fp32 ``[nnz]``; all for
    raw logits. ``token_is_candidate``: bool ``[rows]``; the candidate's value then holds. Masked rows receive 0.
    """
    t = tl.program_id(0).to(tl.int64)
    out = gradient + t * out_row_stride
    is_trained = True
    if trained is not None:
        is_trained = tl.load(trained + t) != 0
    if is_trained:
        log2e_over_temp = tl.load(log2e_over_temps + t)
        shift = shift_of(tl.load(row_maxima + t), log2e_over_temp)
        slope = 0.0
        if SLOPED:
            slope = tl.load(slopes + t)
        write_row(
            logits + t * row_stride, out, width, column_stride, out_column_stride, log2e_over_temp, shift,
            tl.load(intercepts + t), slope, SLOPED, CONTIGUOUS, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()  # the row's gradient is stored before those of candidates replace some of it
        is_alone = True
        if ids is not None:
            is_alone = tl.load(token_is_candidate + t) == 0
        if is_alone:
            token = tl.load(tokens + t).to(tl.int64)
            scatter_one(out, token, tl.load(token_grads + t), first_id, width, out_column_stride)
        if ids is not None:
            first = tl.load(offsets + t)
            last = tl.load(offsets + t + 1)
            scatter(out, ids, candidate_grads, first, last, first_id, width, out_column_stride, K_BLOCK)
    else:
        clear_row(out, width, out_column_stride, CONTIGUOUS, BLOCK)
