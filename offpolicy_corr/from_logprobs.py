"""Autograd: the loss from log-probs that a framework computed; constants from `centering`, gradients by autograd."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .centering import coefficients, pack_results, token_losses
from .csr import row_mass
from .loss_inputs import LossInputs
from .numerics import compute_dtype, safe_mul
from .prepare import PreparedLoss
from .records.candidates import CandidateSet
from .records.validation import (
    COMPLETE_MASS_OFF_ONE,
    HEAD_MASS_ABOVE_ONE,
    LOGPROB_ABOVE_ZERO,
    Check,
    raise_failed,
)
from .rows import TrainerLogprobs

# tolerance for two kernels computing one log-prob; a missing renormalization differs by far more
_SAME_LOGP = 1e-3


def loss_from_logprobs(
    logprobs: Tensor, candidate_logprobs: Tensor | None, entropy: Tensor | None, prepared: PreparedLoss
) -> tuple[Tensor, Tensor]:
    """(loss, results) as `autograd.LossFromLogits` gives them; masked tokens are taken out first."""
    problem, inputs = prepared.problem, prepared.problem.inputs
    config, size = problem.config, logprobs.shape[0]
    candidate_logprobs = _aligned(candidate_logprobs, inputs.candidates, logprobs, config.correction.center)
    if entropy is not None and entropy.shape != logprobs.shape:
        raise ValueError(f"entropy must be [T] = ({size},), got {tuple(entropy.shape)}")
    rows = torch.arange(size, device=logprobs.device)
    if problem.trained is not None:
        rows = problem.trained.nonzero().squeeze(1)
        candidate_positions = rows.new_zeros(0)
        if inputs.candidates is not None:
            candidate_positions = problem.trained[inputs.candidates.rows].nonzero().squeeze(1)
        inputs = inputs.select(rows)
        logprobs, candidate_logprobs = logprobs[rows], candidate_logprobs[candidate_positions]
        entropy = None if entropy is None else entropy[rows]
    dtype = compute_dtype(logprobs.dtype)
    logp, candidate_logp = logprobs.to(dtype), candidate_logprobs.to(dtype)
    with torch.no_grad():
        trainer = _trainer_logprobs(logp, candidate_logp, entropy, inputs.candidates)
        coef = coefficients(config.correction, inputs, trainer)
    if prepared.validate:
        _check_trainer(trainer, inputs, rows, prepared.sequence_ids)
    with_graph = replace(trainer, token_logprob=logp, candidate_logprobs=candidate_logp)
    if entropy is not None:
        with_graph = replace(with_graph, entropy=entropy.to(dtype))
    token_loss, centering_term = token_losses(config, inputs, coef, with_graph)
    scaled = safe_mul(inputs.scale.to(dtype), token_loss)
    results = pack_results(token_loss, centering_term, coef, trainer)
    results = results.new_zeros(results.shape[0], size).index_copy_(1, rows, results)
    if prepared.reduce:
        # both inputs stay in the graph even when no token is trained: a rank must not skip its backward
        return scaled.sum() + 0.0 * (logprobs[:0].sum() + candidate_logprobs[:0].sum()), results
    return torch.zeros(size, dtype=dtype, device=scaled.device).index_copy(0, rows, scaled), results


def _aligned(
    candidate_logprobs: Tensor | None, candidates: CandidateSet | None, device_ref: Tensor, center: bool
) -> Tensor:
    """``candidate_logprobs`` as ``[nnz]``; NaN where they were not given and nothing needs them."""
    nnz = 0 if candidates is None else candidates.ids.numel()
    if candidate_logprobs is None:
        if nnz and center:
            raise ValueError("a centered loss needs candidate_logprobs, log p of the record's candidate ids")
        return device_ref.new_full((nnz,), torch.nan)
    if candidate_logprobs.shape != (nnz,) or not candidate_logprobs.dtype.is_floating_point:
        got = f"{candidate_logprobs.dtype} {tuple(candidate_logprobs.shape)}"
        raise ValueError(f"candidate_logprobs must be floating [nnz] = ({nnz},), got {got}")
    return candidate_logprobs


def _trainer_logprobs(
    logp: Tensor, candidate_logp: Tensor, entropy: Tensor | None, candidates: CandidateSet | None
) -> TrainerLogprobs:
    unknown = torch.full_like(logp, torch.nan)
    entropy = unknown if entropy is None else entropy.detach().to(logp.dtype)
    finite = ~(logp.isnan() | (logp == torch.inf))
    if candidates is None:
        return TrainerLogprobs(logp, candidate_logp, entropy, unknown, unknown, finite)
    mass = row_mass(candidate_logp, candidates.offsets)
    tail = (1.0 - mass).clamp(min=0.0).to(logp.dtype)
    head = torch.where(candidates.complete, unknown, mass.to(logp.dtype))
    return TrainerLogprobs(logp, candidate_logp, entropy, tail, head, finite)


def _check_trainer(
    trainer: TrainerLogprobs, inputs: LossInputs, rows: Tensor, sequence_ids: Tensor | None
) -> None:
    """Refuse what cannot be the trainer's log-probs: above 0, masses that are off, values that disagree.

    On complete rows the last two detect log-probs normalized over the vocabulary instead of the support. One host sync.
    """
    remedy = "Pass log-probs after temperature, as selected_logprobs gives them."
    logp = trainer.token_logprob
    checks = [Check(logp > LOGPROB_ABOVE_ZERO, "logprobs", logp, "the trainer's log-prob is above 0", remedy)]
    if inputs.candidates is not None:
        checks += _candidate_checks(trainer, inputs, inputs.candidates)
    raise_failed(checks, None if sequence_ids is None else sequence_ids[rows], rows)


def _candidate_checks(trainer: TrainerLogprobs, inputs: LossInputs, candidates: CandidateSet) -> list[Check]:
    logp, owner = trainer.candidate_logprobs, candidates.rows
    mass = row_mass(logp, candidates.offsets)
    remedy = "Renormalize p over the set, as selected_logprobs does, or mark the row as a head."
    off_one = candidates.complete & ((mass - 1.0).abs() > COMPLETE_MASS_OFF_ONE)
    problem = "the trainer's probabilities of a complete set do not sum to 1"
    checks = [Check(off_one, "candidate_logprobs", mass, problem, remedy)]
    above = mass > 1.0 + HEAD_MASS_ABOVE_ONE
    problem = "the trainer's probabilities of a head sum to more than 1"
    checks.append(Check(above, "candidate_logprobs", mass, problem, "Normalize over the vocabulary."))
    own = trainer.token_logprob[owner]
    differs = (candidates.ids == inputs.tokens[owner]) & ((logp - own).abs() > _SAME_LOGP * (1.0 + own.abs()))
    problem = "the sampled token's log-prob differs from its entry in candidate_logprobs"
    remedy = "Both must be over the set on a complete row, over the vocabulary on a head."
    return [*checks, Check(differs, "candidate_logprobs", logp, problem, remedy, owner)]
