"""What a loss returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .centering import Coefficients
from .replay import TrainerLogprobs

FIELDS = (
    "loss",
    "finite",
    "logprobs",
    "log_ratio",
    "weight",
    "entropy",
    "centering_term",
    "sampler_head_mass",
    "trainer_head_mass",
    "tail_ratio",
)


@dataclass(frozen=True, eq=False)
class TokenDiagnostics:
    """Detached ``[T]`` tensors; 0 or False at masked positions.

    Args:
        logprobs: trainer's log p of the sampled token (over the support on complete rows), nats.
        log_ratio: log p − log q; NaN where the sampler's log-prob was not given.
        weight: f(r_y).
        kept: ``weight > 0``.
        entropy: of the distribution the loss uses, nats.
        centering_term: Σ_H c_v log p_v, without the advantage; 0 without centering or candidates.
        sampler_head_mass: Q_H; 1 on complete rows; NaN without candidates.
        trainer_head_mass: P_H, on complete rows the full-vocabulary mass of the support; NaN where not known.
        tail_ratio: ρ; 1 on complete rows; NaN without candidates.
    """

    logprobs: Tensor
    log_ratio: Tensor
    weight: Tensor
    kept: Tensor
    entropy: Tensor
    centering_term: Tensor
    sampler_head_mass: Tensor
    trainer_head_mass: Tensor
    tail_ratio: Tensor


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """``loss``: a scalar with a graph, or ``[T]`` with ``reduction="none"``. ``diagnostics``: per token.

    The value of a centered loss is not comparable between runs: with a head that covers the vocabulary, the tail
    scale moves it and leaves the gradient alone. Watch the diagnostics instead.
    """

    loss: Tensor
    diagnostics: TokenDiagnostics


def pack(loss: Tensor, correction: Tensor, coef: Coefficients, trainer: TrainerLogprobs) -> Tensor:
    """``[len(FIELDS), T]``, detached: token losses, unscaled, and everything that is reported about them."""
    values = (
        loss,
        trainer.finite,
        trainer.token,
        coef.log_ratio,
        coef.weight,
        trainer.entropy,
        correction,
        coef.sampler_head_mass,
        coef.trainer_head_mass,
        coef.tail_ratio,
    )
    return torch.stack([value.detach().to(loss.dtype) for value in values])


def as_diagnostics(results: Tensor, trained: Tensor | None) -> TokenDiagnostics:
    """From ``[len(FIELDS), T]`` as a visit returns it."""
    named = dict(zip(FIELDS, results.detach().unbind(0), strict=True))
    kept = named["weight"] > 0
    del named["loss"], named["finite"]
    return TokenDiagnostics(kept=kept if trained is None else kept & trained, **named)


def check_finite(results: Tensor, trained: Tensor | None, scale: Tensor, sequence_ids: Tensor | None) -> None:
    """Refuse trained tokens whose loss is not a number, naming the first and the reason. One host sync.

    On tokens of dropped sequences, whose ``scale`` is 0, only the logits must be usable.

    Raises:
        ValueError: a row with a NaN or +inf logit or no finite one; a non-zero weight or coefficient on a
            logit of −inf; a weight that overflows.
    """
    named = dict(zip(FIELDS, results, strict=True))
    loss, finite = named["loss"], named["finite"]
    bad = (~loss.isfinite() & (scale != 0)) | (finite == 0)
    if trained is not None:
        bad = bad & trained
    if not bool(bad.any()):
        return
    token = int(bad.nonzero()[0, 0])
    place = f"token {token}"
    if sequence_ids is not None:
        place = f"sample {int(sequence_ids[token])}, {place}"
    if not bool(finite[token]):
        reason = "its logits hold NaN or +inf, or none of them is finite"
        remedy = "Look at the trainer's forward pass, or take the token out of loss_mask"
    elif not bool(named["weight"][token].isfinite()):
        reason = f"its importance weight is {float(named['weight'][token])}"
        remedy = "Use a rule that bounds the ratio"
    elif bool(named["logprobs"][token].isinf()):
        reason = "the sampled token's logit is −inf and its weight is not 0"
        remedy = "The trainer masks an id that the sampler drew: align their vocabularies"
    elif not bool(named["centering_term"][token].isfinite()):
        reason = "a candidate's logit is −inf and its coefficient is not 0"
        remedy = "The trainer masks an id that the sampler could draw: align their vocabularies"
    else:
        reason = "an advantage, an entropy or a KL term leaves the range of its dtype"
        remedy = "Look at advantages, entropy and ref_logprobs of that token"
    raise ValueError(f"the loss of {place} is not finite: {reason}. {remedy}")
