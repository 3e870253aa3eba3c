"""The loss from log-probs that a framework computed: constants from §centering, the rest by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .centering import coefficients, live, policy_term, uncentered
from .csr import segment_sum
from .kl import kl_value
from .loss_inputs import Terms
from .prepare import Plan
from .records.candidates import CandidateSet
from .records.validation import (
    COMPLETE_MASS_OFF_ONE,
    HEAD_MASS_ABOVE_ONE,
    LOGPROB_ABOVE_ZERO,
    Check,
    raise_first,
)
from .replay import TrainerLogprobs
from .result import pack
from .row_passes import compute_dtype

# a framework may compute the two in different kernels; a mass that was left out is far larger
_SAME_LOGP = 1e-3


def loss_from_logprobs(
    logprobs: Tensor, candidate_logprobs: Tensor | None, entropy: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    """(loss, results) as `autograd.LossFromLogits` gives them; masked tokens are taken out first."""
    job, terms = plan.job, plan.job.terms
    size = logprobs.shape[0]
    candidate_logprobs = _align(
        candidate_logprobs, terms.candidates, logprobs, job.settings.correction.center
    )
    if entropy is not None and entropy.shape != logprobs.shape:
        raise ValueError(f"entropy must be [T] = ({size},), got {tuple(entropy.shape)}")
    rows = torch.arange(size, device=logprobs.device)
    if job.trained is not None:
        rows = job.trained.nonzero().squeeze(1)
        owned = rows.new_zeros(0)
        if terms.candidates is not None:
            owned = job.trained[terms.candidates.rows].nonzero().squeeze(1)
        terms = terms.select(rows)
        logprobs, candidate_logprobs = logprobs[rows], candidate_logprobs[owned]
        entropy = None if entropy is None else entropy[rows]
    dtype = compute_dtype(logprobs.dtype)
    logp, candidate_logp = logprobs.to(dtype), candidate_logprobs.to(dtype)
    with torch.no_grad():
        trainer = _trainer(logp, candidate_logp, entropy, terms.candidates)
        coef = coefficients(job.settings.correction, terms, trainer)
    if plan.validate:
        _check_trainer(trainer, terms, rows, plan.sequence_ids)
    token_loss, correction = policy_term(coef, terms, logp, candidate_logp)
    settings = job.settings
    if settings.kl_coef:
        assert terms.ref_logprobs is not None
        gap = logp - terms.ref_logprobs.to(dtype)
        token_loss = token_loss + settings.kl_coef * kl_value(settings.kl_estimator, gap)
    if settings.entropy_coef:
        assert entropy is not None
        token_loss = token_loss - settings.entropy_coef * entropy.to(dtype)
    # a token whose log-prob is not a number stays visible even where its weight is 0
    token_loss = torch.where(trainer.finite & ~uncentered(settings.correction, terms), token_loss, torch.nan)
    scaled = live(terms.scale.to(dtype), token_loss)
    results = pack(token_loss, correction, coef, trainer)
    results = results.new_zeros(results.shape[0], size).index_copy_(1, rows, results)
    if plan.reduce:
        # both inputs stay in the graph even when no token is trained: a rank must not skip its backward
        return scaled.sum() + 0.0 * (logprobs[:0].sum() + candidate_logprobs[:0].sum()), results
    return torch.zeros(size, dtype=dtype, device=scaled.device).index_copy(0, rows, scaled), results


def _align(
    candidate_logprobs: Tensor | None, candidates: CandidateSet | None, like: Tensor, center: bool
) -> Tensor:
    """``candidate_logprobs`` as ``[nnz]``; NaN where they were not given and nothing needs them."""
    nnz = 0 if candidates is None else candidates.ids.numel()
    if candidate_logprobs is None:
        if nnz and center:
            raise ValueError("a centered loss needs candidate_logprobs, log p of the record's candidate ids")
        return like.new_full((nnz,), torch.nan)
    if candidate_logprobs.shape != (nnz,) or not candidate_logprobs.dtype.is_floating_point:
        got = f"{candidate_logprobs.dtype} {tuple(candidate_logprobs.shape)}"
        raise ValueError(f"candidate_logprobs must be floating [nnz] = ({nnz},), got {got}")
    return candidate_logprobs


def _trainer(
    logp: Tensor, candidate_logp: Tensor, entropy: Tensor | None, candidates: CandidateSet | None
) -> TrainerLogprobs:
    nan = torch.full_like(logp, torch.nan)
    entropy = nan if entropy is None else entropy.detach().to(logp.dtype)
    finite = ~(logp.isnan() | (logp == torch.inf))
    if candidates is None:
        return TrainerLogprobs(logp, candidate_logp, entropy, nan, nan, finite)
    mass = segment_sum(candidate_logp.double().exp(), candidates.offsets)
    tail = (1.0 - mass).clamp(min=0.0).to(logp.dtype)
    head = torch.where(candidates.complete, nan, mass.to(logp.dtype))
    return TrainerLogprobs(logp, candidate_logp, entropy, tail, head, finite)


def _check_trainer(trainer: TrainerLogprobs, terms: Terms, rows: Tensor, sequence_ids: Tensor | None) -> None:
    """Refuse what cannot be the trainer's log-probs: above 0, masses that are off, values that disagree.

    On complete rows the last two betray log-probs that are not over the set. One host sync.
    """
    remedy = "Pass log-probs after temperature, as selected_logprobs gives them."
    above = trainer.token > LOGPROB_ABOVE_ZERO
    checks = [Check(above, "logprobs", trainer.token, "the trainer's log-prob is above 0", remedy)]
    if terms.candidates is not None:
        checks += _candidate_checks(trainer, terms, terms.candidates)
    sample = None if sequence_ids is None else sequence_ids[rows]
    for check, hit in zip(checks, torch.stack([c.bad.any() for c in checks]).tolist(), strict=True):
        if hit:
            raise_first(check, sample, rows)


def _candidate_checks(trainer: TrainerLogprobs, terms: Terms, candidates: CandidateSet) -> list[Check]:
    logp, owner = trainer.candidates, candidates.rows
    mass = segment_sum(logp.double().exp(), candidates.offsets)
    remedy = "Renormalize p over the set, as selected_logprobs does, or mark the row as a head."
    off_one = candidates.complete & ((mass - 1.0).abs() > COMPLETE_MASS_OFF_ONE)
    problem = "the trainer's probabilities of a complete set do not sum to 1"
    checks = [Check(off_one, "candidate_logprobs", mass, problem, remedy)]
    above = mass > 1.0 + HEAD_MASS_ABOVE_ONE
    problem = "the trainer's probabilities of a head sum to more than 1"
    checks.append(Check(above, "candidate_logprobs", mass, problem, "Normalize over the vocabulary."))
    own = trainer.token[owner]
    differs = (candidates.ids == terms.tokens[owner]) & ((logp - own).abs() > _SAME_LOGP * (1.0 + own.abs()))
    problem = "the sampled token's log-prob differs from its entry in candidate_logprobs"
    remedy = "Both must be over the set on a complete row, over the vocabulary on a head."
    return [*checks, Check(differs, "candidate_logprobs", logp, problem, remedy, owner)]
