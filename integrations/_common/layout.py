"""Adapter: where a context-parallel rank keeps a response token: its row in the local logits, its index in local lists.

Row ``prompt − 1 + k`` of a sample predicts its response token ``k``. A rank has some of a sample's rows:

- no context parallelism: all of them;
- zigzag: of ``2·cp`` equal chunks the chunks ``rank`` and ``2·cp − 1 − rank``, one behind the other;
- all-gather: one contiguous slice, of the packed row or of every padded sample.

Per-token lists (log-probs, advantages) and reducers are in zigzag order whatever the logits are in, so under
all-gather the row of a token and its numbers live on different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from offpolicy_corr.records.errors import RecordError


@dataclass(frozen=True)
class RowLayout:
    """One rank's micro-batch.

    Args:
        totals, responses: tokens of each sample, and those of its response.
        rank, size: of the context-parallel group.
        allgather: the logits are one contiguous slice instead of zigzag chunks.
        local_rows: rows of the flattened local logits.
        rows_per_sample: padded local length of a sample; None where samples are packed into one row.
        padded: padded global length of each sample; None where samples are packed.

    Raises:
        RecordError: lengths that contradict each other, a response without a prompt token.
    """

    totals: tuple[int, ...]
    responses: tuple[int, ...]
    rank: int
    size: int
    allgather: bool = False
    local_rows: int = 0
    rows_per_sample: int | None = None
    padded: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.totals) != len(self.responses):
            problem = f"{len(self.totals)} total_lengths for {len(self.responses)} response_lengths"
            raise RecordError(problem, field="response_lengths", remedy="One of each for every sample.")
        for sample, (total, response) in enumerate(zip(self.totals, self.responses, strict=True)):
            if not 0 <= response < total:
                problem = f"a response of {response} tokens in a sample of {total}"
                remedy = (
                    "The row before the first response token predicts it: keep at least one prompt token."
                )
                raise RecordError(
                    problem, sample=sample, field="response_lengths", value=response, remedy=remedy
                )

    @cached_property
    def row_tokens(self) -> ResponseTokens:
        """The response tokens whose rows are in this rank's logits, in ascending order of rows."""
        parts, start = [], 0
        for sample, total in enumerate(self.totals):
            for begin, end, row in self._row_slices(sample, start):
                parts.append(self._response_tokens(sample, begin, end, row))
            start += total if self.allgather else self._rows_needed(sample)
        return ResponseTokens.cat(parts)

    @cached_property
    def list_tokens(self) -> ResponseTokens:
        """The response tokens of the rank's per-token lists, in their order; ``rows`` is −1."""
        parts = []
        for sample in range(len(self.totals)):
            for begin, end in self._zigzag_slices(sample):
                parts.append(self._response_tokens(sample, begin, end, None))
        return ResponseTokens.cat(parts)

    @cached_property
    def list_lengths(self) -> list[int]:
        """Per sample, how many tokens the rank's per-token lists hold."""
        return torch.bincount(self.list_tokens.sample, minlength=len(self.totals)).tolist()

    @cached_property
    def starts(self) -> Tensor:
        """Index of each sample's first response token when full responses are laid end to end, int64 ``[B]``."""
        lengths = torch.tensor((0, *self.responses), dtype=torch.int64)
        return lengths.cumsum(0)[:-1]

    @cached_property
    def samples(self) -> Tensor:
        """The sample of each token of all full responses, laid end to end; int64, CPU."""
        lengths = torch.tensor(self.responses, dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(len(self.responses)), lengths)

    def per_sample(self, values: Tensor) -> Tensor:
        """Sums over each sample of values over all full responses, ``[B]``."""
        return values.new_zeros(len(self.responses)).index_add_(0, self.samples.to(values.device), values)

    def check_rows(self, samples: int) -> None:
        """Raise ValueError where the local logits cannot hold the rows. ``samples`` is their first dimension."""
        every = range(len(self.totals))
        if self.rows_per_sample is not None:
            needed = max((self._rows_needed(i) for i in every), default=0)
            if self.allgather:
                needed = -(-max(self.totals, default=0) // self.size)
            if samples != len(self.totals) or self.rows_per_sample < needed:
                shape = (samples, self.rows_per_sample)
                raise ValueError(
                    f"padded logits [B, L] = {shape} do not fit {len(self.totals)} samples of {needed} rows"
                )
            return
        needed = sum(self._rows_needed(i) for i in every)
        needed = -(-sum(self.totals) // self.size) if self.allgather else needed
        if self.local_rows < needed:
            problem = f"{self.local_rows} rows of logits cannot hold {needed} tokens of this rank"
            raise ValueError(problem + ": were they sliced or compacted before the loss?")

    def _chunk(self, sample: int) -> int:
        length = self.totals[sample] if self.padded is None else self.padded[sample]
        return -(-length // (2 * self.size))

    def _rows_needed(self, sample: int) -> int:
        """Rows that a sample takes on this rank, without all-gather."""
        return self.totals[sample] if self.size == 1 else 2 * self._chunk(sample)

    def _zigzag_slices(self, sample: int) -> list[tuple[int, int]]:
        """``[begin, end)`` of the positions in the sample that the zigzag order gives to this rank."""
        if self.size == 1:
            return [(0, self.totals[sample])]
        chunk = self._chunk(sample)
        first, last = self.rank, 2 * self.size - 1 - self.rank
        return [(first * chunk, (first + 1) * chunk), (last * chunk, (last + 1) * chunk)]

    def _row_slices(self, sample: int, start: int) -> list[tuple[int, int, int]]:
        """``(begin, end, row of begin)`` of the positions that are in the logits; ``start`` is the sample's."""
        if not self.allgather:
            row = start if self.rows_per_sample is None else sample * self.rows_per_sample
            slices = []
            for begin, end in self._zigzag_slices(sample):
                slices.append((begin, end, row))
                row += end - begin
            return slices
        if self.rows_per_sample is not None:
            begin = self.rank * self.rows_per_sample
            return [(begin, begin + self.rows_per_sample, sample * self.rows_per_sample)]
        begin = self.rank * self.local_rows - start
        return [(begin, begin + self.local_rows, 0)]

    def _response_tokens(self, sample: int, begin: int, end: int, row: int | None) -> ResponseTokens:
        """Response tokens predicted by the positions ``[begin, end)``; ``row`` belongs to ``begin``."""
        prompt = self.totals[sample] - self.responses[sample]
        low, high = max(begin, prompt - 1), min(end, self.totals[sample] - 1)
        at = torch.arange(low, max(low, high))
        rows = torch.full_like(at, -1) if row is None else at - begin + row
        return ResponseTokens(rows, torch.full_like(at, sample), at - (prompt - 1))


@dataclass(frozen=True, eq=False)
class ResponseTokens:
    """``rows`` in the flattened local logits, ``sample``, and ``position`` in its response; int64 ``[C]``, CPU."""

    rows: Tensor
    sample: Tensor
    position: Tensor

    def __len__(self) -> int:
        return self.rows.numel()

    def index(self, layout: RowLayout) -> Tensor:
        """Index into all full responses laid end to end, int64 ``[C]``."""
        return self.position + (layout.starts[self.sample] if layout.totals else self.sample)

    @staticmethod
    def cat(parts: Sequence[ResponseTokens]) -> ResponseTokens:
        empty = torch.zeros(0, dtype=torch.int64)
        columns = [[getattr(part, name) for part in parts] for name in ("rows", "sample", "position")]
        return ResponseTokens(*(torch.cat([empty, *column]) for column in columns))
