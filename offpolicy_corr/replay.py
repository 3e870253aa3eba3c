"""Top-p mask replay: the trainer's log-probs over the vocabulary, or over a recorded support."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .csr import segment_logsumexp, segment_sum
from .records.candidates import CandidateSet
from .row_passes import RowStats


@dataclass(frozen=True, eq=False)
class TrainerLogprobs:
    """The trainer's view of ``R`` tokens; on complete rows everything is over the set S, elsewhere over V.

    Args:
        token: log p of the sampled token, ``[R]``; candidates: log p of the candidates, ``[nnz]``.
        entropy: of that same distribution, ``[R]``, nats.
        tail_mass: probability outside the candidates, summed directly, ``[R]`` (unused on complete rows).
        head_mass: full-vocabulary mass of the candidates, ``[R]``; NaN where the vocabulary was not visited.
        finite: False on a row that has a NaN or +inf logit, or no finite one.
    """

    token: Tensor
    candidates: Tensor
    entropy: Tensor
    tail_mass: Tensor
    head_mass: Tensor
    finite: Tensor


def from_statistics(stats: RowStats, candidates: CandidateSet | None) -> TrainerLogprobs:
    """log-softmax over V, and over S on complete rows.

    The support's log-sum-exp is taken over the gathered logits: where the vocabulary gives S a mass that
    underflows, subtracting full-vocabulary log-probs would give inf.
    """
    log_total = stats.total.log()
    mean = stats.moment / stats.total
    entropy = log_total - mean
    finite = entropy.isfinite()
    over_v = TrainerLogprobs(
        stats.token - log_total,
        stats.candidates,
        entropy,
        stats.tail / stats.total,
        torch.full_like(entropy, torch.nan),
        finite,
    )
    if candidates is None:
        return over_v
    rows, complete = candidates.rows, candidates.complete
    peak, log_mass = segment_logsumexp(stats.candidates, candidates.offsets, rows)
    shift = torch.where(complete, peak, 0.0)
    log_norm = torch.where(complete, log_mass, log_total)
    logp = stats.candidates - shift[rows] - log_norm[rows]
    over_s = support_entropy(logp, candidates)
    return replace(
        over_v,
        token=stats.token - shift - log_norm,
        candidates=logp,
        entropy=torch.where(complete, over_s, entropy),
        head_mass=(peak + log_mass - log_total).exp(),
        finite=finite & log_norm.isfinite(),
    )


def support_entropy(logp: Tensor, candidates: CandidateSet) -> Tensor:
    """−Σ p log p over each row's candidates, ``[R]``; an impossible candidate contributes 0."""
    return -segment_sum(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min), candidates.offsets)
