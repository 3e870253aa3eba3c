"""Statistics of rows whose vocabulary is whole, or spread over ranks: one launch, and two collectives in between.

Unlike the PyTorch path, which learns the maxima first, a shard sums relative to its own peak in the one pass it
makes; once the common peak is known the sums move to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offpolicy_corr.softmax import RowStats
from offpolicy_corr.terms import Terms
from offpolicy_corr.vocab_parallel import VocabShard, share_peak, share_sums

from .launch import contiguous, on_device_of, tiles_for, unrecorded_mass
from .statistics import row_statistics

_LOWEST = -1e4  # 2^_LOWEST is 0; finite, so that a shard without any finite logit adds 0 rather than NaN


def local_statistics(
    logits: Tensor, terms: Terms, trained: Tensor | None, shard: VocabShard, heat: Tensor,
    tail_floor: float | None = None,
) -> RowStats:  # fmt: skip
    """`RowStats` of this rank's columns in base 2, relative to each row's peak on this rank. One launch.

    With ``tail_floor`` small tails are summed directly.
    """
    candidates, rows = terms.candidates, len(terms)
    statistics = torch.empty(5, rows, dtype=torch.float32, device=logits.device)
    ids = offsets = q_tail = None
    shifted = torch.empty(0, dtype=torch.float32, device=logits.device)
    if candidates is not None:
        ids, offsets = candidates.ids.contiguous(), candidates.offsets.contiguous()
        shifted = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        if tail_floor is not None:
            q_tail = unrecorded_mass(candidates)
    strides = logits.stride()
    if rows:
        with on_device_of(logits):
            row_statistics[(rows,)](
                logits, statistics, shifted, terms.tokens.contiguous(), contiguous(trained), heat,
                ids, offsets, q_tail, rows, *strides, shard.width, shard.first_id, tail_floor or 0.0,
                CONTIGUOUS=strides[1] == 1, **tiles_for(logits.dtype, shard.width).options,
            )  # fmt: skip
    peak, total, tail, moment, token = statistics.unbind(0)
    return RowStats(peak, total, tail, moment, token, shifted)


def shared_statistics(
    logits: Tensor, terms: Terms, trained: Tensor | None, shard: VocabShard, heat: Tensor,
    tail_floor: float | None = None,
) -> RowStats:  # fmt: skip
    """`RowStats` over all ranks, in base 2, relative to the row's peak over all ranks."""
    local = local_statistics(logits, terms, trained, shard, heat, tail_floor)
    peak = share_peak(local.peak, shard)
    return share_sums(_moved(local, peak, terms, heat), terms, shard)


def _moved(stats: RowStats, peak: Tensor, terms: Terms, heat: Tensor) -> RowStats:
    """The same sums relative to ``peak``. Shifts round as they do in the kernel, so that they cancel exactly."""
    empty = stats.peak == -torch.inf
    shift = torch.where(peak == -torch.inf, 0.0, peak * heat)
    back = torch.where(empty, _LOWEST, stats.peak * heat - shift)
    factor = back.exp2()
    candidates = stats.candidates
    if terms.candidates is not None:
        candidates = candidates + back[terms.candidates.rows]
    return RowStats(
        peak,
        stats.total * factor,
        stats.tail * factor,
        (stats.moment + back * stats.total) * factor,
        stats.token + back,
        candidates,
    )
