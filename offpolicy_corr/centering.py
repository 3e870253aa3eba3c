"""The mathematics of one token: weight, centering coefficients, and the gradient in closed form.

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
from .csr import segment_sum
from .kl import kl_slope, kl_value
from .loss_inputs import Settings, Terms
from .replay import TrainerLogprobs
from .row_passes import RowGradient


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Constants of the loss: per token ``[T]`` unless said otherwise."""

    log_ratio: Tensor
    weight: Tensor  # w_y
    weighted: Tensor  # m_v on the candidates, [nnz]
    centering: Tensor  # c_v, [nnz]
    alpha: Tensor
    total: Tensor  # M
    sampler_head_mass: Tensor
    trainer_head_mass: Tensor
    tail_ratio: Tensor


def product(coefficient: Tensor, logp: Tensor) -> Tensor:
    """coefficient · log p, where a zero coefficient beats a log p of −inf."""
    return torch.where(coefficient == 0, torch.zeros_like(logp), coefficient * logp)


def uncentered(correction: Correction, terms: Terms) -> Tensor:
    """Tokens of a centered loss without a candidate, bool ``[T]``: validation refuses them, and without it their
    loss is not a number. Nothing falls back to an uncentered term."""
    if not correction.center or terms.candidates is None:
        return torch.zeros_like(terms.tokens, dtype=torch.bool)
    return terms.candidates.offsets.diff() == 0


def live(scale: Tensor, values: Tensor) -> Tensor:
    """scale · values, where a scale of 0 silences whatever stands there."""
    return torch.where(scale == 0, torch.zeros_like(values), scale * values)


def coefficients(correction: Correction, terms: Terms, trainer: TrainerLogprobs) -> Coefficients:
    """All constants of the loss, from the trainer's log-probs and the record. Nothing here is differentiable."""
    rule, floor = correction.rule, correction.tail_floor
    dtype, nan = trainer.token.dtype, torch.full_like(trainer.token, torch.nan)
    advantages = terms.advantages.to(dtype)
    log_ratio = trainer.token - terms.logq.to(dtype)
    weight = rule.weight(log_ratio, advantages)
    zero, none = torch.zeros_like(nan), torch.zeros_like(trainer.candidates)
    candidates = terms.candidates
    if candidates is None:
        return Coefficients(log_ratio, weight, none, none, zero, zero, nan, nan, nan)
    complete, offsets, rows = candidates.complete, candidates.offsets, candidates.rows
    absent = ~complete & (offsets.diff() == 0)
    ones = torch.ones_like(nan)
    q_mass, rho, logq = torch.where(complete, ones, nan), torch.where(complete, ones, nan), None
    if candidates.logprobs is not None:
        logq = candidates.logprobs.to(dtype)
        mass = segment_sum(candidates.logprobs.double().exp(), offsets)
        q_tail = (1.0 - mass).clamp(min=floor)
        ratio = (q_tail / trainer.tail_mass.double().clamp(min=floor)).to(dtype)
        q_mass = torch.where(complete, ones, mass.to(dtype)).masked_fill(absent, torch.nan)
        rho = torch.where(complete, ones, ratio).masked_fill(absent, torch.nan)
    p_mass = trainer.head_mass.masked_fill(absent, torch.nan)
    if not correction.center:
        return Coefficients(log_ratio, weight, none, none, zero, zero, q_mass, p_mass, rho)
    assert logq is not None, "a centered loss was given ids alone"
    logp = trainer.candidates
    weighted = rule.weighted_prob(logp, logq, advantages[rows])
    alpha = rule.tail_scale(rho, advantages).masked_fill(complete, 0.0)
    total = segment_sum(weighted, offsets) + product(alpha, trainer.tail_mass)
    centering = weighted - alpha[rows] * logp.exp()
    return Coefficients(log_ratio, weight, weighted, centering, alpha, total, q_mass, p_mass, rho)


def policy_term(
    coef: Coefficients, terms: Terms, token_logp: Tensor, candidate_logp: Tensor
) -> tuple[Tensor, Tensor]:
    """(L, Σ_H c_v log p_v), both ``[T]``, differentiable in the two log-probs."""
    advantages = terms.advantages.to(token_logp.dtype)
    loss = -product(product(advantages, coef.weight), token_logp)
    candidates = terms.candidates
    if candidates is None:
        return loss, torch.zeros_like(loss)
    rows = candidates.rows
    correction = segment_sum(product(coef.centering, candidate_logp), candidates.offsets)
    centered = segment_sum(product(advantages[rows] * coef.centering, candidate_logp), candidates.offsets)
    return loss + centered, correction


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """One token's loss ``[R]``, unscaled, its coefficients, and the gradient of ``scale · loss``."""

    loss: Tensor
    correction: Tensor
    coefficients: Coefficients
    gradient: RowGradient


def closed_form(settings: Settings, terms: Terms, trainer: TrainerLogprobs, log_total: Tensor) -> TokenLoss:
    """Loss and logit gradient of every token, regularizers included.

    ``log_total`` ``[R]`` is the log-sum-exp of the row relative to its peak.
    """
    coef = coefficients(settings.correction, terms, trainer)
    loss, correction = policy_term(coef, terms, trainer.token, trainer.candidates)
    advantages = terms.advantages.to(loss.dtype)
    pull = product(advantages, coef.weight)  # −∂L/∂ log p_y
    if settings.kl_coef:
        assert terms.ref_logprobs is not None
        gap = trainer.token - terms.ref_logprobs.to(loss.dtype)
        loss = loss + settings.kl_coef * kl_value(settings.kl_estimator, gap)
        pull = pull - settings.kl_coef * kl_slope(settings.kl_estimator, gap)
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * trainer.entropy
    loss = torch.where(trainer.finite & ~uncentered(settings.correction, terms), loss, torch.nan)
    gradient = _gradient(settings, terms, trainer, coef, pull, log_total)
    return TokenLoss(loss, correction, coef, gradient)


def _gradient(
    settings: Settings,
    terms: Terms,
    trainer: TrainerLogprobs,
    coef: Coefficients,
    pull: Tensor,
    log_total: Tensor,
) -> RowGradient:
    """The closed form, times ``scale``: α − M and the pull on the sampled token are all that a row needs."""
    scale = terms.scale.to(pull.dtype)
    advantages, pull = live(scale, terms.advantages.to(pull.dtype)), live(scale, pull)
    # what multiplies p_v: on the head W − A·M, and off it A·α more, where m_v = α p_v
    on_head = pull - product(advantages, coef.total)
    dense = on_head + product(advantages, coef.alpha)
    bonus = scale * settings.entropy_coef
    candidates = terms.candidates
    values = trainer.candidates
    if candidates is not None:
        rows = candidates.rows
        values = product(on_head[rows], trainer.candidates.exp()) + product(advantages[rows], coef.weighted)
        values = values - torch.where(candidates.ids == terms.tokens[rows], pull[rows], 0.0)
        if settings.entropy_coef:
            values = values + bonus[rows] * entropy_slope(trainer.candidates, trainer.entropy[rows])
        dense, bonus = (v.masked_fill(candidates.complete, 0.0) for v in (dense, bonus))
    token = product(dense, trainer.token.exp()) - pull
    if not settings.entropy_coef:
        return RowGradient(dense, values, token, log_total)
    token = token + bonus * entropy_slope(trainer.token, trainer.entropy)
    return RowGradient(dense, values, token, log_total, bonus, -trainer.entropy)


def entropy_slope(logp: Tensor, entropy: Tensor) -> Tensor:
    """p_v (log p_v + H) = −∂H/∂z_v; 0 for an impossible candidate."""
    p = logp.exp()
    return product(p, logp) + p * entropy
