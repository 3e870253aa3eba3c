"""Row passes: the fused loss, one kernel that computes a row's sums, its loss, its diagnostics and its gradient.

One program per row, nothing shared between rows: no atomics, and a row's result does not depend on its batch. The
PyTorch twin is `offpolicy_corr.torch_loss`; what each line computes is derived in `offpolicy_corr.centering`.

    pass 1    read the row: its maximum, Σ 2^d, Σ d·2^d
    head      gather the candidates; p's mass on them, ρ, α; weights m, coefficients c, the loss; their gradients
    pass 2    read the row backwards, write the gradient over it
    scatter   store the gradients of the candidates and of the sampled token

With the sums of a vocabulary-parallel row given, pass 1 and the gather are left out.
"""

# device functions have no types that mypy could check
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"
from __future__ import annotations

import triton
import triton.language as tl

from .row_passes import (
    LARGEST_TAIL_SCALE_BY_SUBTRACTION,
    LN2,
    LOWEST_D,
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
    logits, gradient, results, candidate_logits,
    tokens, trained, logq, advantages, scale, log2e_over_temps, ref_logprobs,
    ids, candidate_logq, offsets, complete, sampler_tail, row_stats,
    rows, row_stride, column_stride, out_row_stride, out_column_stride, width, first_id,
    tail_floor, entropy_coef, kl_coef, low, high, log_low, log_high, tail_low, tail_high,
    RULE: tl.constexpr, KL: tl.constexpr, CENTER: tl.constexpr, ENTROPY: tl.constexpr, EXACT_TAIL: tl.constexpr,
    CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Args, where None leaves a part out (of the compiled code, too):

    logits: ``[rows, width]``; gradient: the same, possibly the same memory, or None.
    results: fp32 ``[10, rows]`` in the order of `offpolicy_corr.result.FIELDS`.
    candidate_logits: fp32 ``[nnz]`` scratch: the candidates' d, then their gradients.
    tokens to ref_logprobs: ``[rows]``; trained: None where every row is; ref_logprobs: None without KL.
    ids to sampler_tail: CSR candidates; ids None: no candidates; candidate_logq None: ids alone; sampler_tail: fp32
        1 − Q_H.
    row_stats: fp32 ``[5, rows]`` as `single_pass.row_stats` writes them, with ``candidate_logits`` filled, or None.
    EXACT_TAIL: the rule's α can be large: sum the trainer's tail directly where it is.
    """
    t = tl.program_id(0).to(tl.int64)
    row = logits + t * row_stride
    if gradient is not None:
        out = gradient + t * out_row_stride
    is_trained = True
    if trained is not None:
        is_trained = tl.load(trained + t) != 0
    if is_trained:
        log2e_over_temp = tl.load(log2e_over_temps + t)

        # ---- the row's sums; what later steps need is read after them, so that it takes no registers here
        if row_stats is None:
            row_max, sum_exp, sum_d_exp = row_sums(
                row, width, column_stride, log2e_over_temp, CONTIGUOUS, BLOCK, LANES, VECTOR
            )
        else:
            column = row_stats + t
            row_max, sum_exp, sum_d_exp = tl.load(column), tl.load(column + rows), tl.load(column + 3 * rows)
        shift = shift_of(row_max, log2e_over_temp)
        token = tl.load(tokens + t).to(tl.int64)
        advantage = tl.load(advantages + t).to(tl.float32)
        first = tl.zeros((), tl.int64)
        last = tl.zeros((), tl.int64)
        is_complete = tl.zeros((), tl.int1)
        if ids is not None:
            first = tl.load(offsets + t)
            last = tl.load(offsets + t + 1)
            is_complete = tl.load(complete + t) != 0
        if row_stats is None:
            token_d = gather_one(row, token, first_id, width, column_stride, log2e_over_temp, shift)
            if ids is not None:
                gather(
                    row, ids, candidate_logits, first, last, first_id, width, column_stride, log2e_over_temp, shift,
                    K_BLOCK,
                )  # fmt: skip
                tl.debug_barrier()
        else:
            token_d = tl.load(row_stats + 4 * rows + t)

        # ---- p over the vocabulary, or over the set
        log_sum_exp = tl.log2(sum_exp)
        set_max, mass, mean = _head_sums(candidate_logits, first, last, is_complete, ids is not None, K_BLOCK)
        log_mass = tl.where(is_complete, tl.log2(mass), log_sum_exp)
        over_vocabulary = log_sum_exp - sum_d_exp / sum_exp
        entropy = LN2 * tl.where(is_complete, log_mass - mean, over_vocabulary)
        # x − x is 0 for finite numbers only
        finite = ((over_vocabulary - over_vocabulary) == 0.0) & ((log_mass - log_mass) == 0.0)
        token_logp = _logp(token_d, set_max, log_mass)

        # ---- the tail: q's is data, p's is summed
        sampler_head_mass, trainer_head_mass, rho = float("nan"), float("nan"), float("nan")
        trainer_tail_mass = 0.0
        if ids is not None:
            empty_head = (first == last) & (is_complete == 0)
            trainer_head_mass = tl.where(
                empty_head, float("nan"), tl.exp2(set_max + tl.log2(mass) - log_sum_exp)
            )
            sampler_head_mass = tl.where(is_complete, 1.0, float("nan"))
            rho = sampler_head_mass
            if row_stats is None:
                trainer_tail_mass = tl.maximum(sum_exp - mass, 0.0) / sum_exp
            else:
                trainer_tail_mass = tl.load(row_stats + 2 * rows + t) / sum_exp
            if candidate_logq is not None:
                sampler_tail_mass = tl.load(sampler_tail + t)
                has_tail = (is_complete == 0) & (empty_head == 0)
                sampler_head_mass = tl.where(has_tail, 1.0 - sampler_tail_mass, sampler_head_mass)
                sampler_tail_mass = tl.maximum(sampler_tail_mass, tail_floor)
                rho = tl.where(has_tail, sampler_tail_mass / tl.maximum(trainer_tail_mass, tail_floor), rho)
                if EXACT_TAIL and row_stats is None:  # noqa: SIM102 - one is known to the compiler, one is data
                    if has_tail & (rho > LARGEST_TAIL_SCALE_BY_SUBTRACTION):
                        exact_total = exact_sum(
                            row, width, column_stride, log2e_over_temp, shift, CONTIGUOUS, LANES, VECTOR
                        )
                        exact_head_sum = exact_head(candidate_logits, first, last, K_BLOCK)
                        trainer_tail_mass = (exact_total - exact_head_sum).to(tl.float32) / sum_exp
                        rho = sampler_tail_mass / tl.maximum(trainer_tail_mass, tail_floor)

        # ---- weight, coefficients, loss
        log_ratio = token_logp - tl.load(logq + t).to(tl.float32)
        weight = token_weight(log_ratio, advantage, log_low, log_high, RULE)
        alpha, weighted_mass, centering_term, centering_loss = 0.0, 0.0, 0.0, 0.0
        if CENTER and ids is not None:
            alpha = tail_scale(rho, advantage, low, high, tail_low, tail_high, RULE)
            alpha = tl.where(is_complete, 0.0, alpha)
            weighted_head_mass, centering_term, centering_loss = _centering(
                candidate_logits, candidate_logq, first, last, set_max, log_mass, advantage, alpha,
                low, high, log_low, log_high, RULE, K_BLOCK,
            )  # fmt: skip
            weighted_mass = weighted_head_mass + _safe_mul(alpha, trainer_tail_mass)
        score_coef = _safe_mul(advantage, weight)
        loss = centering_loss - _safe_mul(score_coef, token_logp)
        if KL > 0:
            value, slope = _kl(token_logp - tl.load(ref_logprobs + t).to(tl.float32), KL)
            loss += kl_coef * value
            score_coef -= kl_coef * slope
        if ENTROPY:
            loss -= entropy_coef * entropy
        has_loss = finite
        if CENTER:
            has_loss = finite & (
                first < last
            )  # a centered row without a candidate has no loss to fall back to
        loss = tl.where(has_loss, loss, float("nan"))
        _report(
            results + t, rows, loss, finite, token_logp, log_ratio, weight, entropy, centering_term,
            sampler_head_mass, trainer_head_mass, rho,
        )  # fmt: skip

        if gradient is not None:
            # a row of a dropped sequence gets zero gradient, whatever it holds
            row_scale = tl.load(scale + t).to(tl.float32)
            _write_gradient(
                row, out, candidate_logits, ids, candidate_logq, first, last, is_complete, token, token_logp,
                log2e_over_temp, shift, sum_exp, log_sum_exp, set_max, log_mass, entropy,
                advantage, score_coef, weighted_mass, alpha, row_scale, entropy_coef, low, high, log_low, log_high,
                column_stride, out_column_stride, width, first_id, RULE, CENTER, ENTROPY, CONTIGUOUS, BLOCK, K_BLOCK,
            )  # fmt: skip
    else:
        for field in tl.static_range(10):
            tl.store(results + field * rows + t, 0.0)
        if gradient is not None:
            clear_row(out, width, out_column_stride, CONTIGUOUS, BLOCK)


@triton.jit
def _write_gradient(
    row, out, candidate_logits, ids, candidate_logq, first, last, is_complete, token, token_logp,
    log2e_over_temp, shift, sum_exp, log_sum_exp, set_max, log_mass, entropy,
    advantage, score_coef, weighted_mass, alpha, row_scale, entropy_coef, low, high, log_low, log_high,
    column_stride, out_column_stride, width, first_id,
    RULE: tl.constexpr, CENTER: tl.constexpr, ENTROPY: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass 2 and the scatter: the gradient of the row's loss times ``row_scale``, with respect to its raw logits."""
    scaled_advantage = _safe_mul(row_scale, advantage)
    score_coef = _safe_mul(row_scale, score_coef)
    head_coef = score_coef - _safe_mul(scaled_advantage, weighted_mass)
    scaled_entropy_coef = row_scale * entropy_coef if ENTROPY else 0.0
    inv_temperature = log2e_over_temp * LN2  # 1 / temperature: the gradient is with respect to raw logits
    prob_coef = tl.where(is_complete, 0.0, head_coef + _safe_mul(scaled_advantage, alpha))
    prob_entropy_coef = tl.where(is_complete, 0.0, scaled_entropy_coef)
    token_grad = _safe_mul(prob_coef, tl.exp(token_logp)) - score_coef
    if ENTROPY:
        token_grad += prob_entropy_coef * _entropy_slope(token_logp, entropy)
    token_is_candidate = False
    if ids is not None:
        token_is_candidate = _head_gradient(
            candidate_logits, ids, candidate_logq, first, last, token, set_max, log_mass, advantage, scaled_advantage,
            head_coef, score_coef, scaled_entropy_coef, entropy, inv_temperature, row_scale,
            low, high, log_low, log_high, RULE, CENTER, ENTROPY, K_BLOCK,
        )  # fmt: skip
    # p (prob_coef + entropy_coef (log p + H)) as 2^d (intercept + slope d)
    slope = inv_temperature * prob_entropy_coef * LN2 / sum_exp
    intercept = inv_temperature * prob_coef / sum_exp - slope * (log_sum_exp - entropy / LN2)
    intercept = tl.where(row_scale == 0.0, 0.0, intercept)
    slope = tl.where(row_scale == 0.0, 0.0, slope)
    token_grad = tl.where(row_scale == 0.0, 0.0, token_grad)
    tl.debug_barrier()  # every gathered logit has been read before the first is overwritten
    write_row(
        row, out, width, column_stride, out_column_stride, log2e_over_temp, shift, intercept, slope,
        ENTROPY, CONTIGUOUS, BLOCK,
    )  # fmt: skip
    tl.debug_barrier()  # the row's gradient is stored before those of candidates replace some of it
    if token_is_candidate == 0:
        scatter_one(out, token, token_grad * inv_temperature, first_id, width, out_column_stride)
    if ids is not None:
        scatter(out, ids, candidate_logits, first, last, first_id, width, out_column_stride, K_BLOCK)


@triton.jit
def _logp(d, set_max, log_mass):
    """log p in nats. Two subtractions: the set may lie so far below the maximum that one sum of both loses digits."""
    return LN2 * ((d - set_max) - log_mass)


@triton.jit
def _safe_mul(coefficient, value):
    """coefficient · value, exactly 0 where coefficient is 0, even if value is infinite or NaN."""
    return tl.where(coefficient == 0.0, 0.0, coefficient * value)


@triton.jit
def _entropy_slope(logp, entropy):
    """p (log p + H) = −∂H/∂z; 0 for an impossible candidate."""
    p = tl.exp(logp)
    return _safe_mul(p, logp) + p * entropy


@triton.jit
def _kl(logprob_diff, KL: tl.constexpr):
    """(estimate, derivative) of k1, k2, k3 or low_var_kl in d = log p − log p_ref."""
    if KL == 1:
        value = logprob_diff
        slope = logprob_diff * 0.0 + 1.0
    elif KL == 2:
        value = 0.5 * logprob_diff * logprob_diff
        slope = logprob_diff
    else:
        slope = -_expm1(-logprob_diff)
        value = logprob_diff - slope
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
def _head_sums(candidate_logits, first, last, is_complete, PRESENT: tl.constexpr, K_BLOCK: tl.constexpr):
    """(set_max, Σ 2^(d−set_max), mean of d−set_max) over the candidates; set_max: their largest d on a complete
    row, else 0.

    A support is summed relative to its own largest logit: the vocabulary may give it a mass that underflows.
    """
    set_max = 0.0
    mass = 0.0
    sum_d_exp = 0.0
    if PRESENT:
        if is_complete:
            largest = float("-inf")
            for start in range(first, last, K_BLOCK):
                slots = start + tl.arange(0, K_BLOCK)
                d = tl.load(candidate_logits + slots, mask=slots < last, other=float("-inf"))
                largest = tl.maximum(largest, tl.max(d, 0))
            set_max = tl.where(largest == float("-inf"), 0.0, largest)
        for start in range(first, last, K_BLOCK):
            slots = start + tl.arange(0, K_BLOCK)
            d = tl.load(candidate_logits + slots, mask=slots < last, other=float("-inf")) - set_max
            exps = tl.exp2(d)
            mass += tl.sum(exps, 0)
            sum_d_exp += tl.sum(exps * tl.maximum(d, LOWEST_D), 0)
    return set_max, mass, sum_d_exp / mass


@triton.jit
def _centering(
    candidate_logits, candidate_logq, first, last, set_max, log_mass, advantage, alpha, low, high, log_low, log_high,
    RULE: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """(Σ_H m, Σ_H c log p, Σ_H A c log p) with c = m − α p."""
    weighted_head_mass = 0.0
    centering_term = 0.0
    centering_loss = 0.0
    for start in range(first, last, K_BLOCK):
        slots = start + tl.arange(0, K_BLOCK)
        used = slots < last
        d = tl.load(candidate_logits + slots, mask=used, other=float("-inf"))
        logq = tl.load(candidate_logq + slots, mask=used, other=float("-inf")).to(tl.float32)
        logp = _logp(d, set_max, log_mass)
        weighted = tl.where(
            used, weighted_prob(logp, logq, advantage, low, high, log_low, log_high, RULE), 0.0
        )
        coefficient = weighted - alpha * tl.exp(logp)
        coefficient = tl.where(used, coefficient, 0.0)
        weighted_head_mass += tl.sum(weighted, 0)
        centering_term += tl.sum(_safe_mul(coefficient, logp), 0)
        centering_loss += tl.sum(_safe_mul(advantage * coefficient, logp), 0)
    return weighted_head_mass, centering_term, centering_loss


@triton.jit
def _head_gradient(
    candidate_logits, ids, candidate_logq, first, last, token, set_max, log_mass, advantage, scaled_advantage,
    head_coef, score_coef, scaled_entropy_coef, entropy, inv_temperature, row_scale, low, high, log_low, log_high,
    RULE: tl.constexpr, CENTER: tl.constexpr, ENTROPY: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace the candidates' d by their gradients; returns whether the sampled token is among them.

    The sampled token is folded in here where it is a candidate, so that every element is rounded and stored once.
    """
    token_is_candidate = tl.zeros((), tl.int32)
    for start in range(first, last, K_BLOCK):
        slots = start + tl.arange(0, K_BLOCK)
        used = slots < last
        d = tl.load(candidate_logits + slots, mask=used, other=float("-inf"))
        logp = _logp(d, set_max, log_mass)
        values = _safe_mul(head_coef, tl.exp(logp))
        if CENTER:
            logq = tl.load(candidate_logq + slots, mask=used, other=float("-inf")).to(tl.float32)
            weighted = weighted_prob(logp, logq, advantage, low, high, log_low, log_high, RULE)
            values += _safe_mul(scaled_advantage, weighted)
        is_token = used & (tl.load(ids + slots, mask=used, other=-1).to(tl.int64) == token)
        values -= tl.where(is_token, score_coef, 0.0)
        if ENTROPY:
            values += scaled_entropy_coef * _entropy_slope(logp, entropy)
        tl.store(
            candidate_logits + slots, tl.where(row_scale == 0.0, 0.0, values * inv_temperature), mask=used
        )
        token_is_candidate = tl.maximum(token_is_candidate, tl.max(is_token.to(tl.int32), 0))
    return token_is_candidate


@triton.jit
def _report(
    results, rows, loss, finite, logp, log_ratio, weight, entropy, centering_term,
    sampler_head_mass, trainer_head_mass, rho,
):  # fmt: skip
    """One column of ``[len(FIELDS), rows]``."""
    tl.store(results, loss)
    tl.store(results + rows, tl.where(finite, 1.0, 0.0))
    tl.store(results + 2 * rows, logp)
    tl.store(results + 3 * rows, log_ratio)
    tl.store(results + 4 * rows, weight)
    tl.store(results + 5 * rows, entropy)
    tl.store(results + 6 * rows, centering_term)
    tl.store(results + 7 * rows, sampler_head_mass)
    tl.store(results + 8 * rows, trainer_head_mass)
    tl.store(results + 9 * rows, rho)
