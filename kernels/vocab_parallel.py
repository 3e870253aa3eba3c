"""Statistics of rows whose vocabulary is whole, or spread over ranks: one launch, and two collectives in between.

Unlike the PyTorch path, which learns the maxima first, a shard sums relative to its own peak in the one pass it
makes; once the common peak is known the sums move to it.
"""

from __future__ import annotations

from torch import Tensor

from offpolicy_corr.loss_inputs import Terms
from offpolicy_corr.row_passes import RowStats
from offpolicy_corr.vocab_parallel import VocabShard, share_peak, share_sums

from .launch import contiguous, define, on_device_of, tiles_for, unrecorded_mass
from .row_passes import LOWEST_SHIFT
from .single_pass import row_statistics


def local_statistics(
    logits: Tensor, terms: Terms, trained: Tensor | None, shard: VocabShard, heat: Tensor,
    tail_floor: float | None = None,
) -> RowStats:  # fmt: skip
    """`RowStats` of this rank's columns in base 2, relative to each row's peak on this rank. One launch.

    With ``tail_floor`` small tails are summed directly.
    """
    candidates = terms.candidates
    ids = offsets = q_tail = None
    if candidates is not None:
        ids, offsets = candidates.ids.contiguous(), candidates.offsets.contiguous()
        if tail_floor is not None:
            q_tail = unrecorded_mass(candidates)
    statistics, shifted = _STATISTICS(
        logits, terms.tokens.contiguous(), contiguous(trained), heat, ids, offsets, q_tail,
        shard.width, shard.first_id, tail_floor or 0.0,
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
    before, shift = ((p * heat).clamp(min=LOWEST_SHIFT.value) for p in (stats.peak, peak))
    back = before - shift
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


def _launch(
    logits: Tensor, tokens: Tensor, trained: Tensor | None, heat: Tensor, ids: Tensor | None, offsets: Tensor | None,
    q_tail: Tensor | None, width: int, first_id: int, tail_floor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    statistics, shifted = _fake(logits, tokens, trained, heat, ids)
    strides = logits.stride()
    tiles = tiles_for(width, logits)
    if len(tokens):
        with on_device_of(logits):
            row_statistics[(len(tokens),)](
                logits, statistics, shifted, tokens, trained, heat, ids, offsets, q_tail,
                len(tokens), *strides, width, first_id, tail_floor,
                K_BLOCK=tiles.candidates, **tiles.lanes(logits.dtype), **tiles.options(logits.dtype, strides[1] == 1),
            )  # fmt: skip
    return statistics, shifted


def _fake(
    logits: Tensor, tokens: Tensor, trained: Tensor | None, heat: Tensor, ids: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    size = 0 if ids is None else ids.shape[0]
    return heat.new_empty((5, tokens.shape[0])), heat.new_empty((size,))


_STATISTICS = define(
    "row_statistics",
    "(Tensor logits, Tensor tokens, Tensor? trained, Tensor heat, Tensor? ids, Tensor? offsets, Tensor? q_tail, "
    "SymInt width, SymInt first_id, float tail_floor) -> (Tensor, Tensor)",
    (),
    _launch,
    _fake,
)
