"""Data: what one pass over a block of logit rows hands to the next step, ``R`` rows and their ``nnz`` candidates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowStats:
    """What the first pass knows of ``R`` rows. Logits are relative to the row's largest, after temperature.

    Args:
        row_max: the largest logit of each row, raw (before temperature).
        sum_exp: Σ e^d over the vocabulary, with d = (logit − row_max) / temperature.
        tail_sum_exp: the same without the candidates.
        sum_d_exp: Σ d·e^d over the vocabulary.
        token_logit: d of the sampled token; −inf where its column is on another rank.
        candidate_logits: d of the candidates, ``[nnz]``; −inf likewise.
    """

    row_max: Tensor
    sum_exp: Tensor
    tail_sum_exp: Tensor
    sum_d_exp: Tensor
    token_logit: Tensor
    candidate_logits: Tensor


@dataclass(frozen=True, eq=False)
class TrainerLogprobs:
    """The trainer's log-probs of ``R`` tokens: on complete rows over the set S, elsewhere over the vocabulary.

    Args:
        token_logprob: log p of the sampled token, ``[R]``.
        candidate_logprobs: log p of the candidates, ``[nnz]``.
        entropy: of that same distribution, ``[R]``, nats.
        tail_mass: probability outside the candidates, summed directly, ``[R]`` (unused on complete rows).
        head_mass: full-vocabulary mass of the candidates, ``[R]``; NaN where the vocabulary was not read.
        finite: False for a row that has a NaN or +inf logit, or no finite one.
    """

    token_logprob: Tensor
    candidate_logprobs: Tensor
    entropy: Tensor
    tail_mass: Tensor
    head_mass: Tensor
    finite: Tensor


@dataclass(frozen=True, eq=False)
class RowGradient:
    """A gradient over ``R`` rows of logits, after temperature, as the second pass writes it.

    Most columns get ``prob_coef · p_v + entropy_coef · p_v (log p_v + H)``; the sampled token gets ``token_grad``, and
    the candidates get ``candidate_grads`` ``[nnz]`` (the sampled token too, where it is a candidate).
    ``log_sum_exp`` is relative to the row's largest logit. ``entropy_coef`` and ``entropy`` (H) are None without an
    entropy term.
    """

    prob_coef: Tensor
    candidate_grads: Tensor
    token_grad: Tensor
    log_sum_exp: Tensor
    entropy_coef: Tensor | None = None
    entropy: Tensor | None = None

    def narrow(self, row_slice: slice, candidate_slice: slice) -> RowGradient:
        """The same for consecutive rows and their candidates."""
        return RowGradient(
            self.prob_coef[row_slice],
            self.candidate_grads[candidate_slice],
            self.token_grad[row_slice],
            self.log_sum_exp[row_slice],
            None if self.entropy_coef is None else self.entropy_coef[row_slice],
            None if self.entropy is None else self.entropy[row_slice],
        )
