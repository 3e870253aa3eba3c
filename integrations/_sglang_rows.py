"""Reader: SGLang's candidate rows. Nested, flat, flat base64; sampling masks; slime's supports."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._answer import Rows, check_count
from ._arrays import (
    DAMAGED,
    FLOATS,
    INTEGERS,
    check_offsets,
    fail,
    flatten,
    floats,
    from_base64,
    integers,
    offsets_of,
    sequence,
    to_int32,
    tuples,
)

NESTED = "output_top_logprobs"
MASK = "output_token_sampling_mask"
ROWS_AT_ONCE = 2048  # nested rows turned into flat lists at a time, so that those lists stay small
Ids = NDArray[Any]
Offsets = NDArray[np.int64]


def nested_head(value: Any, count: int) -> Rows:
    """``[[[logprob, id, text], …] or null, …]``."""
    rows = sequence(value, NESTED)
    check_count(len(rows), count, NESTED)
    logprobs, ids, counts, absent = [], [], [], []
    for begin in range(0, count, ROWS_AT_ONCE):
        entries, lengths, is_null = flatten(rows[begin : begin + ROWS_AT_ONCE], NESTED)
        values, numbers = tuples(entries, NESTED)
        logprobs.append(values)
        ids.append(to_int32(numbers, NESTED))
        counts.append(lengths)
        absent.append(is_null | (lengths == 0))
    offsets = offsets_of(_joined(counts, np.int64))
    complete = np.zeros(count, dtype=np.bool_)
    return Rows(
        _joined(ids, np.int32), _joined(logprobs, np.float32), offsets, complete, _joined(absent, np.bool_)
    )


def flat_head(meta: dict[str, Any], count: int) -> Rows:
    """``…_val_flat`` and ``…_idx_flat``, as lists or base64, with ``…_shape`` and ``…_null_prefix``.

    Releases disagree on whether the shape's rows count the null prefix: both are read, and must fit the
    tokens.
    """
    shape = integers(meta.get(f"{NESTED}_shape"), f"{NESTED}_shape")
    prefix = meta.get(f"{NESTED}_null_prefix", 0)
    if len(shape) != 2 or (shape < 0).any():
        raise fail("the shape must be [rows, k]", f"{NESTED}_shape", shape.tolist(), DAMAGED)
    if type(prefix) is not int or not 0 <= prefix <= count:
        raise fail("null prefix outside the answer", f"{NESTED}_null_prefix", prefix, DAMAGED)
    rows, width = int(shape[0]), int(shape[1])
    check_count(rows if rows == count else rows + prefix, count, f"{NESTED}_shape")
    if count > prefix and width == 0:
        raise fail("rows without candidates", f"{NESTED}_shape", shape.tolist(), "Send top_logprobs_num > 0.")
    values = _flat(meta, "val", FLOATS)
    numbers = _flat(meta, "idx", INTEGERS)
    for name, array in (("val", values), ("idx", numbers)):
        if len(array) != (count - prefix) * width:
            problem = f"{len(array)} numbers for {count - prefix} rows of {width}"
            raise fail(problem, f"{NESTED}_{name}_flat", len(array), DAMAGED)
    counts = np.full(count, width, dtype=np.int64)
    counts[:prefix] = 0
    absent = counts == 0 if prefix else None
    if numbers.dtype != np.int32:
        numbers = to_int32(numbers, f"{NESTED}_idx_flat")
    values = values.astype(np.float32, copy=False)
    return Rows(numbers, values, offsets_of(counts), np.zeros(count, dtype=np.bool_), absent)


def _flat(meta: dict[str, Any], kind: str, dtypes: dict[str, str]) -> NDArray[Any]:
    plain, coded = f"{NESTED}_{kind}_flat", f"{NESTED}_{kind}_flat_b64"
    if coded in meta and plain in meta:
        raise fail("both flat and base64", coded, None, "Keep one form.")
    if coded in meta:
        return from_base64(meta[coded], meta.get(coded + "_dtype"), dtypes, coded)
    if plain in meta:
        return floats(meta[plain], plain) if kind == "val" else integers(meta[plain], plain)
    raise fail("half of the flat candidates is missing", plain, None, DAMAGED)


def sampling_mask(meta: dict[str, Any], count: int) -> tuple[Ids, Offsets]:
    """``[[ids], …]``: one row per token, none of them empty or null."""
    value = meta.get(MASK)
    if value is None:
        remedy = "Send return_sampling_mask=true."
        if "abort" in str(meta.get("finish_reason")):
            remedy = "A request that was aborted in the queue comes without it: sample again."
        raise fail("truncated sampling without support", MASK, None, remedy, 0)
    items, counts, absent = flatten(value, MASK)
    check_count(len(counts), count, MASK)
    empty = absent | (counts == 0)
    if empty.any():
        raise fail(
            "an empty support", MASK, None, "Every token was drawn from something.", int(empty.argmax())
        )
    return to_int32(integers(items, MASK), MASK), offsets_of(counts)


def support_logprobs(value: Any, offsets: Offsets, field: str) -> NDArray[np.float32]:
    """``[[logprobs], …]`` aligned with the mask."""
    if value is None:
        raise fail("no post-filter log-probs", field, None, "Send sampling_logprobs_mode='support'.")
    rows = sequence(value, field)
    if rows and isinstance(rows[0], (int, float)):
        remedy = "The server ran mode 'selected': ask for 'support', or declare logprobs='processed'."
        raise fail("one value per token where rows were declared", field, rows[0], remedy)
    items, counts, absent = flatten(rows, field)
    check_count(len(counts), len(offsets) - 1, field)
    differ = absent | (counts != np.diff(offsets))
    if differ.any():
        position = int(differ.argmax())
        remedy = "Mask and log-probs must have one length in every row."
        raise fail("row lengths disagree with the mask", field, int(counts[position]), remedy, position)
    return floats(items, field)


def slime_support(
    meta: dict[str, Any], tokens: NDArray[np.int64], force_keep: bool
) -> tuple[Ids, Offsets] | None:
    """``top_p_token_ids`` and ``top_p_token_offsets`` (or ``top_p_kept_…``), base64 of int32. None where
    absent.

    The patch recomputes the support, so the sampled token may be missing; ``force_keep`` adds it at the row's
    end.
    """
    prefix = "top_p_kept_token" if "top_p_kept_token_ids" in meta else "top_p_token"
    if f"{prefix}_ids" not in meta and f"{prefix}_offsets" not in meta:
        return None
    ids = from_base64(meta.get(f"{prefix}_ids"), "int32", INTEGERS, f"{prefix}_ids")
    offsets = from_base64(meta.get(f"{prefix}_offsets"), "int32", INTEGERS, f"{prefix}_offsets").astype(
        np.int64
    )
    if len(offsets) != len(tokens) + 1:
        problem = f"{len(offsets)} offsets for {len(tokens)} tokens, not T + 1"
        remedy = "Unfiltered rows append nothing in this patch: filter every request."
        raise fail(problem, f"{prefix}_offsets", len(offsets), remedy)
    check_offsets(offsets, len(ids), f"{prefix}_offsets")
    return _with_sampled(ids, offsets, tokens) if force_keep else (ids, offsets)


def _with_sampled(ids: Ids, offsets: Offsets, tokens: NDArray[np.int64]) -> tuple[Ids, Offsets]:
    counts = np.diff(offsets)
    row_index = np.repeat(np.arange(len(tokens)), counts)
    lacks = np.ones(len(tokens), dtype=np.bool_)
    lacks[row_index[ids == tokens[row_index]]] = False
    at = offsets[1:][lacks]
    return np.insert(ids, at, tokens[lacks].astype(ids.dtype)), offsets_of(counts + lacks)


def _joined(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
