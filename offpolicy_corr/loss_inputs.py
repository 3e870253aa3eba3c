"""What one loss knows before it sees the trainer: its settings and, token by token, its constants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .correction import Correction
from .records.candidates import CandidateSet


@dataclass(frozen=True)
class Settings:
    """The parts of a loss that are the same for every token."""

    correction: Correction
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"


@dataclass(frozen=True, eq=False)
class Terms:
    """Constants of ``T`` trained tokens; none of them carries a gradient.

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

    def select(self, index: Tensor) -> Terms:
        """The tokens ``index`` (int64), in that order."""
        candidates = None if self.candidates is None else self.candidates.select(index)
        return self._map(lambda values: values[index], candidates)

    def chunks(self, rows: int, candidates: int | None = None) -> Iterator[tuple[slice, slice, Terms]]:
        """Runs of at most ``rows`` tokens: their slice of tokens, their slice of candidates, their terms.

        With ``candidates`` a run also ends where it holds that many, by at most one row above it.
        """
        stops = list(range(rows, len(self), rows)) + [len(self)] * (len(self) > 0)
        if candidates is not None and self.candidates is not None:
            budget = self.candidates.offsets[1:] // candidates
            stops = sorted({*stops, *((budget.diff() > 0).nonzero().squeeze(1) + 1).tolist()})
        starts = [0, *stops][: len(stops)]
        if self.candidates is None:
            bounds = [0] * (len(starts) + 1)
        else:
            bounds = self.candidates.offsets[torch.tensor([0, *stops])].tolist()
        for start, stop, first, last in zip(starts, stops, bounds[:-1], bounds[1:], strict=True):
            span, owned = slice(start, stop), slice(first, last)
            yield span, owned, self._map(lambda values, s=span: values[s], self._narrow(span, owned))

    def _map(self, take, candidates: CandidateSet | None) -> Terms:  # type: ignore[no-untyped-def]
        temperature = self.temperature
        return replace(
            self,
            tokens=take(self.tokens),
            logq=take(self.logq),
            advantages=take(self.advantages),
            scale=take(self.scale),
            temperature=take(temperature) if isinstance(temperature, Tensor) else temperature,
            candidates=candidates,
            ref_logprobs=None if self.ref_logprobs is None else take(self.ref_logprobs),
        )

    def _narrow(self, span: slice, owned: slice) -> CandidateSet | None:
        whole = self.candidates
        if whole is None:
            return None
        logprobs = None if whole.logprobs is None else whole.logprobs[owned]
        offsets = whole.offsets[span.start : span.stop + 1] - owned.start
        return CandidateSet(whole.ids[owned], logprobs, offsets, whole.complete[span])
