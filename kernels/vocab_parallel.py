"""Row passes: sums of rows on the device, whose vocabulary is whole or spread over ranks.

The PyTorch twin is `offpolicy_corr.torch_loss.row_stats`. Unlike it, which learns the maxima first, a shard sums
relative to its own largest logit in the one pass it makes; once the largest over all ranks is known, the sums are
rebased to it.
"""

from __future__ import annotations

from torch import Tensor

from offpolicy_corr.loss_inputs import LossInputs, VocabShard
from offpolicy_corr.rows import RowStats
from offpolicy_corr.vocab_parallel import share_row_max, share_sums

from .launch import contiguous, define, on_device_of, sampler_tail_mass, tiles_for
from .row_passes import LOWEST_SHIFT
from .single_pass import row_stats


def local_row_stats(
    logits: Tensor, inputs: LossInputs, trained: Tensor | None, shard: VocabShard, log2e_over_temps: Tensor,
    tail_floor: float | None = None,
) -> RowStats:  # fmt: skip
    """`RowStats` of this rank's columns in base 2, relative to each row's largest logit on this rank. One launch.

    With ``tail_floor`` small tails are summed directly.
    """
    candidates = inputs.candidates
    ids = offsets = sampler_tail = None
    if candidates is not None:
        ids, offsets = candidates.ids.contiguous(), candidates.offsets.contiguous()
        if tail_floor is not None:
            sampler_tail = sampler_tail_mass(candidates)
    sums, candidate_logits = _ROW_STATS(
        logits, inputs.tokens.contiguous(), contiguous(trained), log2e_over_temps, ids, offsets, sampler_tail,
        shard.width, shard.first_id, tail_floor or 0.0,
    )  # fmt: skip
    row_max, sum_exp, tail_sum_exp, sum_d_exp, token_logit = sums.unbind(0)
    return RowStats(row_max, sum_exp, tail_sum_exp, sum_d_exp, token_logit, candidate_logits)


def shared_row_stats(
    logits: Tensor, inputs: LossInputs, trained: Tensor | None, shard: VocabShard, log2e_over_temps: Tensor,
    tail_floor: float | None = None,
) -> RowStats:  # fmt: skip
    """`RowStats` over all ranks, in base 2, relative to the row's largest logit over all ranks."""
    local = local_row_stats(logits, inputs, trained, shard, log2e_over_temps, tail_floor)
    row_max = share_row_max(local.row_max, shard)
    return share_sums(_rebased(local, row_max, inputs, log2e_over_temps), inputs, shard)


def _rebased(stats: RowStats, row_max: Tensor, inputs: LossInputs, log2e_over_temps: Tensor) -> RowStats:
    """The same sums relative to ``row_max``. Shifts round as they do in the kernel, so that they cancel exactly."""
    own_shift, shift = (
        (m * log2e_over_temps).clamp(min=LOWEST_SHIFT.value) for m in (stats.row_max, row_max)
    )
    change = own_shift - shift
    factor = change.exp2()
    candidate_logits = stats.candidate_logits
    if inputs.candidates is not None:
        candidate_logits = candidate_logits + change[inputs.candidates.rows]
    return RowStats(
        row_max,
        stats.sum_exp * factor,
        stats.tail_sum_exp * factor,
        (stats.sum_d_exp + change * stats.sum_exp) * factor,
        stats.token_logit + change,
        candidate_logits,
    )


def _launch(
    logits: Tensor, tokens: Tensor, trained: Tensor | None, log2e_over_temps: Tensor, ids: Tensor | None,
    offsets: Tensor | None, sampler_tail: Tensor | None, width: int, first_id: int, tail_floor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sums, candidate_logits = _fake(logits, tokens, trained, log2e_over_temps, ids)
    strides = logits.stride()
    tiles = tiles_for(width, logits)
    if len(tokens):
        with on_device_of(logits):
            row_stats[(len(tokens),)](
                logits, sums, candidate_logits, tokens, trained, log2e_over_temps, ids, offsets, sampler_tail,
                len(tokens), *strides, width, first_id, tail_floor,
                K_BLOCK=tiles.candidates, **tiles.lanes(logits.dtype), **tiles.options(logits.dtype, strides[1] == 1),
            )  # fmt: skip
    return sums, candidate_logits


def _fake(
    logits: Tensor,
    tokens: Tensor,
    trained: Tensor | None,
    log2e_over_temps: Tensor,
    ids: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor]:
    size = 0 if ids is None else ids.shape[0]
    return log2e_over_temps.new_empty((5, tokens.shape[0])), log2e_over_temps.new_empty((size,))


_ROW_STATS = define(
    "row_stats",
    "(Tensor logits, Tensor tokens, Tensor? trained, Tensor log2e_over_temps, Tensor? ids, Tensor? offsets, "
    "Tensor? sampler_tail, SymInt width, SymInt first_id, float tail_floor) -> (Tensor, Tensor)",
    (),
    _launch,
    _fake,
)
