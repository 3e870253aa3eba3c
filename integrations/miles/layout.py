"""Where Miles keeps a response token: its row in the local logits, and its place in the CP-local lists.

Row ``prompt − 1 + k`` of a sample predicts its response token ``k``. A rank holds some of a sample's rows:

- no context parallelism: all of them;
- zigzag: of ``2·cp`` equal chunks the chunks ``rank`` and ``2·cp − 1 − rank``, one behind the other;
- all-gather: one contiguous slice, of the packed row (thd) or of every padded sample (bshd).

The per-token lists of a batch (log-probs, advantages) and the reducer are in zigzag order whatever the logits are
in, so under all-gather a token's row and its numbers live on different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offpolicy_corr.records.errors import RecordError

from .host import Batch, need


@dataclass(frozen=True)
class Layout:
    """One rank's micro-batch. ``rows_per_sample`` is the padded local length of a sample (bshd), else None."""

    totals: tuple[int, ...]
    responses: tuple[int, ...]
    rank: int
    size: int
    allgather: bool
    local_rows: int
    rows_per_sample: int | None
    padded: tuple[int, ...] | None

    @classmethod
    def of(cls, args: Any, batch: Batch, logits: Tensor, rank: int, size: int) -> Layout:
        """Read the layout off a batch and its logits, ``[1, T, V]`` (thd) or ``[B, L, V]`` (bshd).

        Raises:
            RecordError: lengths that contradict each other, a response without a prompt.
            ValueError: a format or a shape that is neither.
        """
        totals = tuple(int(n) for n in need(batch, "total_lengths"))
        responses = tuple(int(n) for n in need(batch, "response_lengths"))
        _check_lengths(totals, responses)
        form = getattr(args, "qkv_format", "thd")
        if logits.dim() != 3 or form not in ("thd", "bshd"):
            shape = tuple(logits.shape)
            raise ValueError(
                f"logits must be [1, T, V] with qkv_format thd or [B, L, V] with bshd, got {shape}, {form!r}"
            )
        padded = None
        if form == "bshd":
            padded = tuple(int(n) for n in need(batch, "max_seq_lens"))
        elif logits.shape[0] != 1:
            raise ValueError(f"qkv_format thd packs all samples into [1, T, V], got {tuple(logits.shape)}")
        layout = cls(
            totals,
            responses,
            rank,
            size,
            bool(getattr(args, "allgather_cp", False)) and size > 1,
            logits.shape[0] * logits.shape[1],
            logits.shape[1] if padded is not None else None,
            padded,
        )
        layout._check_rows(logits.shape[0])
        return layout

    def held(self) -> Tokens:
        """The response tokens whose rows this rank's logits hold, in ascending order of rows."""
        parts, start = [], 0
        for sample, total in enumerate(self.totals):
            for begin, end, row in self._pieces(sample, start):
                parts.append(self._tokens(sample, begin, end, row))
            start += total if self.allgather else self._whole(sample)
        return Tokens.cat(parts)

    def listed(self) -> Tokens:
        """The response tokens of the CP-local lists, in their order; ``rows`` is −1, these need not be held."""
        parts = []
        for sample in range(len(self.totals)):
            for begin, end in self._owned(sample):
                parts.append(self._tokens(sample, begin, end, None))
        return Tokens.cat(parts)

    def listed_lengths(self) -> list[int]:
        """Per sample, how many tokens the CP-local lists hold."""
        return torch.bincount(self.listed().sample, minlength=len(self.totals)).tolist()

    def offsets(self) -> Tensor:
        """Where each sample's response starts when all full responses are laid end to end, int64 ``[B]``."""
        lengths = torch.tensor((0, *self.responses), dtype=torch.int64)
        return lengths.cumsum(0)[:-1]

    def samples(self) -> Tensor:
        """Which sample each token of all full responses, laid end to end, belongs to; int64, CPU."""
        lengths = torch.tensor(self.responses, dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(len(self.responses)), lengths)

    def per_sample(self, values: Tensor) -> Tensor:
        """Sums over each sample of values over all full responses, ``[B]``."""
        return values.new_zeros(len(self.responses)).index_add_(0, self.samples().to(values.device), values)

    def _chunk(self, sample: int) -> int:
        length = self.totals[sample] if self.padded is None else self.padded[sample]
        return -(-length // (2 * self.size))

    def _owned(self, sample: int) -> list[tuple[int, int]]:
        """Runs of positions in the sample that the zigzag order gives to this rank."""
        if self.size == 1:
            return [(0, self.totals[sample])]
        chunk = self._chunk(sample)
        first, last = self.rank, 2 * self.size - 1 - self.rank
        return [(first * chunk, (first + 1) * chunk), (last * chunk, (last + 1) * chunk)]

    def _pieces(self, sample: int, start: int) -> list[tuple[int, int, int]]:
        """``(begin, end, row of begin)`` of the runs of positions that the logits hold."""
        if not self.allgather:
            base = start if self.rows_per_sample is None else sample * self.rows_per_sample
            runs, pieces = self._owned(sample), []
            for begin, end in runs:
                pieces.append((begin, end, base))
                base += end - begin
            return pieces
        if self.rows_per_sample is not None:
            begin = self.rank * self.rows_per_sample
            return [(begin, begin + self.rows_per_sample, sample * self.rows_per_sample)]
        begin = self.rank * self.local_rows - start
        return [(begin, begin + self.local_rows, 0)]

    def _tokens(self, sample: int, begin: int, end: int, row: int | None) -> Tokens:
        """Response tokens predicted by the positions ``[begin, end)``; ``row`` belongs to ``begin``."""
        prompt = self.totals[sample] - self.responses[sample]
        low, high = max(begin, prompt - 1), min(end, self.totals[sample] - 1)
        at = torch.arange(low, max(low, high))
        rows = torch.full_like(at, -1) if row is None else at - begin + row
        return Tokens(rows, torch.full_like(at, sample), at - (prompt - 1))

    def _check_rows(self, samples: int) -> None:
        widest = range(len(self.totals))
        if self.rows_per_sample is not None:
            needed = max((self._whole(i) for i in widest), default=0)
            if self.allgather:
                needed = -(-max(self.totals, default=0) // self.size)
            if samples != len(self.totals) or self.rows_per_sample < needed:
                shape = (samples, self.rows_per_sample)
                raise ValueError(
                    f"bshd logits [B, L] = {shape} do not fit {len(self.totals)} samples of {needed} rows"
                )
            return
        needed = sum(self._whole(i) for i in widest)
        needed = -(-sum(self.totals) // self.size) if self.allgather else needed
        if self.local_rows < needed:
            problem = f"{self.local_rows} rows of logits cannot hold {needed} tokens of this rank"
            raise ValueError(problem + ": were they sliced or compacted before the loss?")

    def _whole(self, sample: int) -> int:
        """Rows that a sample needs on this rank, without all-gather."""
        return self.totals[sample] if self.size == 1 else 2 * self._chunk(sample)


@dataclass(frozen=True, eq=False)
class Tokens:
    """``rows`` in the flattened local logits, ``sample``, and ``position`` in its response; int64 ``[C]``, CPU."""

    rows: Tensor
    sample: Tensor
    position: Tensor

    def __len__(self) -> int:
        return self.rows.numel()

    def flat(self, layout: Layout) -> Tensor:
        """Index into all full responses laid end to end."""
        offsets = layout.offsets()
        return self.position + (offsets[self.sample] if offsets.numel() else self.sample)

    @staticmethod
    def cat(parts: Sequence[Tokens]) -> Tokens:
        empty = torch.zeros(0, dtype=torch.int64)
        columns = [[getattr(part, name) for part in parts] for name in ("rows", "sample", "position")]
        return Tokens(*(torch.cat([empty, *column]) for column in columns))


def _check_lengths(totals: tuple[int, ...], responses: tuple[int, ...]) -> None:
    if len(totals) != len(responses):
        problem = f"{len(totals)} total_lengths for {len(responses)} response_lengths"
        raise RecordError(problem, field="response_lengths", remedy="One of each for every sample.")
    for sample, (total, response) in enumerate(zip(totals, responses, strict=True)):
        if not 0 <= response < total:
            problem = f"a response of {response} tokens in a sample of {total}"
            remedy = "The row before the first response token predicts it: keep at least one prompt token."
            raise RecordError(problem, sample=sample, field="response_lengths", value=response, remedy=remedy)
