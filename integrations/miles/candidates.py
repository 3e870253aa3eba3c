"""Candidates out of a batch of Miles: per-sample arrays over full responses, on the CPU, in three shapes.

- heads: ``rollout_topk_token_ids`` int ``[R, K]``, ``rollout_topk_log_probs`` float ``[R, K]``, unused slots −1, −inf;
- supports: ``rollout_sampling_mask_ids`` int ``[nnz]``, ``rollout_sampling_mask_offsets`` ``[R + 1]``, and log-probs
  from ``rollout_sampling_mask_log_probs`` float ``[nnz]``, or
- supports whose log-probs are the first ``rollout_topk_lengths`` ``[R]`` columns of ``rollout_topk_log_probs``, in the
  support's order, or dense rows with their own ids. Such rows must cover the support: a part of it would be a head.

Ids alone can be replayed, not centered.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from offpolicy_corr.records.candidates import CandidateSet
from offpolicy_corr.records.errors import RecordError

from .host import Batch, check_row_lengths, missing, need_per_sample
from .layout import Layout, Tokens

_IDS, _OFFSETS, _MASK_LOGPROBS = (f"rollout_sampling_mask_{name}" for name in ("ids", "offsets", "log_probs"))
_TOPK_IDS, _TOPK_LOGPROBS, _LENGTHS = (
    "rollout_topk_token_ids",
    "rollout_topk_log_probs",
    "rollout_topk_lengths",
)
_WIDE = 1 << 32  # ids fit below


def read_candidates(
    batch: Batch, layout: Layout, held: Tokens, trained: Tensor, kind: str, centered: bool
) -> CandidateSet | None:
    """Candidates of the ``held`` tokens, CPU, rows in their order; rows of untrained tokens are empty.

    Args:
        trained: bool ``[sum of responses]``, over full responses laid end to end, CPU.
        kind: ``"heads"``, ``"supports"`` or ``"none"``.
        centered: whether log-probs are needed.

    Raises:
        RecordError: a missing key, by its name; lengths that disagree; rows that do not cover their support.
    """
    if kind == "none":
        return None
    sets = []
    for sample, mask in enumerate(trained.split(layout.responses)):
        try:
            sets.append(
                _heads(batch, layout, sample)
                if kind == "heads"
                else _support(batch, layout, sample, mask, centered)
            )
        except RecordError as error:
            if error.sample is not None:
                raise
            raise _at_sample(error, sample) from None
        except TypeError as error:
            key = _TOPK_LOGPROBS if kind == "heads" else _IDS
            raise RecordError(
                str(error), sample=sample, field=key, remedy="Ship ids as integers, log-probs in float32."
            ) from None
    whole = CandidateSet.concat(sets) if sets else CandidateSet.empty(0)
    live = held.flat(layout)
    chosen = trained[live]
    return spread(whole.select(live[chosen]), chosen.nonzero().squeeze(1), len(held))


def spread(candidates: CandidateSet, rows: Tensor, size: int) -> CandidateSet:
    """Put the set's rows at the ascending ``rows`` of ``size`` rows; all others are empty heads."""
    counts = torch.zeros(size, dtype=torch.int64, device=rows.device)
    counts[rows] = candidates.offsets.diff()
    complete = torch.zeros(size, dtype=torch.bool, device=rows.device)
    complete[rows] = candidates.complete
    offsets = torch.zeros(size + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return CandidateSet(candidates.ids, candidates.logprobs, offsets, complete)


def _heads(batch: Batch, layout: Layout, sample: int) -> CandidateSet:
    ids, logprobs = (_array(batch, layout, key, sample) for key in (_TOPK_IDS, _TOPK_LOGPROBS))
    _check_table(ids, logprobs, layout.responses[sample])
    return CandidateSet.from_topk(ids, logprobs)


def _support(batch: Batch, layout: Layout, sample: int, trained: Tensor, centered: bool) -> CandidateSet:
    ids, offsets = (_array(batch, layout, key, sample) for key in (_IDS, _OFFSETS))
    offsets = offsets.to(torch.int64)
    _check_offsets(ids, offsets, layout.responses[sample])
    counts = offsets.diff()
    if bool((trained & (counts == 0)).any()):
        token = int((trained & (counts == 0)).nonzero()[0, 0])
        raise RecordError(
            "a trained token has an empty support",
            token=token,
            field=_OFFSETS,
            remedy="Mask it, or record it.",
        )
    if not centered:
        return CandidateSet.from_support(ids, offsets)
    if batch.get(_MASK_LOGPROBS) is not None:
        logprobs = _array(batch, layout, _MASK_LOGPROBS, sample)
        check_row_lengths(
            _MASK_LOGPROBS, [logprobs], [ids.numel()], "One log-prob for every id of the supports."
        )
        return CandidateSet.from_support(ids, offsets, logprobs)
    if batch.get(_TOPK_LOGPROBS) is None:
        raise missing(
            _MASK_LOGPROBS, "and a centered loss needs a log-prob for every id of the support", sample
        )
    logprobs = _array(batch, layout, _TOPK_LOGPROBS, sample)
    if batch.get(_TOPK_IDS) is not None:
        return _joined(ids, offsets, _array(batch, layout, _TOPK_IDS, sample), logprobs, trained)
    lengths = _array(batch, layout, _LENGTHS, sample).to(torch.int64)
    check_row_lengths(_LENGTHS, [lengths], [counts.numel()], "One length for every response token.")
    _check_table(logprobs, logprobs, counts.numel())
    _check_cover(lengths, counts, trained, _LENGTHS)
    lengths = torch.where(trained, counts, 0)
    values = torch.zeros(ids.numel(), dtype=logprobs.dtype)
    values[trained.repeat_interleave(counts)] = logprobs[torch.arange(logprobs.shape[1]) < lengths[:, None]]
    return CandidateSet.from_support(ids, offsets, values)


def _joined(ids: Tensor, offsets: Tensor, table: Tensor, logprobs: Tensor, trained: Tensor) -> CandidateSet:
    """Log-probs of the support's ids out of dense rows that carry their own ids, in any order."""
    counts = offsets.diff()
    _check_table(table, logprobs, counts.numel())
    used = (table >= 0) & trained[:, None]
    _check_cover(used.sum(1), counts, trained, _TOPK_IDS)
    owner = torch.arange(counts.numel())
    wanted_rows = owner.repeat_interleave(counts)
    live = trained[wanted_rows]
    wanted = wanted_rows[live] * _WIDE + ids[live].long()
    found = owner[:, None].expand_as(table)[used] * _WIDE + table[used].long()
    wanted_order, found_order = wanted.argsort(), found.argsort()
    differ = wanted[wanted_order] != found[found_order]
    if bool(differ.any()):
        key = int(torch.minimum(wanted[wanted_order], found[found_order])[differ][0])
        remedy = f"Ask SGLang for sampling_logprobs_mode='support', or ship {_MASK_LOGPROBS}."
        raise RecordError(
            "top-k rows do not cover the support", token=key // _WIDE, field=_TOPK_IDS, remedy=remedy
        )
    values = torch.zeros(ids.numel(), dtype=logprobs.dtype)
    position = live.nonzero().squeeze(1)
    values[position[wanted_order]] = logprobs[used][found_order]
    return CandidateSet.from_support(ids, offsets, values)


def _check_cover(lengths: Tensor, counts: Tensor, trained: Tensor, key: str) -> None:
    short = trained & (lengths != counts)
    if bool(short.any()):
        token = int(short.nonzero()[0, 0])
        problem = f"{int(lengths[token])} log-probs for a support of {int(counts[token])} ids"
        remedy = f"Raise --rollout-top-logprobs-num to the largest support, or ship {_MASK_LOGPROBS}."
        raise RecordError(problem, token=token, field=key, value=int(lengths[token]), remedy=remedy)


def _check_table(ids: Tensor, logprobs: Tensor, response: int) -> None:
    if ids.dim() != 2 or ids.shape != logprobs.shape or ids.shape[0] != response:
        problem = (
            f"ids {tuple(ids.shape)} and log-probs {tuple(logprobs.shape)} for {response} response tokens"
        )
        remedy = (
            "Both are [response length, K]: a retry or a merged turn may have left rows of another response."
        )
        raise RecordError(problem, field=_TOPK_LOGPROBS, remedy=remedy)


def _check_offsets(ids: Tensor, offsets: Tensor, response: int) -> None:
    if offsets.numel() != response + 1:
        problem = f"{offsets.numel()} offsets for {response} response tokens"
        remedy = "One more than tokens: tool tokens have rows too, and a retry must clear the old record."
        raise RecordError(problem, field=_OFFSETS, value=offsets.numel(), remedy=remedy)
    if int(offsets[0]) != 0 or int(offsets[-1]) != ids.numel() or bool((offsets.diff() < 0).any()):
        problem = f"offsets do not run from 0 to the {ids.numel()} ids without falling"
        raise RecordError(
            problem, field=_OFFSETS, value=int(offsets[-1]), remedy="The record is damaged: sample again."
        )


def _array(batch: Batch, layout: Layout, key: str, sample: int) -> Tensor:
    """One sample's value as a CPU tensor; numpy arrays are not copied."""
    values = need_per_sample(batch, key, len(layout.responses), "and this correction needs candidates")
    value = values[sample]
    if not isinstance(value, Tensor):
        value = _as_tensor(value, key, sample)
    return value.detach().cpu()


def _as_tensor(value: Any, key: str, sample: int) -> Tensor:
    try:
        with warnings.catch_warnings():  # arrays out of Ray's store are read-only, and nothing here writes
            warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
            tensor: Tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = "Ship numpy arrays or tensors, int32 ids and float32 log-probs."
        raise RecordError(f"not an array ({error})", sample=sample, field=key, remedy=remedy) from None
    return tensor


def _at_sample(error: RecordError, sample: int) -> RecordError:
    return RecordError(
        error.problem,
        sample=sample,
        token=error.token,
        field=error.field,
        value=error.value,
        remedy=error.remedy,
    )
