"""Data: what a loss returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

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


def as_diagnostics(results: Tensor, trained: Tensor | None) -> TokenDiagnostics:
    """From ``[len(FIELDS), T]`` as `loss_and_grad` returns it."""
    named = dict(zip(FIELDS, results.detach().unbind(0), strict=True))
    kept = named["weight"] > 0
    del named["loss"], named["finite"]
    return TokenDiagnostics(kept=kept if trained is None else kept & trained, **named)


def bad_tokens(results: Tensor, trained: Tensor | None, scale: Tensor) -> Tensor:
    """Trained tokens whose loss is not finite, bool ``[T]``.

    For tokens of dropped sequences, whose ``scale`` is 0, only the logits must be usable.
    """
    loss, finite = results[FIELDS.index("loss")], results[FIELDS.index("finite")]
    bad = (~loss.isfinite() & (scale != 0)) | (finite == 0)
    return bad if trained is None else bad & trained


def raise_not_finite(results: Tensor, bad: Tensor, sequence_ids: Tensor | None) -> NoReturn:
    """Name the first of the ``bad`` tokens and the reason.

    Raises:
        ValueError: a row with a NaN or +inf logit or no finite one; a non-zero weight or coefficient on a
            logit of −inf; a weight that overflows.
    """
    named = dict(zip(FIELDS, results, strict=True))
    token = int(bad.nonzero()[0, 0])
    where = f"token {token}"
    if sequence_ids is not None:
        where = f"sample {int(sequence_ids[token])}, {where}"
    if not bool(named["finite"][token]):
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
    raise ValueError(f"the loss of {where} is not finite: {reason}. {remedy}")
