"""Records: the candidates of each position, a head of the sampler's most likely tokens or its whole support."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..csr import as_index, offsets_from_counts, row_index, row_mass, take_rows
from ..weights import WeightRule
from .missing import SENTINEL


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise TypeError(message)


def is_integer(tensor: Tensor) -> bool:
    """int32 or int64: what ids and indices may be."""
    return tensor.dtype in (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class CandidateSet:
    """Ragged candidate sets of ``T`` tokens in CSR form.

    Args:
        ids: token ids, int32 or int64 ``[nnz]``.
        logprobs: the sampler's log-probabilities (nats) of those ids, float32 or float64 ``[nnz]``, after
            temperature and after any filter; None where only the ids of supports were recorded.
        offsets: int64 ``[T + 1]``; token ``t`` owns ``ids[offsets[t]:offsets[t + 1]]``.
        complete: bool ``[T]``. True: the set is everything the sampler could have drawn (top-p, top-k), so the
            trainer renormalizes over it and centering is exact. False: the set is the head of a distribution
            over the whole vocabulary, and the rest is modeled.

    Raises:
        TypeError: wrong dtypes or ranks; half-precision log-probs (a head's mass would be off by up to 3e-3).
    """

    ids: Tensor
    logprobs: Tensor | None
    offsets: Tensor
    complete: Tensor

    def __post_init__(self) -> None:
        _require(
            is_integer(self.ids), f"candidate ids must be integers, int32 or int64, got {self.ids.dtype}"
        )
        if self.logprobs is not None:
            _require(
                self.logprobs.dtype in (torch.float32, torch.float64),
                f"candidate log-probs must be float32 or float64, got {self.logprobs.dtype}: "
                "ship them in float32, half precision loses the mass of the head",
            )
        _require(self.offsets.dtype == torch.int64, f"offsets must be int64, got {self.offsets.dtype}")
        _require(self.complete.dtype == torch.bool, f"complete must be bool, got {self.complete.dtype}")
        for name in ("ids", "offsets", "complete"):
            _require(getattr(self, name).dim() == 1, f"{name} must be one-dimensional")

    @classmethod
    def from_topk(cls, ids: Tensor, logprobs: Tensor, pad_id: int = -1) -> CandidateSet:
        """Heads of a full-vocabulary distribution, dense ``[T, K]``.

        Slots that hold no candidate are left out: those whose id is ``pad_id``, and those whose log-prob is −9999 or
        below, which frameworks pad with (Tinker writes ``(0, −99999.0)``). A head is any set of likely ids, so what
        is left is still one.
        """
        _require(ids.dim() == 2, f"ids must be [T, K], got shape {tuple(ids.shape)}")
        _require(ids.shape == logprobs.shape, "ids and logprobs must have the same shape")
        _require(is_integer(ids), f"candidate ids must be integers, int32 or int64, got {ids.dtype}")
        used = (ids != pad_id) & ~(logprobs <= SENTINEL)
        complete = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        return cls(ids[used], logprobs[used], offsets_from_counts(used.sum(1)), complete)

    @classmethod
    def from_support(cls, ids: Tensor, offsets: Tensor, logprobs: Tensor | None = None) -> CandidateSet:
        """Whole top-p or top-k supports in CSR form. Without ``logprobs`` they can be replayed but not centered."""
        complete = torch.ones(offsets.numel() - 1, dtype=torch.bool, device=ids.device)
        return cls(ids, logprobs, offsets, complete)

    @classmethod
    def empty(cls, num_tokens: int, device: torch.device | str = "cpu") -> CandidateSet:
        """``num_tokens`` rows without candidates, as heads: to be joined with rows that have some."""
        return cls(
            torch.zeros(0, dtype=torch.int64, device=device),
            torch.zeros(0, dtype=torch.float32, device=device),
            torch.zeros(num_tokens + 1, dtype=torch.int64, device=device),
            torch.zeros(num_tokens, dtype=torch.bool, device=device),
        )

    def __len__(self) -> int:
        return self.complete.numel()

    @property
    def rows(self) -> Tensor:
        """For every candidate the index of its token, int64 ``[nnz]``; computed once."""
        if torch.compiler.is_compiling():  # a traced program needs no cache
            return row_index(self.offsets, self.ids.numel())
        return self._rows

    @cached_property
    def _rows(self) -> Tensor:
        return row_index(self.offsets, self.ids.numel())

    def to(self, device: torch.device | str) -> CandidateSet:
        logprobs = None if self.logprobs is None else self.logprobs.to(device)
        return CandidateSet(self.ids.to(device), logprobs, self.offsets.to(device), self.complete.to(device))

    def select(self, index: Tensor) -> CandidateSet:
        """The rows ``index`` (int64 or bool ``[T]``), in that order."""
        index = as_index(index, len(self))
        position, offsets = take_rows(self.offsets, index)
        logprobs = None if self.logprobs is None else self.logprobs[position]
        return CandidateSet(self.ids[position], logprobs, offsets, self.complete[index])

    def narrow(self, row_slice: slice, candidate_slice: slice) -> CandidateSet:
        """Consecutive rows as views, given the slice of candidates that they own; `select` would copy them."""
        return CandidateSet(
            self.ids[candidate_slice],
            None if self.logprobs is None else self.logprobs[candidate_slice],
            self.offsets[row_slice.start : row_slice.stop + 1] - candidate_slice.start,
            self.complete[row_slice],
        )

    @staticmethod
    def concat(sets: Sequence[CandidateSet]) -> CandidateSet:
        """Rows of all sets, one after the other. Either all of them carry log-probs or none does."""
        _require(len(sets) > 0, "concat needs at least one candidate set")
        filled = [s for s in sets if s.ids.numel() > 0]
        with_logprobs = [s.logprobs for s in filled if s.logprobs is not None]
        if len(with_logprobs) not in (0, len(filled)):
            raise ValueError(
                "some candidate sets carry log-probs and others do not; drop or record them everywhere"
            )
        starts = torch.tensor([0] + [s.ids.numel() for s in sets], device=sets[0].offsets.device).cumsum(0)
        offsets = [s.offsets[:-1] + start for s, start in zip(sets, starts, strict=False)] + [starts[-1:]]
        if filled and not with_logprobs:
            logprobs: Tensor | None = None
        else:
            logprobs = torch.cat(with_logprobs) if with_logprobs else sets[0].logprobs
        ids = torch.cat([s.ids for s in filled]) if filled else sets[0].ids
        return CandidateSet(ids, logprobs, torch.cat(offsets), torch.cat([s.complete for s in sets]))

    def to_padded(self, pad_id: int = -1) -> tuple[Tensor, Tensor | None]:
        """Dense ``(ids, logprobs)`` of shape ``[T, Kmax]``; unused slots hold ``pad_id`` and −inf."""
        counts = self.offsets.diff()
        width = int(counts.max()) if len(self) else 0
        column = torch.arange(self.ids.numel(), device=self.ids.device) - self.offsets[:-1][self.rows]
        ids = self.ids.new_full((len(self), width), pad_id)
        ids[self.rows, column] = self.ids
        if self.logprobs is None:
            return ids, None
        logprobs = self.logprobs.new_full((len(self), width), -torch.inf)
        logprobs[self.rows, column] = self.logprobs
        return ids, logprobs

    def mass(self) -> Tensor:
        """Recorded probability of each row, float64 ``[T]``: 1 on a complete row up to rounding."""
        logprobs = self._logprobs("the recorded mass")
        self._check_csr()
        return row_mass(logprobs, self.offsets)

    def trim(self, mass: float = 0.999, max_k: int = 128) -> CandidateSet:
        """Keep of each head its most likely candidates, until they hold ``mass`` or are ``max_k`` in number.

        Any subset chosen by q alone is a head again, so centering stays valid; what it costs is
        `certificate`'s growth. The choice never looks at the sampled token; equal log-probs keep their order.
        Complete rows are left alone: they have no tail that could be modeled.
        """
        if not 0.0 < mass <= 1.0 or max_k < 1:
            raise ValueError(f"trim needs 0 < mass <= 1 and max_k >= 1, got mass={mass}, max_k={max_k}")
        logprobs = self._logprobs("trim")
        self._check_csr()
        by_prob = logprobs.argsort(descending=True, stable=True)
        order = by_prob[self.rows[by_prob].argsort(stable=True)]
        q = logprobs[order].double().exp()
        # a masked token may hold anything: a value that is no probability must not reach the running sum of other rows
        q = torch.where(q <= 2.0, q, 0.0)
        before = q.cumsum(0) - q
        start = self.offsets[:-1][self.rows]
        before = before - before[start]
        rank = torch.arange(q.numel(), device=q.device) - start
        kept = ((before < mass) & (rank < max_k)) | self.complete[self.rows]
        mask = torch.zeros_like(kept)
        mask[order] = kept
        counts = torch.zeros(len(self), dtype=torch.int64, device=mask.device)
        counts.index_add_(0, self.rows[mask], torch.ones_like(self.rows[mask]))
        return CandidateSet(self.ids[mask], logprobs[mask], offsets_from_counts(counts), self.complete)

    def certificate(
        self,
        rule: WeightRule,
        advantages: Tensor | None = None,
        trainer_tail_mass: Tensor | None = None,
        tail_floor: float = 1e-6,
    ) -> Tensor:
        """Bound on the drift that the modeled tail can leave behind, float64 ``[T]``, per unit of |advantage|.

        It bounds the L1 norm, over logits after temperature, of the expected centered gradient under the true q
        when every advantage is equal. Exact rows have none. ``trainer_tail_mass`` (``1 − P_H``, ``[T]``)
        sharpens it; before the trainer's pass it is unknown and taken as 1. Without ``advantages`` a rule that
        looks at their sign gets the worse of the two.

        Raises:
            TypeError: ``rule`` has no ``drift_bound`` (a user's own rule need not have one).
        """
        bound = getattr(rule, "drift_bound", None)
        _require(bound is not None, f"{type(rule).__name__} has no drift_bound(q_tail, p_tail, advantages)")
        q_tail = (1.0 - self.mass()).clamp(min=tail_floor)
        p_tail = torch.ones_like(q_tail) if trainer_tail_mass is None else trainer_tail_mass.to(q_tail)
        signs = (
            [advantages] if advantages is not None else [torch.ones_like(q_tail), -torch.ones_like(q_tail)]
        )
        worst = torch.stack([bound(q_tail, p_tail, sign) for sign in signs]).amax(0)  # type: ignore[misc]
        return worst.masked_fill(self.complete, 0.0)

    def _check_csr(self) -> None:
        offsets, size = self.offsets, self.ids.numel()
        if offsets.numel() == 0 or bool(
            (offsets[0] != 0) | (offsets[-1] != size) | (offsets.diff() < 0).any()
        ):
            raise ValueError(f"offsets must start at 0, never fall and end at the number of ids, {size}")
        if self.logprobs is not None and self.logprobs.shape != self.ids.shape:
            shapes = f"{tuple(self.logprobs.shape)} and {tuple(self.ids.shape)}"
            raise ValueError(f"logprobs and ids must have the same shape, got {shapes}")

    def _logprobs(self, purpose: str) -> Tensor:
        if self.logprobs is None:
            raise ValueError(f"{purpose} needs candidate log-probs, and this set holds ids alone")
        return self.logprobs
