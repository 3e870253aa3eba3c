"""Data: everything that a loss knows before it reads the trainer's logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from .correction import Correction
from .records.candidates import CandidateSet


@dataclass(frozen=True)
class LossConfig:
    """The settings that are the same for every token."""

    correction: Correction
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"


@dataclass(frozen=True, eq=False)
class LossInputs:
    """Constants of ``T`` tokens; none of them carries a gradient.

    ``logq`` is NaN where the sampler's log-prob was not recorded. ``scale`` multiplies a token's loss: one over
    the denominator, or 0 for a token of a dropped sequence.
    """

    tokens: Tensor
    logq: Tensor
    advantages: Tensor
    scale: Tensor
    temperature: float | Tensor
    candidates: CandidateSet | None
    ref_logprobs: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.numel()

    @property
    def num_candidates(self) -> int:
        """How many candidates all tokens have together, nnz."""
        return 0 if self.candidates is None else self.candidates.ids.numel()

    def select(self, index: Tensor) -> LossInputs:
        """The tokens ``index`` (int64), in that order."""
        candidates = None if self.candidates is None else self.candidates.select(index)
        return self._at(index, candidates)

    def chunks(
        self, max_tokens: int, max_candidates: int | None = None
    ) -> Iterator[tuple[slice, slice, LossInputs]]:
        """Consecutive chunks of at most ``max_tokens`` tokens: token slice, candidate slice, and their inputs.

        With ``max_candidates`` a chunk also ends where it holds that many, exceeding it by at most one row.
        """
        stops = list(range(max_tokens, len(self), max_tokens)) + [len(self)] * (len(self) > 0)
        if max_candidates is not None and self.candidates is not None:
            budget = self.candidates.offsets[1:] // max_candidates
            stops = sorted({*stops, *((budget.diff() > 0).nonzero().squeeze(1) + 1).tolist()})
        starts = [0, *stops][: len(stops)]
        if self.candidates is None:
            bounds = [0] * (len(starts) + 1)
        else:
            bounds = self.candidates.offsets[torch.tensor([0, *stops])].tolist()
        for start, stop, first, last in zip(starts, stops, bounds[:-1], bounds[1:], strict=True):
            row_slice, candidate_slice = slice(start, stop), slice(first, last)
            candidates = None
            if self.candidates is not None:
                candidates = self.candidates.narrow(row_slice, candidate_slice)
            yield row_slice, candidate_slice, self._at(row_slice, candidates)

    def _at(self, index: Tensor | slice, candidates: CandidateSet | None) -> LossInputs:
        temperature = self.temperature
        return replace(
            self,
            tokens=self.tokens[index],
            logq=self.logq[index],
            advantages=self.advantages[index],
            scale=self.scale[index],
            temperature=temperature[index] if isinstance(temperature, Tensor) else temperature,
            candidates=candidates,
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[index],
        )


@dataclass(frozen=True)
class VocabShard:
    """Columns ``[first_id, first_id + width)`` of a true vocabulary; columns behind ``width`` are padding."""

    first_id: int
    width: int
    vocab_size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, columns: int, vocab_size: int | None, group: dist.ProcessGroup | None) -> VocabShard:
        """The shard that a rank of ``group`` holds when every rank has ``columns`` columns, in rank order.

        Raises:
            ValueError: ``vocab_size`` is above what the ranks hold together.
        """
        ranks = 1 if group is None else dist.get_world_size(group)
        total_columns = columns * ranks
        vocab_size = total_columns if vocab_size is None else vocab_size
        if not 0 < vocab_size <= total_columns:
            raise ValueError(
                f"vocab_size must lie in [1, {total_columns}], the columns of the logits; got {vocab_size}"
            )
        first_id = 0 if group is None else columns * dist.get_rank(group)
        return cls(first_id, min(max(vocab_size - first_id, 0), columns), vocab_size, group)

    def owns(self, ids: Tensor) -> Tensor:
        """bool, same shape: the id's column is on this rank."""
        return (ids >= self.first_id) & (ids < self.first_id + self.width)


@dataclass(frozen=True, eq=False)
class LossProblem:
    """A loss over ``T`` rows of logits: constants, trained tokens (bool ``[T]``, None: all), settings, shard."""

    inputs: LossInputs
    trained: Tensor | None
    config: LossConfig
    shard: VocabShard

    def scaled_by(self, factor: Tensor) -> LossProblem:
        """The same problem whose token losses are multiplied by ``factor``, a scalar or ``[T]``."""
        return replace(self, inputs=replace(self.inputs, scale=self.inputs.scale * factor))
