"""Mathematics: the loss of one token, its centering coefficients, and its gradient in closed form.

With head H, trainer p, sampler q, advantage A, weight rule f, and sg[·] for "constant":

    L = −A [ w_y log p_y − Σ_{v∈H} c_v log p_v ],   w_y = sg f(p_y/q_y),   c_v = sg[ q_v f(p_v/q_v) − α p_v ]

where α = ρ f(1/ρ) and ρ = max(1−Q_H, ε) / max(1−P_H, ε) rescales the trainer's tail to the sampler's. On a
complete set there is no tail (α = 0), and p is over the set. With m_v = q_v f(p_v/q_v) on H, m_v = α p_v off H
and M = Σ_v m_v,

    ∂L/∂z_v = A · [ m_v + (w_y − M) p_v − w_y 1[v = y] ].

Gradients are always formed that way: autograd through Σ c log p cancels numbers of size α against each other.
Source: score centering, https://arxiv.org/abs/2609.20807; the closed form follows by summing its terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .correction import Correction
from .csr import row_mass, segment_sum
from .kl import kl_derivative, kl_estimate
from .loss_inputs import LossConfig, LossInputs
from .numerics import entropy_slope, safe_mul
from .result import FIELDS
from .rows import RowGradient, TrainerLogprobs


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Constants of the loss, per token ``[T]`` unless said otherwise."""

    log_ratio: Tensor
    weight: Tensor  # w_y
    weighted_probs: Tensor  # m_v on the candidates, [nnz]
    centering: Tensor  # c_v, [nnz]
    tail_scale: Tensor  # α
    weighted_mass: Tensor  # M
    sampler_head_mass: Tensor  # Q_H
    trainer_head_mass: Tensor  # P_H
    tail_ratio: Tensor  # ρ


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """Per token ``[R]``: the loss (not scaled), Σ_H c_v log p_v, the coefficients, the gradient of ``scale · loss``."""

    loss: Tensor
    centering_term: Tensor
    coefficients: Coefficients
    gradient: RowGradient


def missing_candidates(correction: Correction, inputs: LossInputs) -> Tensor:
    """Tokens of a centered loss without a candidate, bool ``[T]``.

    Validation refuses them. With ``validate=False`` their loss is NaN: there is no fallback to an uncentered term.
    """
    if not correction.center or inputs.candidates is None:
        return torch.zeros_like(inputs.tokens, dtype=torch.bool)
    return inputs.candidates.offsets.diff() == 0


def coefficients(correction: Correction, inputs: LossInputs, trainer: TrainerLogprobs) -> Coefficients:
    """All constants of the loss, from the trainer's log-probs and the record. Nothing here is differentiable."""
    rule = correction.rule
    dtype = trainer.token_logprob.dtype
    unknown = torch.full_like(trainer.token_logprob, torch.nan)
    advantages = inputs.advantages.to(dtype)
    log_ratio = trainer.token_logprob - inputs.logq.to(dtype)
    weight = rule.weight(log_ratio, advantages)
    zero, no_candidates = torch.zeros_like(unknown), torch.zeros_like(trainer.candidate_logprobs)
    candidates = inputs.candidates
    if candidates is None:
        return Coefficients(
            log_ratio, weight, no_candidates, no_candidates, zero, zero, unknown, unknown, unknown
        )
    complete, offsets, rows = candidates.complete, candidates.offsets, candidates.rows
    empty_head = ~complete & (offsets.diff() == 0)
    one = torch.ones_like(unknown)
    sampler_mass = tail_ratio = torch.where(complete, one, unknown)
    logq = None
    if candidates.logprobs is not None:
        logq = candidates.logprobs.to(dtype)
        mass = row_mass(candidates.logprobs, offsets)
        sampler_tail = (1.0 - mass).clamp(min=correction.tail_floor)
        trainer_tail = trainer.tail_mass.double().clamp(min=correction.tail_floor)
        ratio = (sampler_tail / trainer_tail).to(dtype)
        sampler_mass = torch.where(complete, one, mass.to(dtype)).masked_fill(empty_head, torch.nan)
        tail_ratio = torch.where(complete, one, ratio).masked_fill(empty_head, torch.nan)
    trainer_mass = trainer.head_mass.masked_fill(empty_head, torch.nan)
    if not correction.center:
        return Coefficients(
            log_ratio,
            weight,
            no_candidates,
            no_candidates,
            zero,
            zero,
            sampler_mass,
            trainer_mass,
            tail_ratio,
        )
    assert logq is not None, "a centered loss was given ids alone"
    logp = trainer.candidate_logprobs
    weighted_probs = rule.weighted_prob(logp, logq, advantages[rows])
    tail_scale = rule.tail_scale(tail_ratio, advantages).masked_fill(complete, 0.0)
    weighted_mass = segment_sum(weighted_probs, offsets) + safe_mul(tail_scale, trainer.tail_mass)
    centering = weighted_probs - tail_scale[rows] * logp.exp()
    return Coefficients(
        log_ratio,
        weight,
        weighted_probs,
        centering,
        tail_scale,
        weighted_mass,
        sampler_mass,
        trainer_mass,
        tail_ratio,
    )


def token_losses(
    config: LossConfig, inputs: LossInputs, coef: Coefficients, trainer: TrainerLogprobs
) -> tuple[Tensor, Tensor]:
    """(loss, Σ_H c_v log p_v), both ``[T]``: policy term, KL and entropy, differentiable in the trainer's log-probs.

    A row that has no usable logit, or a centered one without candidates, has a NaN loss even where its weight is 0.
    """
    logp = trainer.token_logprob
    advantages = inputs.advantages.to(logp.dtype)
    loss = -safe_mul(safe_mul(advantages, coef.weight), logp)
    centering_term = torch.zeros_like(loss)
    candidates = inputs.candidates
    if candidates is not None:
        rows, offsets = candidates.rows, candidates.offsets
        centering_term = segment_sum(safe_mul(coef.centering, trainer.candidate_logprobs), offsets)
        scaled = safe_mul(advantages[rows] * coef.centering, trainer.candidate_logprobs)
        loss = loss + segment_sum(scaled, offsets)
    if config.kl_coef:
        loss = loss + config.kl_coef * kl_estimate(config.kl_estimator, _logprob_diff(inputs, logp))
    if config.entropy_coef:
        loss = loss - config.entropy_coef * trainer.entropy
    usable = trainer.finite & ~missing_candidates(config.correction, inputs)
    return torch.where(usable, loss, torch.nan), centering_term


def closed_form(
    config: LossConfig, inputs: LossInputs, trainer: TrainerLogprobs, log_sum_exp: Tensor
) -> TokenLoss:
    """Loss and logit gradient of every token, KL and entropy included.

    ``log_sum_exp`` ``[R]`` is relative to the row's largest logit.
    """
    coef = coefficients(config.correction, inputs, trainer)
    loss, centering_term = token_losses(config, inputs, coef, trainer)
    advantages = inputs.advantages.to(loss.dtype)
    score_coef = safe_mul(advantages, coef.weight)  # −∂L/∂ log p_y
    if config.kl_coef:
        logprob_diff = _logprob_diff(inputs, trainer.token_logprob)
        score_coef = score_coef - config.kl_coef * kl_derivative(config.kl_estimator, logprob_diff)
    scale = inputs.scale.to(loss.dtype)
    advantages, score_coef = safe_mul(scale, advantages), safe_mul(scale, score_coef)
    # what multiplies p_v: on the head score_coef − A·M, and off it A·α more, where m_v = α p_v
    head_coef = score_coef - safe_mul(advantages, coef.weighted_mass)
    tail_coef = head_coef + safe_mul(advantages, coef.tail_scale)
    candidate_grads = None
    if inputs.candidates is not None:
        # a rule's m_v is not a multiple of p_v: it stays an addend of its own
        rows = inputs.candidates.rows
        candidate_grads = safe_mul(head_coef[rows], trainer.candidate_logprobs.exp())
        candidate_grads = candidate_grads + safe_mul(advantages[rows], coef.weighted_probs)
    entropy_coef = scale * config.entropy_coef if config.entropy_coef else None
    gradient = row_gradient(
        inputs, trainer, tail_coef, candidate_grads, score_coef, entropy_coef, log_sum_exp
    )
    return TokenLoss(loss, centering_term, coef, gradient)


def row_gradient(
    inputs: LossInputs,
    trainer: TrainerLogprobs,
    prob_coef: Tensor,
    candidate_grads: Tensor | None,
    score_coef: Tensor,
    entropy_coef: Tensor | None,
    log_sum_exp: Tensor,
) -> RowGradient:
    """Complete a gradient ``prob_coef · p_v`` (``candidate_grads`` on the candidates) at the sampled token.

    There ``−score_coef`` is added, and everywhere the entropy's part ``entropy_coef · p_v (log p_v + H)``. On complete
    rows nothing but the candidates has a gradient. All factors include the loss's scale.
    """
    candidates = inputs.candidates
    grads = trainer.candidate_logprobs
    if candidates is not None:
        assert candidate_grads is not None
        rows = candidates.rows
        grads = candidate_grads - torch.where(candidates.ids == inputs.tokens[rows], score_coef[rows], 0.0)
        if entropy_coef is not None:
            slope = entropy_slope(trainer.candidate_logprobs, trainer.entropy[rows])
            grads = grads + entropy_coef[rows] * slope
            entropy_coef = entropy_coef.masked_fill(candidates.complete, 0.0)
        prob_coef = prob_coef.masked_fill(candidates.complete, 0.0)
    token_grad = safe_mul(prob_coef, trainer.token_logprob.exp()) - score_coef
    if entropy_coef is None:
        return RowGradient(prob_coef, grads, token_grad, log_sum_exp)
    token_grad = token_grad + entropy_coef * entropy_slope(trainer.token_logprob, trainer.entropy)
    return RowGradient(prob_coef, grads, token_grad, log_sum_exp, entropy_coef, trainer.entropy)


def _logprob_diff(inputs: LossInputs, logp: Tensor) -> Tensor:
    """log p − log p_ref of the sampled token."""
    assert inputs.ref_logprobs is not None
    return logp - inputs.ref_logprobs.to(logp.dtype)


def pack_results(
    loss: Tensor, centering_term: Tensor, coef: Coefficients, trainer: TrainerLogprobs
) -> Tensor:
    """``[len(FIELDS), T]`` in the order of `result.FIELDS`, detached: unscaled token losses and their diagnostics."""
    named = {
        "loss": loss,
        "finite": trainer.finite,
        "logprobs": trainer.token_logprob,
        "log_ratio": coef.log_ratio,
        "weight": coef.weight,
        "entropy": trainer.entropy,
        "centering_term": centering_term,
        "sampler_head_mass": coef.sampler_head_mass,
        "trainer_head_mass": coef.trainer_head_mass,
        "tail_ratio": coef.tail_ratio,
    }
    return torch.stack([named[name].detach().to(loss.dtype) for name in FIELDS])
