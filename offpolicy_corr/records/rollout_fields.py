"""Records: the field names that RL frameworks already carry from rollout to trainer.

``rollout_log_probs`` ``[T]``; heads as ``rollout_topk_token_ids`` and ``rollout_topk_log_probs`` ``[T, k]``
(vime); supports in CSR as ``rollout_top_p_token_ids``, ``rollout_top_p_token_offsets`` and, with values,
``rollout_top_p_log_probs`` (slime, vime), or as ``rollout_sampling_mask_ids`` and
``rollout_sampling_mask_offsets``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..csr import offsets_from_counts
from .candidates import CandidateSet
from .errors import RecordError
from .record import SamplerRecord
from .validation import as_mask

LOG_PROBS = "rollout_log_probs"
TOPK = ("rollout_topk_token_ids", "rollout_topk_log_probs")
TOP_P = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_top_p_log_probs")
MASK = ("rollout_sampling_mask_ids", "rollout_sampling_mask_offsets")


def from_fields(
    tokens: Any,
    fields: Mapping[str, Any],
    *,
    loss_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
) -> SamplerRecord:
    """A validated record of one response or one packed row.

    Args:
        tokens: response ids, integer ``[T]``: list, array or tensor.
        fields: a sample's or batch's fields; names outside this module's are ignored.
        loss_mask: tool and template tokens are 0; their rows may hold anything, or nothing.

    Raises:
        RecordError: wrong lengths or types, both a head and a support, and all that validation finds.
    """
    ids = _tensor(tokens, "tokens", floating=False, rank=1)
    logprobs = None
    if fields.get(LOG_PROBS) is not None:
        logprobs = _tensor(fields[LOG_PROBS], LOG_PROBS, floating=True, rank=1)
        if len(logprobs) != len(ids):
            remedy = "One value per response token, tool tokens included; neither end may be cut off."
            problem = f"{len(logprobs)} log-probs for {len(ids)} tokens"
            raise RecordError(problem, field=LOG_PROBS, value=len(logprobs), remedy=remedy)
    present = [names for names in (TOPK, TOP_P, MASK) if any(fields.get(name) is not None for name in names)]
    if len(present) > 1:
        remedy = "Pass the one that describes what was sampled from."
        raise RecordError("two kinds of candidates", field=present[1][0], remedy=remedy)
    candidates = None
    if present:
        candidates = _head(fields, len(ids)) if present[0] is TOPK else _support(fields, present[0], len(ids))
    record = SamplerRecord(ids, logprobs, candidates, temperature)
    return record.validate(vocab_size, loss_mask, sequence_ids)


def to_fields(
    record: SamplerRecord, loss_mask: Tensor | None = None, support: str = "top_p"
) -> dict[str, Any]:
    """The same fields as numpy arrays: ids int32, log-probs float32, offsets int64.

    Tokens that are not trained get log-prob 0, an empty support, or a dummy head (ids 0…k−1 at −log k), as
    the frameworks expect there.

    Args:
        record: candidates all heads of one size, or all complete; or none.
        loss_mask: bool or {0, 1} ``[T]``.
        support: ``"top_p"`` or ``"sampling_mask"``, the naming of complete sets. The latter has no log-probs.

    Raises:
        RecordError: heads of different size, or heads and complete sets mixed: these fields cannot hold them.
    """
    if support not in ("top_p", "sampling_mask"):
        raise ValueError(f"support must be 'top_p' or 'sampling_mask', got {support!r}")
    record = record.to("cpu")
    trained = as_mask(None if loss_mask is None else loss_mask.cpu(), record.tokens)
    trained = torch.ones_like(record.tokens, dtype=torch.bool) if trained is None else trained
    fields: dict[str, Any] = {}
    if record.logprobs is not None:
        fields[LOG_PROBS] = record.logprobs.masked_fill(~trained, 0.0).float().numpy()
    candidates = record.candidates
    if candidates is None:
        return fields
    # where nothing is trained, all rows say which fields are meant
    complete = candidates.complete[trained] if bool(trained.any()) else candidates.complete.any()
    if not bool(complete.any()):
        return fields | _head_fields(candidates, trained)
    if not bool(complete.all()):
        remedy = "Keep such a record as it is, or save it with save_records."
        raise RecordError("heads and complete sets in one record", field="candidates.complete", remedy=remedy)
    counts = candidates.offsets.diff().masked_fill(~trained, 0)
    offsets = offsets_from_counts(counts)
    kept = trained[candidates.rows]
    names = TOP_P if support == "top_p" else MASK
    fields |= {names[0]: candidates.ids[kept].int().numpy(), names[1]: offsets.numpy()}
    if candidates.logprobs is not None and support == "top_p":
        fields[TOP_P[2]] = candidates.logprobs[kept].float().numpy()
    return fields


def _head_fields(candidates: CandidateSet, trained: Tensor) -> dict[str, Any]:
    counts, rows = candidates.offsets.diff(), int(trained.sum())
    size = int((counts[trained] if rows else counts).max()) if len(counts) else 0
    if rows and int(counts[trained].min()) != size:
        remedy = "These fields are rectangular: send trimmed heads as CSR, or save them with save_records."
        raise RecordError(
            "heads differ in size", field=TOPK[0], value=int(counts[trained].min()), remedy=remedy
        )
    ids = torch.arange(size, dtype=torch.int32).repeat(len(trained), 1)
    logprobs = torch.full((len(trained), size), -math.log(max(size, 1)), dtype=torch.float32)
    kept = trained[candidates.rows]
    ids[trained] = candidates.ids[kept].int().view(rows, size)
    assert candidates.logprobs is not None, "heads always carry log-probs"
    logprobs[trained] = candidates.logprobs[kept].float().view(rows, size)
    return {TOPK[0]: ids.numpy(), TOPK[1]: logprobs.numpy()}


def _head(fields: Mapping[str, Any], count: int) -> CandidateSet:
    ids = _tensor(fields.get(TOPK[0]), TOPK[0], floating=False, rank=2)
    logprobs = _tensor(fields.get(TOPK[1]), TOPK[1], floating=True, rank=2)
    if ids.shape != logprobs.shape or len(ids) != count:
        problem = f"ids {tuple(ids.shape)} and log-probs {tuple(logprobs.shape)} for {count} tokens"
        raise RecordError(problem, field=TOPK[1], remedy="Both are [T, k].")
    return CandidateSet.from_topk(ids, logprobs)


def _support(fields: Mapping[str, Any], names: tuple[str, ...], count: int) -> CandidateSet:
    ids = _tensor(fields.get(names[0]), names[0], floating=False, rank=1)
    offsets = _tensor(fields.get(names[1]), names[1], floating=False, rank=1).to(torch.int64)
    if len(offsets) != count + 1:
        remedy = "T + 1 offsets: a row that was not filtered may not be left out."
        problem = f"{len(offsets)} offsets for {count} tokens"
        raise RecordError(problem, field=names[1], value=len(offsets), remedy=remedy)
    logprobs = None
    if len(names) > 2 and fields.get(names[2]) is not None:
        logprobs = _tensor(fields[names[2]], names[2], floating=True, rank=1)
    return CandidateSet.from_support(ids, offsets, logprobs)


def _tensor(value: Any, field: str, floating: bool, rank: int) -> Tensor:
    if value is None:
        raise RecordError("field is missing", field=field, remedy="These fields come together.")
    try:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError) as error:
        raise RecordError(
            f"not an array ({str(error)[:60]})", field=field, remedy="Rows must be alike."
        ) from None
    if tensor.numel() == 0:
        shape = tensor.shape if tensor.dim() == rank else (0,) * rank
        tensor = tensor.reshape(shape).to(torch.float32 if floating else torch.int64)
    wanted = (torch.float32, torch.float64) if floating else (torch.int32, torch.int64)
    if tensor.dtype not in wanted or tensor.dim() != rank:
        problem = f"expected {' or '.join(str(w) for w in wanted)} of rank {rank}, got {tensor.dtype}"
        remedy = "Ship ids and offsets as integers: a conversion could change them."
        if floating:
            remedy = "Ship log-probs in float32: half precision loses the mass of a head."
        raise RecordError(problem, field=field, value=tuple(tensor.shape), remedy=remedy)
    return tensor
