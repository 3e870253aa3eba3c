"""The loss from log-probs that a framework computed: constants from §centering, the rest by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .candidates import CandidateSet
from .centering import coefficients, live, policy_term
from .plan import Plan
from .regularizers import kl_value
from .replay import TrainerLogprobs
from .result import pack
from .segments import segment_sum
from .softmax import compute_dtype
from .validation import COMPLETE_MASS_OFF_ONE, Check, raise_first


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
    if plan.validate and terms.candidates is not None:
        _check_complete(trainer, terms.candidates, rows, plan.sequence_ids)
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
    token_loss = torch.where(trainer.finite, token_loss, torch.nan)
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
            raise ValueError("a centred loss needs candidate_logprobs, log p of the record's candidate ids")
        return like.new_full((nnz,), torch.nan)
    if candidate_logprobs.shape != (nnz,):
        raise ValueError(
            f"candidate_logprobs must be [nnz] = ({nnz},), got {tuple(candidate_logprobs.shape)}"
        )
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


def _check_complete(
    trainer: TrainerLogprobs, candidates: CandidateSet, rows: Tensor, sequence_ids: Tensor | None
) -> None:
    """Raise where a complete row's log-probs are not over its set, which their mass betrays."""
    mass = segment_sum(trainer.candidates.double().exp(), candidates.offsets)
    bad = candidates.complete & ((mass - 1.0).abs() > COMPLETE_MASS_OFF_ONE)
    problem = "the trainer's probabilities of a complete set do not sum to 1"
    remedy = "Renormalise p over the set, as selected_logprobs does, or mark the row as a head."
    if bool(bad.any()):
        sample = None if sequence_ids is None else sequence_ids[rows]
        check = Check(bad, "candidate_logprobs", mass, problem, remedy)
        raise_first(check, sample, rows)
