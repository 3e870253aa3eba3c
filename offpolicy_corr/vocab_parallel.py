"""Vocabulary-parallel logits: which columns a rank holds, and the two collectives that make them one softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from .loss_inputs import Terms
from .row_passes import RowStats


@dataclass(frozen=True)
class VocabShard:
    """Columns ``[first_id, first_id + width)`` of a true vocabulary; columns behind ``width`` are padding."""

    first_id: int
    width: int
    vocab_size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, columns: int, vocab_size: int | None, group: dist.ProcessGroup | None) -> VocabShard:
        """The shard a rank of ``group`` holds when every rank has ``columns`` columns, in rank order.

        Raises:
            ValueError: ``vocab_size`` is above what the ranks hold together.
        """
        ranks = 1 if group is None else dist.get_world_size(group)
        held = columns * ranks
        vocab_size = held if vocab_size is None else vocab_size
        if not 0 < vocab_size <= held:
            raise ValueError(
                f"vocab_size must lie in [1, {held}], the columns of the logits; got {vocab_size}"
            )
        first_id = 0 if group is None else columns * dist.get_rank(group)
        return cls(first_id, min(max(vocab_size - first_id, 0), columns), vocab_size, group)

    def owns(self, ids: Tensor) -> Tensor:
        """bool, same shape: the id's column is on this rank."""
        return (ids >= self.first_id) & (ids < self.first_id + self.width)


def share_peak(peak: Tensor, shard: VocabShard) -> Tensor:
    """First collective: the largest logit of each row over all ranks, ``[T]``. NaN on any rank stays NaN."""
    # backends differ on what MAX does to NaN; send its presence along as a second row that compares plainly
    nan = peak.isnan()
    both = torch.stack([peak.masked_fill(nan, -torch.inf), nan.to(peak.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=shard.group)
    return both[0].masked_fill(both[1] > 0, torch.nan)


def share_sums(stats: RowStats, terms: Terms, shard: VocabShard) -> RowStats:
    """Second collective: every other statistic, each candidate given by the one rank that holds it."""
    token = torch.where(shard.owns(terms.tokens), stats.token, 0.0)
    parts = [stats.total, stats.tail, stats.moment, token]
    if terms.candidates is not None:
        parts.append(torch.where(shard.owns(terms.candidates.ids), stats.candidates, 0.0))
    sums = torch.cat(parts)
    dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=shard.group)
    size = len(terms)
    total, tail, moment, token = sums[: 4 * size].view(4, size)
    return replace(stats, total=total, tail=tail, moment=moment, token=token, candidates=sums[4 * size :])
