"""The fused loss: one visit to each row computes its sums, its loss, its diagnostics and its gradient.

One program per row, nothing shared between rows: no atomics, and a row's result does not depend on its batch. The
PyTorch twin is `offpolicy_corr.dense.visit`; what each line computes is derived in `offpolicy_corr.centering`.

    sweep 1   read the row: peak, Σ 2^d, Σ d·2^d
    head      gather the candidates; p's mass on them, ρ, α; weights m, coefficients c, the loss; their gradients
    sweep 2   read the row backwards, write the dense gradient over it
    scatter   store the gradients of the candidates and of the sampled token

With the statistics of a vocabulary-parallel row given, sweep 1 and the gather are left out.
"""

# device functions have no types that mypy could check
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"
from __future__ import annotations

import triton
import triton.language as tl

from .row_passes import (
    _LOWEST,
    LARGEST_TAIL_SCALE_BY_SUBTRACTION,
    LN2,
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
from .weights import tail_scale, token_weight, weighted_prob


@triton.jit
def fused_loss(
    logits, gradient, results, shifted,
    tokens, trained, logq, advantages, scale, sharpness, reference,
    ids, candidate_logq, offsets, complete, q_tail, statistics,
    rows, row_stride, column_stride, out_row_stride, out_column_stride, width, first_id,
    tail_floor, entropy_coef, kl_coef, low, high, log_low, log_high, tail_low, tail_high,
    RULE: tl.constexpr, KL: tl.constexpr, CENTER: tl.constexpr, ENTROPY: tl.constexpr, EXACT_TAIL: tl.constexpr,
    CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Args, where None leaves a part out (of the compiled code, too):

    logits: ``[rows, width]``; gradient: the same, possibly the same memory, or None.
    results: fp32 ``[10, rows]`` in the order of `offpolicy_corr.result.FIELDS`.
    shifted: fp32 ``[nnz]`` scratch: the candidates' d, then their gradients.
    tokens … reference: ``[rows]``; trained: None where every row is; reference: None without KL.
    ids … q_tail: CSR candidates; ids None: no candidates; candidate_logq None: ids alone; q_tail: fp32 1 − Q_H.
    statistics: fp32 ``[5, rows]`` (peak, total, tail, moment, token), with ``shifted`` filled, or None.
    EXACT_TAIL: the rule's α can be large: sum the trainer's tail directly where it is.
    """
    t = tl.program_id(0).to(tl.int64)
    row = logits + t * row_stride
    if gradient is not None:
        out = gradient + t * out_row_stride
    live = True
    if trained is not None:
        live = tl.load(trained + t) != 0
    if live:
        heat = tl.load(sharpness + t)

        # ---- the row's sums; what later steps need is read after them, so that it takes no registers here
        if statistics is None:
            peak, total, moment = row_sums(row, width, column_stride, heat, CONTIGUOUS, BLOCK, LANES, VECTOR)
        else:
            column = statistics + t
            peak, total, moment = tl.load(column), tl.load(column + rows), tl.load(column + 3 * rows)
        shift = shift_of(peak, heat)
        token = tl.load(tokens + t).to(tl.int64)
        advantage = tl.load(advantages + t).to(tl.float32)
        first = tl.zeros((), tl.int64)
        last = tl.zeros((), tl.int64)
        is_complete = tl.zeros((), tl.int1)
        if ids is not None:
            first = tl.load(offsets + t)
            last = tl.load(offsets + t + 1)
            is_complete = tl.load(complete + t) != 0
        if statistics is None:
            token_d = gather_one(row, token, first_id, width, column_stride, heat, shift)
            if ids is not None:
                gather(row, ids, shifted, first, last, first_id, width, column_stride, heat, shift, K_BLOCK)
                tl.debug_barrier()
        else:
            token_d = tl.load(statistics + 4 * rows + t)

        # ---- p over the vocabulary, or over the set
        log_total = tl.log2(total)
        top, mass, mean = _head_sums(shifted, first, last, is_complete, ids is not None, K_BLOCK)
        log_mass = tl.where(is_complete, tl.log2(mass), log_total)
        over_vocabulary = log_total - moment / total
        entropy = LN2 * tl.where(is_complete, log_mass - mean, over_vocabulary)
        # x − x is 0 for finite numbers only
        finite = ((over_vocabulary - over_vocabulary) == 0.0) & ((log_mass - log_mass) == 0.0)
        token_logp = _logp(token_d, top, log_mass)

        # ---- the tail: q's is data, p's is summed
        q_mass, p_mass, rho, p_tail = float("nan"), float("nan"), float("nan"), 0.0
        if ids is not None:
            absent = (first == last) & (is_complete == 0)
            p_mass = tl.where(absent, float("nan"), tl.exp2(top + tl.log2(mass) - log_total))
            q_mass = tl.where(is_complete, 1.0, float("nan"))
            rho = q_mass
            if statistics is None:
                p_tail = tl.maximum(total - mass, 0.0) / total
            else:
                p_tail = tl.load(statistics + 2 * rows + t) / total
            if candidate_logq is not None:
                unrecorded = tl.load(q_tail + t)
                known = (is_complete == 0) & (absent == 0)
                q_mass = tl.where(known, 1.0 - unrecorded, q_mass)
                unrecorded = tl.maximum(unrecorded, tail_floor)
                rho = tl.where(known, unrecorded / tl.maximum(p_tail, tail_floor), rho)
                if EXACT_TAIL and statistics is None:  # noqa: SIM102 - one is known to the compiler, one is data
                    if known & (rho > LARGEST_TAIL_SCALE_BY_SUBTRACTION):
                        whole = exact_sum(row, width, column_stride, heat, shift, CONTIGUOUS, LANES, VECTOR)
                        head = exact_head(shifted, first, last, K_BLOCK)
                        p_tail = (whole - head).to(tl.float32) / total
                        rho = unrecorded / tl.maximum(p_tail, tail_floor)

        # ---- weight, coefficients, loss
        log_ratio = token_logp - tl.load(logq + t).to(tl.float32)
        weight = token_weight(log_ratio, advantage, log_low, log_high, RULE)
        alpha, center, correction, penalty = 0.0, 0.0, 0.0, 0.0
        if CENTER and ids is not None:
            alpha = tail_scale(rho, advantage, low, high, tail_low, tail_high, RULE)
            alpha = tl.where(is_complete, 0.0, alpha)
            head, correction, penalty = _centering(
                shifted, candidate_logq, first, last, top, log_mass, advantage, alpha,
                low, high, log_low, log_high, RULE, K_BLOCK,
            )  # fmt: skip
            center = head + _product(alpha, p_tail)
        pull = _product(advantage, weight)
        loss = penalty - _product(pull, token_logp)
        if KL > 0:
            value, slope = _kl(token_logp - tl.load(reference + t).to(tl.float32), KL)
            loss += kl_coef * value
            pull -= kl_coef * slope
        if ENTROPY:
            loss -= entropy_coef * entropy
        usable = finite
        if CENTER:
            usable = finite & (first < last)  # a centered row without a candidate has no loss to fall back to
        loss = tl.where(usable, loss, float("nan"))
        _report(
            results + t, rows, loss, finite, token_logp, log_ratio, weight, entropy, correction,
            q_mass, p_mass, rho,
        )  # fmt: skip

        if gradient is not None:
            # a row of a dropped sequence is silent, whatever it holds
            factor = tl.load(scale + t).to(tl.float32)
            _write_gradient(
                row, out, shifted, ids, candidate_logq, first, last, is_complete, token, token_logp,
                heat, shift, total, log_total, top, log_mass, entropy,
                advantage, pull, center, alpha, factor, entropy_coef, low, high, log_low, log_high,
                column_stride, out_column_stride, width, first_id, RULE, CENTER, ENTROPY, CONTIGUOUS, BLOCK, K_BLOCK,
            )  # fmt: skip
    else:
        for field in tl.static_range(10):
            tl.store(results + field * rows + t, 0.0)
        if gradient is not None:
            clear_row(out, width, out_column_stride, CONTIGUOUS, BLOCK)


@triton.jit
def _write_gradient(
    row, out, shifted, ids, candidate_logq, first, last, is_complete, token, token_logp,
    heat, shift, total, log_total, top, log_mass, entropy,
    advantage, pull, center, alpha, factor, entropy_coef, low, high, log_low, log_high,
    column_stride, out_column_stride, width, first_id,
    RULE: tl.constexpr, CENTER: tl.constexpr, ENTROPY: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Sweep 2 and the scatter: the gradient of the row's loss times ``factor``, with respect to its raw logits."""
    advantage_scaled = _product(factor, advantage)
    pull = _product(factor, pull)
    on_head = pull - _product(advantage_scaled, center)
    bonus = factor * entropy_coef if ENTROPY else 0.0
    cooling = heat * LN2  # 1 / temperature: the gradient is with respect to raw logits
    dense = tl.where(is_complete, 0.0, on_head + _product(advantage_scaled, alpha))
    spread = tl.where(is_complete, 0.0, bonus)
    on_token = _product(dense, tl.exp(token_logp)) - pull
    if ENTROPY:
        on_token += spread * _entropy_slope(token_logp, entropy)
    listed = False
    if ids is not None:
        listed = _head_gradient(
            shifted, ids, candidate_logq, first, last, token, top, log_mass, advantage, advantage_scaled,
            on_head, pull, bonus, entropy, cooling, factor, low, high, log_low, log_high,
            RULE, CENTER, ENTROPY, K_BLOCK,
        )  # fmt: skip
    # p (dense + bonus (log p + H)) as 2^d (level + slope d)
    slope = cooling * spread * LN2 / total
    level = cooling * dense / total - slope * (log_total - entropy / LN2)
    level = tl.where(factor == 0.0, 0.0, level)
    slope = tl.where(factor == 0.0, 0.0, slope)
    on_token = tl.where(factor == 0.0, 0.0, on_token)
    tl.debug_barrier()  # every gathered logit has been read before the first is overwritten
    write_row(
        row, out, width, column_stride, out_column_stride, heat, shift, level, slope,
        ENTROPY, CONTIGUOUS, BLOCK,
    )  # fmt: skip
    tl.debug_barrier()  # every dense gradient has landed before the sparse ones replace some
    if listed == 0:
        scatter_one(out, token, on_token * cooling, first_id, width, out_column_stride)
    if ids is not None:
        scatter(out, ids, shifted, first, last, first_id, width, out_column_stride, K_BLOCK)


@triton.jit
def _logp(d, top, log_mass):
    """log p in nats. Two subtractions: the set may lie so far below the peak that one sum of both loses digits."""
    return LN2 * ((d - top) - log_mass)


@triton.jit
def _product(coefficient, value):
    """coefficient · value, where a zero coefficient beats −inf, inf and NaN."""
    return tl.where(coefficient == 0.0, 0.0, coefficient * value)


@triton.jit
def _entropy_slope(logp, entropy):
    """p (log p + H) = −∂H/∂z; 0 for an impossible candidate."""
    p = tl.exp(logp)
    return _product(p, logp) + p * entropy


@triton.jit
def _kl(gap, KL: tl.constexpr):
    """(estimate, derivative) of k1, k2, k3 or low_var_kl in d = log p − log p_ref."""
    if KL == 1:
        value = gap
        slope = gap * 0.0 + 1.0
    elif KL == 2:
        value = 0.5 * gap * gap
        slope = gap
    else:
        slope = -_expm1(-gap)
        value = gap - slope
        if KL == 4:
            slope = tl.where(value > 10.0, 0.0, slope)
            value = tl.minimum(value, 10.0)
    return value, slope


@triton.jit
def _expm1(x):
    """e^x − 1 without cancellation around 0, where a Taylor polynomial is good to an ulp."""
    near = x * (1.0 + x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720))))))
    return tl.where(tl.abs(x) < 0.25, near, tl.exp(x) - 1.0)


@triton.jit
def _head_sums(shifted, first, last, is_complete, PRESENT: tl.constexpr, K_BLOCK: tl.constexpr):
    """(top, Σ 2^(d−top), mean of d−top) over the candidates; top is their largest d on a complete row, else 0.

    A support is summed relative to its own largest logit: the vocabulary may give it a mass that underflows.
    """
    top = 0.0
    mass = 0.0
    moment = 0.0
    if PRESENT:
        if is_complete:
            best = float("-inf")
            for start in range(first, last, K_BLOCK):
                slots = start + tl.arange(0, K_BLOCK)
                d = tl.load(shifted + slots, mask=slots < last, other=float("-inf"))
                best = tl.maximum(best, tl.max(d, 0))
            top = tl.where(best == float("-inf"), 0.0, best)
        for start in range(first, last, K_BLOCK):
            slots = start + tl.arange(0, K_BLOCK)
            d = tl.load(shifted + slots, mask=slots < last, other=float("-inf")) - top
            exps = tl.exp2(d)
            mass += tl.sum(exps, 0)
            moment += tl.sum(exps * tl.maximum(d, _LOWEST), 0)
    return top, mass, moment / mass


@triton.jit
def _centering(
    shifted, candidate_logq, first, last, top, log_mass, advantage, alpha, low, high, log_low, log_high,
    RULE: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """(Σ_H m, Σ_H c log p, Σ_H A c log p) with c = m − α p."""
    total = 0.0
    correction = 0.0
    penalty = 0.0
    for start in range(first, last, K_BLOCK):
        slots = start + tl.arange(0, K_BLOCK)
        used = slots < last
        d = tl.load(shifted + slots, mask=used, other=float("-inf"))
        logq = tl.load(candidate_logq + slots, mask=used, other=float("-inf")).to(tl.float32)
        logp = _logp(d, top, log_mass)
        weighted = tl.where(
            used, weighted_prob(logp, logq, advantage, low, high, log_low, log_high, RULE), 0.0
        )
        coefficient = weighted - alpha * tl.exp(logp)
        coefficient = tl.where(used, coefficient, 0.0)
        total += tl.sum(weighted, 0)
        correction += tl.sum(_product(coefficient, logp), 0)
        penalty += tl.sum(_product(advantage * coefficient, logp), 0)
    return total, correction, penalty


@triton.jit
def _head_gradient(
    shifted, ids, candidate_logq, first, last, token, top, log_mass, advantage, advantage_scaled, on_head, pull,
    bonus, entropy, cooling, factor, low, high, log_low, log_high,
    RULE: tl.constexpr, CENTER: tl.constexpr, ENTROPY: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace the candidates' d by their gradients; returns whether the sampled token is among them.

    The sampled token is folded in here where it is a candidate, so that every element is rounded and stored once.
    """
    listed = tl.zeros((), tl.int32)
    for start in range(first, last, K_BLOCK):
        slots = start + tl.arange(0, K_BLOCK)
        used = slots < last
        d = tl.load(shifted + slots, mask=used, other=float("-inf"))
        logp = _logp(d, top, log_mass)
        values = _product(on_head, tl.exp(logp))
        if CENTER:
            logq = tl.load(candidate_logq + slots, mask=used, other=float("-inf")).to(tl.float32)
            weighted = weighted_prob(logp, logq, advantage, low, high, log_low, log_high, RULE)
            values += _product(advantage_scaled, weighted)
        is_token = used & (tl.load(ids + slots, mask=used, other=-1).to(tl.int64) == token)
        values -= tl.where(is_token, pull, 0.0)
        if ENTROPY:
            values += bonus * _entropy_slope(logp, entropy)
        tl.store(shifted + slots, tl.where(factor == 0.0, 0.0, values * cooling), mask=used)
        listed = tl.maximum(listed, tl.max(is_token.to(tl.int32), 0))
    return listed


@triton.jit
def _report(
    results, rows, loss, finite, logp, log_ratio, weight, entropy, correction, q_mass, p_mass, rho
):  # fmt: skip
    """One column of ``[len(FIELDS), rows]``."""
    tl.store(results, loss)
    tl.store(results + rows, tl.where(finite, 1.0, 0.0))
    tl.store(results + 2 * rows, logp)
    tl.store(results + 3 * rows, log_ratio)
    tl.store(results + 4 * rows, weight)
    tl.store(results + 5 * rows, entropy)
    tl.store(results + 6 * rows, correction)
    tl.store(results + 7 * rows, q_mass)
    tl.store(results + 8 * rows, p_mass)
    tl.store(results + 9 * rows, rho)
