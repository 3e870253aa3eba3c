"""Reader: what vLLM's rows say of the distribution. Heads, complete sets, and sampling masks joined with log-probs.

A head must be chosen by q alone. vLLM's rows begin with the sampled token whether or not it is among the k
most likely, so it stays in the head only where its rank says that it would be there anyway. And a head must hold the
likeliest ids: rows of ``logprob_token_ids``, which the caller chose, look the same and are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from offpolicy_corr.records.missing import SENTINEL
from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.records.validation import COMPLETE_MASS_OFF_ONE, SAME_VALUE

from ._answer import Rows, check_count
from ._arrays import check_offsets, fail, flatten, integers, offsets_of, to_int32
from ._vllm_rows import UNRANKED, RawRows

MASS_OF_ALL = 1e-5  # a row without filler whose mass is this close to 1 holds the whole support
MASS_TOLERANCE = 1e-2  # of a head whose log-softmax ran in half precision
ROWS_FOR_THE_SAME = 8


def candidate_rows(
    rows: RawRows,
    tokens: NDArray[np.int64],
    spec: SamplerSpec,
    missing: NDArray[np.bool_],
    requested: int | None,
) -> Rows | None:
    """Heads or complete sets, as the spec and the rows say. None where only sampled values were asked for.

    Raises:
        RecordError: a filtered sampler's row that shows only a part of its support.
    """
    if spec.truncates or spec.logprobs == "support":
        return _complete_sets(rows, spec, missing)
    _check_likeliest(rows, tokens, spec, missing)
    return _heads(rows, tokens, missing, requested)


def _complete_sets(rows: RawRows, spec: SamplerSpec, missing: NDArray[np.bool_]) -> Rows | None:
    count = len(rows.offsets) - 1
    if len(rows.ids) <= count and spec.limit != 1:
        return None  # the sampled tokens' own values alone: even an exact 0.0 is no witness of a support
    row_index, filler = rows.row_index, rows.logprobs <= SENTINEL
    has_filler = np.bincount(row_index[filler], minlength=count) > 0
    with np.errstate(over="ignore"):
        probability = np.where(filler, 0.0, np.exp(np.minimum(rows.logprobs, 1.0).astype(np.float64)))
    mass = np.bincount(row_index, weights=np.nan_to_num(probability), minlength=count)
    wide = spec.limit is not None and np.diff(rows.offsets) >= spec.limit
    off = np.abs(mass - 1.0)
    complete = has_filler | (off <= np.where(wide, COMPLETE_MASS_OFF_ONE, MASS_OF_ALL))
    has_nan = np.bincount(row_index[np.isnan(rows.logprobs)], minlength=count) > 0
    complete |= has_nan  # find_missing names these
    incomplete = ~complete & ~missing
    if incomplete.any():
        position = int(incomplete.argmax())
        remedy = (
            "Ask for logprobs >= top_k (with --max-logprobs -1) in processed_logprobs mode: rows then "
            "hold the whole support. A raw-mode server also looks like this."
        )
        problem = (
            "the row holds only a part of the support, or its values are from before temperature and filters"
        )
        raise fail(problem, "logprobs", float(mass[position]), remedy, position)
    return Rows(to_int32(rows.ids, "logprobs"), rows.logprobs, rows.offsets, complete)


def _check_likeliest(
    rows: RawRows, tokens: NDArray[np.int64], spec: SamplerSpec, missing: NDArray[np.bool_]
) -> None:
    """Refuse rows whose ids are of the caller's choice (``logprob_token_ids``): they came in place of the likeliest.

    The engine numbers them as if they were sorted. What shows them: values that rise along a row, ranks that stand
    twice, a rest of the vocabulary too small for the mass outside the row at no more than the row's least value, or
    the same ids beside every token of an answer.
    """
    row_index, counts = rows.row_index, np.diff(rows.offsets)
    is_first = np.zeros(len(rows.ids), dtype=np.bool_)
    is_first[rows.offsets[:-1][counts > 0]] = True
    bad = _out_of_order(rows, row_index, is_first) | _leave_too_much(rows, row_index, is_first, spec)
    bad &= ~missing
    if not bad.any() and not missing.any() and len(np.unique(tokens)) > 1:
        bad |= _always_the_same(rows, counts, is_first)
    if bad.any():
        position = int(bad.argmax())
        remedy = (
            "logprob_token_ids gives ids of the caller's choice, and a head must hold the likeliest: ask for "
            "top_logprobs (or logprobs=k) instead."
        )
        raise fail("the candidates are not the likeliest ids", "logprobs", None, remedy, position)


def _out_of_order(
    rows: RawRows, row_index: NDArray[np.int64], is_first: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """bool [T]: rows whose values rise with the rank, or with the place where a list has no ranks."""
    bad = np.zeros(len(rows.offsets) - 1, dtype=np.bool_)
    if rows.ranks is None and not rows.cut:
        return bad  # the completions route sends objects, whose keys have no order
    others = np.flatnonzero(~is_first)
    if rows.ranks is not None:
        rank, row = rows.ranks[others], row_index[others]
        if ((np.diff(rank) < 0) & (np.diff(row) == 0)).any():  # as they come they are sorted
            others = others[np.lexsort((rank, row))]
        own_rank = np.zeros(len(bad), dtype=np.int64)
        own_rank[row_index[is_first]] = rows.ranks[is_first]
        rank, row = rows.ranks[others], row_index[others]
        ranked = (rank > 0) & (rank < UNRANKED)  # NaN has none
        bad[row[ranked & (rank == own_rank[row])]] = True
        bad[row[1:][(np.diff(rank) == 0) & (np.diff(row) == 0) & ranked[1:]]] = True
    values, row = rows.logprobs[others], row_index[others]
    bad[row[1:][(values[1:] > values[:-1] + SAME_VALUE[1]) & (np.diff(row) == 0)]] = True
    return bad


def _leave_too_much(
    rows: RawRows, row_index: NDArray[np.int64], is_first: NDArray[np.bool_], spec: SamplerSpec
) -> NDArray[np.bool_]:
    """bool [T]: rows outside which more mass is left than the other ids could hold at the row's least value each."""
    bad = np.zeros(len(rows.offsets) - 1, dtype=np.bool_)
    width = spec.logits_width or spec.vocab_size
    if width is None or is_first.all():
        return bad
    with np.errstate(over="ignore", invalid="ignore"):
        probability = np.exp(np.minimum(rows.logprobs, 1.0).astype(np.float64))
    mass = np.bincount(row_index, weights=probability, minlength=len(bad))
    least = np.full(len(bad), np.inf)
    begins = rows.offsets[:-1][np.diff(rows.offsets) > 0]
    least[np.diff(rows.offsets) > 0] = np.minimum.reduceat(np.where(is_first, np.inf, probability), begins)
    has_others = np.isfinite(least)
    others = width - np.diff(rows.offsets)[has_others]
    bad[has_others] = 1.0 - mass[has_others] - MASS_TOLERANCE > others * least[has_others]
    return bad


def _always_the_same(
    rows: RawRows, counts: NDArray[np.int64], is_first: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """bool [T]: every row, if the same few ids stand beside all tokens of an answer; else none."""
    bad = np.zeros(len(counts), dtype=np.bool_)
    if len(counts) < ROWS_FOR_THE_SAME or counts[0] < 2 or (counts != counts[0]).any():
        return bad
    ids = rows.ids[~is_first].reshape(len(counts), -1)
    if set(ids[0].tolist()) != set(ids[1].tolist()):
        return bad
    ids = np.sort(ids, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        mass = np.exp(np.minimum(rows.logprobs, 1.0).astype(np.float64)).reshape(len(counts), -1).sum(1)
    bad[:] = (ids == ids[0]).all() and (mass < 1.0 - MASS_TOLERANCE).any()
    return bad


def _heads(
    rows: RawRows, tokens: NDArray[np.int64], missing: NDArray[np.bool_], requested: int | None
) -> Rows | None:
    counts = np.diff(rows.offsets)
    ranks = _implied_ranks(rows) if rows.ranks is None else rows.ranks
    has_own = np.zeros(len(counts), dtype=np.bool_)
    has_own[counts > 0] = (rows.ids == tokens[rows.row_index])[rows.offsets[:-1][counts > 0]]
    size = _head_size(rows, counts, ranks, ~missing & (counts > 0), has_own, requested)
    if size == 0:
        return None
    keep = ranks <= size
    kept = np.bincount(rows.row_index[keep], minlength=len(counts))
    short = (kept != size) & ~missing
    if short.any():
        position = int(short.argmax())
        remedy = (
            f"Every row should hold the {size} most likely (not logprob_token_ids): the response is damaged."
        )
        is_empty = counts[position] == 0
        problem = "top_logprobs is null or empty in one row alone" if is_empty else "rows of different length"
        raise fail(problem, "logprobs", int(kept[position]), remedy, position)
    complete = np.zeros(len(counts), dtype=np.bool_)
    return Rows(to_int32(rows.ids[keep], "logprobs"), rows.logprobs[keep], offsets_of(kept), complete)


def _head_size(
    rows: RawRows,
    counts: NDArray[np.int64],
    ranks: NDArray[np.int64],
    given: NDArray[np.bool_],
    has_own: NDArray[np.bool_],
    requested: int | None,
) -> int:
    """How many of the most likely candidates every row holds.

    A row of n entries whose own token ranks below n holds 1…n; one that ranks above n holds 1…n−1 and its
    token. At rank n the row does not say which, and the others decide; where they cannot, the smaller is
    safe. Rows cut to the request all have n entries, and hold 1…n or 1…n−1.
    """
    if requested is not None and requested >= 0:  # −1 asks for all there are
        return requested - 1 if rows.cut else requested
    judged = given & has_own
    if not judged.any():
        if given.any():
            remedy = "vLLM's rows hold it beside the candidates: the response is damaged."
            raise fail("no row holds its own token", "logprobs", None, remedy, int(given.argmax()))
        return 0
    sizes, own = counts[judged], ranks[rows.offsets[:-1][judged]]
    if rows.ranks is None and rows.cut:
        odd = judged & (counts != sizes.max())
        if odd.any():
            position = int(odd.argmax())
            remedy = "This shape cuts every row to the request: the response is damaged."
            raise fail("rows of different length", "logprobs", int(counts[position]), remedy, position)
        return int(sizes.min()) - 1
    decided = own != sizes
    if rows.ranks is None:
        decided &= own < sizes
    implied = np.where(own < sizes, sizes, sizes - 1)
    least = int(implied[decided].min()) if decided.any() else int(sizes.min()) - 1
    agree = not decided.any() or least == implied[decided].max() or sizes.min() == sizes.max()
    if not agree or sizes.max() - sizes.min() > 1:
        position = int(np.flatnonzero(judged)[sizes.argmin()])
        remedy = "Every row should hold as many of the most likely: the response is damaged."
        raise fail("rows of different length", "logprobs", int(counts[position]), remedy, position)
    return least


def _implied_ranks(rows: RawRows) -> NDArray[np.int64]:
    """Places by value within each row; equals in the row's order, the sampled token after them."""
    row_index = rows.row_index
    last = np.zeros(len(rows.ids), dtype=np.bool_)
    last[rows.offsets[:-1][np.diff(rows.offsets) > 0]] = True
    order = np.lexsort((last, -rows.logprobs.astype(np.float64), row_index))
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order)) - rows.offsets[:-1][row_index] + 1
    return ranks


def join_mask(mask: Any, rows: RawRows | None, tokens: NDArray[np.int64]) -> Rows:
    """``sampling_mask`` (nested ids, or CSR) with the rows' log-probs joined by id; or ids alone."""
    ids, offsets = _mask_ids(mask, len(tokens))
    complete = np.ones(len(tokens), dtype=np.bool_)
    if rows is None or len(rows.ids) <= len(tokens) < len(ids):
        return Rows(to_int32(ids, "logprobs"), None, offsets, complete)
    row_index = np.repeat(np.arange(len(tokens)), np.diff(offsets))
    real = rows.logprobs > SENTINEL
    keys, values = _keys(rows.row_index[real], rows.ids[real]), rows.logprobs[real]
    order = np.argsort(keys)
    wanted = _keys(row_index, ids)
    at = np.minimum(np.searchsorted(keys[order], wanted), max(len(keys) - 1, 0))
    lacking = keys[order][at] != wanted if len(keys) else np.ones(len(wanted), dtype=np.bool_)
    if lacking.any():
        position = int(lacking.argmax())
        remedy = "Ask for logprobs >= top_k, so that every id of the mask has its log-prob."
        raise fail(
            "an id of the mask has no log-prob",
            "sampling_mask",
            int(ids[position]),
            remedy,
            int(row_index[position]),
        )
    extra = ~np.isin(keys, wanted)
    if extra.any():
        position = int(extra.argmax())
        remedy = "Mask and log-probs describe different steps, or the log-probs are raw."
        token = int(rows.row_index[real][position])
        raise fail(
            "a candidate outside the mask has a log-prob", "logprobs", float(values[position]), remedy, token
        )
    return Rows(to_int32(ids, "logprobs"), values[order][at], offsets, complete)


def _mask_ids(mask: Any, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    field = "sampling_mask"
    offsets = getattr(mask, "offsets", None)
    ids = getattr(mask, "token_ids", mask)
    if offsets is None:
        items, counts, absent = flatten(ids, field)
        check_count(len(counts), count, field)
        flat, offsets = integers(items, field), offsets_of(np.where(absent, 0, counts))
    else:
        flat, offsets = integers(ids, field), integers(offsets, field + ".offsets")
        check_count(len(offsets) - 1, count, field + ".offsets")
        check_offsets(offsets, len(flat), field + ".offsets")
    empty = np.diff(offsets) == 0
    if empty.any():
        raise fail(
            "an empty support", field, None, "Every token was drawn from something.", int(empty.argmax())
        )
    return flat, offsets


def _keys(row_index: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return (row_index << 33) + np.clip(ids, -(2**31), 2**31)
