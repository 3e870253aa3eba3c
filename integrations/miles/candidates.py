"""Adapter: candidates out of a batch of Miles: per-sample arrays over full responses, on the CPU, in three shapes.

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
from offpolicy_corr.integrations._common.errors import check_row_lengths
from offpolicy_corr.integrations._common.layout import ResponseTokens, RowLayout
from offpolicy_corr.integrations._common.ragged import heads_at, scatter_rows, supports_at
from torch import Tensor

from offpolicy_corr.records.candidates import CandidateSet
from offpolicy_corr.records.errors import RecordError, within_sample

from .host import Batch, missing, need_per_sample

_IDS, _OFFSETS, _MASK_LOGPROBS = (f"rollout_sampling_mask_{name}" for name in ("ids", "offsets", "log_probs"))
_TOPK_IDS, _TOPK_LOGPROBS, _LENGTHS = (
    "rollout_topk_token_ids",
    "rollout_topk_log_probs",
    "rollout_topk_lengths",
)
_ID_BITS = 32  # ids fit below


def read_candidates(
    batch: Batch, layout: RowLayout, tokens: ResponseTokens, full_mask: Tensor, kind: str, centered: bool
) -> CandidateSet | None:
    """Candidates of this rank's ``tokens``, CPU, rows in their order; rows of untrained tokens are empty.

    Args:
        full_mask: bool ``[sum of responses]``, trained tokens of full responses laid end to end, CPU.
        kind: ``"heads"``, ``"supports"`` or ``"none"``.
        centered: whether log-probs are needed.

    Raises:
        RecordError: a missing key, by its name; lengths that disagree; rows that do not cover their support.
    """
    if kind == "none":
        return None
    rows = full_mask[tokens.index(layout)].nonzero().squeeze(1)
    counts = torch.bincount(tokens.sample[rows], minlength=len(layout.totals)).tolist()
    sets = []
    for sample, index in enumerate(tokens.position[rows].split(counts)):
        with within_sample(sample):
            try:
                found = (
                    _heads(batch, layout, sample, index)
                    if kind == "heads"
                    else _support(batch, layout, sample, index, centered)
                )
            except TypeError as error:
                key = _TOPK_LOGPROBS if kind == "heads" else _IDS
                remedy = "Ship ids as integers, log-probs in float32."
                raise RecordError(str(error), field=key, remedy=remedy) from None
        sets.append(found)
    joined = CandidateSet.concat(sets) if sets else CandidateSet.empty(0)
    return scatter_rows(joined, rows, len(tokens))


def _heads(batch: Batch, layout: RowLayout, sample: int, index: Tensor) -> CandidateSet:
    ids, logprobs = (_array(batch, layout, key, sample) for key in (_TOPK_IDS, _TOPK_LOGPROBS))
    _check_table(ids, logprobs, layout.responses[sample])
    return heads_at(ids, logprobs, index)


def _support(batch: Batch, layout: RowLayout, sample: int, index: Tensor, centered: bool) -> CandidateSet:
    ids, offsets = (_array(batch, layout, key, sample) for key in (_IDS, _OFFSETS))
    offsets = offsets.to(torch.int64)
    _check_offsets(ids, offsets, layout.responses[sample])
    empty = offsets.diff()[index] == 0
    if bool(empty.any()):
        token = int(index[empty][0])
        problem, remedy = "a trained token has an empty support", "Mask it, or record it."
        raise RecordError(problem, token=token, field=_OFFSETS, remedy=remedy)
    if not centered:
        return supports_at(ids, offsets, None, index)
    if batch.get(_MASK_LOGPROBS) is not None:
        logprobs = _array(batch, layout, _MASK_LOGPROBS, sample)
        remedy = "One log-prob for every id of the supports."
        check_row_lengths(_MASK_LOGPROBS, [logprobs], [ids.numel()], remedy)
        return supports_at(ids, offsets, logprobs, index)
    if batch.get(_TOPK_LOGPROBS) is None:
        why = "and a centered loss needs a log-prob for every id of the support"
        raise missing(_MASK_LOGPROBS, why, sample)
    return _with_topk_logprobs(batch, layout, sample, index, supports_at(ids, offsets, None, index))


def _with_topk_logprobs(
    batch: Batch, layout: RowLayout, sample: int, index: Tensor, support: CandidateSet
) -> CandidateSet:
    """The supports of ``index`` with log-probs out of dense top-k rows, which must hold exactly their ids."""
    table = _array(batch, layout, _TOPK_LOGPROBS, sample)
    counts = support.offsets.diff()
    if batch.get(_TOPK_IDS) is not None:
        table_ids = _array(batch, layout, _TOPK_IDS, sample)
        _check_table(table_ids, table, layout.responses[sample])
        values = _joined(support, table_ids[index], table[index], index)
    else:
        lengths = _array(batch, layout, _LENGTHS, sample).to(torch.int64)
        check_row_lengths(
            _LENGTHS, [lengths], [layout.responses[sample]], "One length for every response token."
        )
        _check_table(table, table, layout.responses[sample])
        _check_cover(lengths[index], counts, index, _LENGTHS)
        values = table[index][torch.arange(table.shape[1]) < counts[:, None]]
    return CandidateSet(support.ids, values, support.offsets, support.complete)


def _joined(support: CandidateSet, table_ids: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Log-probs of the supports' ids out of dense rows that carry their own ids, in any order."""
    used = table_ids >= 0
    _check_cover(used.sum(1), support.offsets.diff(), index, _TOPK_IDS)
    rows = torch.arange(len(support))
    wanted = (support.rows << _ID_BITS) + support.ids.long()
    found = (rows[:, None].expand_as(table_ids)[used] << _ID_BITS) + table_ids[used].long()
    wanted_order, found_order = wanted.argsort(), found.argsort()
    differ = wanted[wanted_order] != found[found_order]
    if bool(differ.any()):
        key = int(torch.minimum(wanted[wanted_order], found[found_order])[differ][0])
        token = int(index[key >> _ID_BITS])
        remedy = f"Ask SGLang for sampling_logprobs_mode='support', or ship {_MASK_LOGPROBS}."
        raise RecordError("top-k rows do not cover the support", token=token, field=_TOPK_IDS, remedy=remedy)
    values = torch.empty(wanted.numel(), dtype=table.dtype)
    values[wanted_order] = table[used][found_order]
    return values


def _check_cover(lengths: Tensor, counts: Tensor, index: Tensor, key: str) -> None:
    short = lengths != counts
    if bool(short.any()):
        at = int(short.nonzero()[0, 0])
        problem = f"{int(lengths[at])} log-probs for a support of {int(counts[at])} ids"
        remedy = f"Raise --rollout-top-logprobs-num to the largest support, or ship {_MASK_LOGPROBS}."
        raise RecordError(problem, token=int(index[at]), field=key, value=int(lengths[at]), remedy=remedy)


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


def _array(batch: Batch, layout: RowLayout, key: str, sample: int) -> Tensor:
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
