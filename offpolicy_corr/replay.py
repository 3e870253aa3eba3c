"""Mathematics: the trainer's log-probs over the vocabulary, or over a recorded support (top-p mask replay)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .csr import segment_logsumexp, segment_sum
from .records.candidates import CandidateSet
from .rows import RowStats, TrainerLogprobs


def trainer_logprobs(stats: RowStats, candidates: CandidateSet | None) -> TrainerLogprobs:
    """log-softmax over V, and over S on complete rows.

    The support's log-sum-exp is taken over the gathered logits: where the vocabulary gives S a mass that
    underflows, subtracting full-vocabulary log-probs would give inf.
    """
    log_sum_exp = stats.sum_exp.log()
    mean_d = stats.sum_d_exp / stats.sum_exp
    entropy = log_sum_exp - mean_d
    finite = entropy.isfinite()
    over_vocabulary = TrainerLogprobs(
        stats.token_logit - log_sum_exp,
        stats.candidate_logits,
        entropy,
        stats.tail_sum_exp / stats.sum_exp,
        torch.full_like(entropy, torch.nan),
        finite,
    )
    if candidates is None:
        return over_vocabulary
    rows, complete = candidates.rows, candidates.complete
    over_support, largest, log_rest = support_logprobs(stats.candidate_logits, candidates)
    shift, log_norm = torch.where(complete, largest, 0.0), torch.where(complete, log_rest, log_sum_exp)
    logp = torch.where(complete[rows], over_support, stats.candidate_logits - log_sum_exp[rows])
    return replace(
        over_vocabulary,
        token_logprob=stats.token_logit - shift - log_norm,
        candidate_logprobs=logp,
        entropy=torch.where(complete, support_entropy(logp, candidates), entropy),
        head_mass=(largest + log_rest - log_sum_exp).exp(),
        finite=finite & log_norm.isfinite(),
    )


def support_logprobs(candidate_logits: Tensor, candidates: CandidateSet) -> tuple[Tensor, Tensor, Tensor]:
    """log-softmax over each row's own set, ``[nnz]``, and the set's log-sum-exp as its two addends ``[R]``."""
    rows = candidates.rows
    largest, log_rest = segment_logsumexp(candidate_logits, candidates.offsets, rows)
    return candidate_logits - largest[rows] - log_rest[rows], largest, log_rest


def support_entropy(logp: Tensor, candidates: CandidateSet) -> Tensor:
    """−Σ p log p over each row's candidates, ``[R]``; an impossible candidate contributes 0."""
    return -segment_sum(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min), candidates.offsets)
