"""Row passes: the two collectives that make vocabulary-parallel logits one softmax."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from .loss_inputs import LossInputs, VocabShard
from .rows import RowStats


def share_row_max(row_max: Tensor, shard: VocabShard) -> Tensor:
    """First collective: the largest logit of each row over all ranks, ``[T]``. NaN on any rank stays NaN."""
    # backends differ on what MAX does to NaN; send its presence along as a second row that compares plainly
    nan = row_max.isnan()
    both = torch.stack([row_max.masked_fill(nan, -torch.inf), nan.to(row_max.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=shard.group)
    return both[0].masked_fill(both[1] > 0, torch.nan)


def share_sums(stats: RowStats, inputs: LossInputs, shard: VocabShard) -> RowStats:
    """Second collective: every other statistic. Each logit comes from the one rank that holds its column."""
    token_logit = torch.where(shard.owns(inputs.tokens), stats.token_logit, 0.0)
    parts = [stats.sum_exp, stats.tail_sum_exp, stats.sum_d_exp, token_logit]
    if inputs.candidates is not None:
        parts.append(torch.where(shard.owns(inputs.candidates.ids), stats.candidate_logits, 0.0))
    sums = torch.cat(parts)
    dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=shard.group)
    size = len(inputs)
    sum_exp, tail_sum_exp, sum_d_exp, token_logit = sums[: 4 * size].view(4, size)
    return replace(
        stats,
        sum_exp=sum_exp,
        tail_sum_exp=tail_sum_exp,
        sum_d_exp=sum_d_exp,
        token_logit=token_logit,
        candidate_logits=sums[4 * size :],
    )
