"""vLLM's candidate rows: the sampled token, then the k most likely; duplicates, fillers and ranks made sense
of.

A head must be chosen by q alone. vLLM's rows begin with the sampled token whether or not it is among the k
most likely, so it stays in the head only where its rank says that it would be there anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offpolicy_corr.records.missing import SENTINEL, is_missing
from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.records.validation import COMPLETE_MASS_OFF_ONE

from ._answer import Rows, check_count
from ._arrays import DAMAGED, columns, fail, flatten, floats, integers, offsets_of, sequence

MASS_OF_ALL = 1e-5  # a row without filler whose mass is this close to 1 holds the whole support
UNRANKED = 1 << 40  # NaN's rank is 0 or null in the engine: it belongs to no head


@dataclass(frozen=True, eq=False)
class RawRows:
    """Rows as they came, CSR, each token's own entry first. ``ranks`` None where the shape carries none.

    ``cut``: the shape cuts each row to the request, so a row whose sampled token is no candidate lacks the
    k-th.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64] | None
    offsets: NDArray[np.int64]
    cut: bool = False

    @property
    def owner(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


def from_flat(value: Any, count: int) -> RawRows:
    """``FlatLogprobs``. A row repeats the sampled id where that is a candidate: one equal copy is dropped."""
    names = ("start_indices", "end_indices", "token_ids", "logprobs")
    parts = {name: getattr(value, name, None) for name in names}
    starts, ends, ids = (integers(parts[name], f"logprobs.{name}") for name in names[:3])
    check_count(len(starts), count, "logprobs.start_indices")
    logprobs = floats(parts["logprobs"], "logprobs.logprobs")
    ranks = _ranks(getattr(value, "ranks", None), "logprobs.ranks")
    offsets = np.append(starts, len(ids))
    contiguous = len(ends) == count and (offsets[1:] == ends).all() and (np.diff(offsets) >= 0).all()
    if not contiguous or offsets[0] != 0 or not len(ids) == len(logprobs) == len(ranks):
        problem = "start and end indices do not tile the flat lists"
        raise fail(problem, "logprobs.start_indices", None, DAMAGED)
    return _without_copies(RawRows(ids, logprobs, ranks, offsets))


def _without_copies(rows: RawRows) -> RawRows:
    _require_rows(rows.offsets, "logprobs")
    first = rows.offsets[:-1]
    owner = rows.owner
    copy = rows.ids == rows.ids[first][owner]
    copy[first] = False
    unequal = copy & (rows.logprobs != rows.logprobs[first][owner]) & ~np.isnan(rows.logprobs)
    if unequal.any():
        position = int(unequal.argmax())
        remedy = "Only an exact repetition of the sampled entry may be dropped."
        value = float(rows.logprobs[position])
        raise fail(
            "the sampled id stands twice with different values",
            "logprobs",
            value,
            remedy,
            int(owner[position]),
        )
    keep = np.ones(len(rows.ids), dtype=np.bool_)
    keep[first] = np.bincount(owner[copy], minlength=len(first)) == 0
    # the sampled entry goes where the copy is: its own rank counts ties, the copy's is its place in the row
    counts = np.bincount(owner[keep], minlength=len(first))
    assert rows.ranks is not None
    return RawRows(rows.ids[keep], rows.logprobs[keep], rows.ranks[keep], offsets_of(counts))


def from_dicts(value: Any, count: int) -> RawRows:
    """``list[dict[int, Logprob]]``."""
    rows = sequence(value, "logprobs")
    check_count(len(rows), count, "logprobs")
    kinds = set(map(type, rows))
    if not kinds <= {dict}:
        position = next(i for i, row in enumerate(rows) if type(row) is not dict)
        raise fail(
            "a row is no dict", "logprobs", rows[position], "Sample again: the engine lost a row.", position
        )
    counts = np.fromiter(map(len, rows), np.int64, count)
    ids = integers(list(chain.from_iterable(rows)), "logprobs")
    entries = list(chain.from_iterable(map(dict.values, rows)))
    logprobs, ranks = columns(entries, "logprobs", [attrgetter("logprob"), attrgetter("rank")])
    return RawRows(ids, floats(logprobs, "logprobs"), _ranks(ranks, "logprobs"), offsets_of(counts))


def _ranks(value: Any, field: str) -> NDArray[np.int64]:
    ranks = sequence(value, field)
    if type(None) in set(map(type, ranks)):
        ranks = [UNRANKED if rank is None else rank for rank in ranks]
    return integers(ranks, field)


def from_entries(
    rows: Sequence[Any],
    ids: Sequence[Any],
    logprobs: Sequence[Any],
    ranks: Sequence[Any] | None,
    cut: bool,
    field: str,
) -> RawRows:
    """Rows of JSON entries whose columns were already taken out."""
    _, counts, absent = flatten(rows, field)
    offsets = offsets_of(np.where(absent, 0, counts))
    ranked = None if ranks is None else _ranks(list(ranks), field)
    return RawRows(integers(list(ids), field), floats(list(logprobs), field), ranked, offsets, cut)


def candidates(
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
    return _heads(rows, tokens, missing, requested)


def _complete_sets(rows: RawRows, spec: SamplerSpec, missing: NDArray[np.bool_]) -> Rows | None:
    count = len(rows.offsets) - 1
    if len(rows.ids) <= count and spec.limit != 1:
        return None  # the sampled tokens' own values alone: even an exact 0.0 is no witness of a support
    owner, filler = rows.owner, rows.logprobs <= SENTINEL
    has_filler = np.bincount(owner[filler], minlength=count) > 0
    with np.errstate(over="ignore"):
        probability = np.where(filler, 0.0, np.exp(np.minimum(rows.logprobs, 1.0).astype(np.float64)))
    mass = np.bincount(owner, weights=np.nan_to_num(probability), minlength=count)
    wide = spec.limit is not None and np.diff(rows.offsets) >= spec.limit
    off = np.abs(mass - 1.0)
    complete = has_filler | (off <= np.where(wide, COMPLETE_MASS_OFF_ONE, MASS_OF_ALL))
    complete |= np.bincount(owner[np.isnan(rows.logprobs)], minlength=count) > 0  # missing values, told later
    partial = ~complete & ~missing
    if partial.any():
        position = int(partial.argmax())
        remedy = (
            "Ask for logprobs >= top_k (with --max-logprobs -1) in processed_logprobs mode: rows then "
            "hold the whole support. A raw-mode server also looks like this."
        )
        problem = (
            "the row holds only a part of the support, or its values are from before temperature and filters"
        )
        raise fail(problem, "logprobs", float(mass[position]), remedy, position)
    return Rows(_narrow(rows.ids), rows.logprobs, rows.offsets, complete)


def _heads(
    rows: RawRows, tokens: NDArray[np.int64], missing: NDArray[np.bool_], requested: int | None
) -> Rows | None:
    counts = np.diff(rows.offsets)
    ranks = _implied_ranks(rows) if rows.ranks is None else rows.ranks
    has_own = np.zeros(len(counts), dtype=np.bool_)
    has_own[counts > 0] = (rows.ids == tokens[rows.owner])[rows.offsets[:-1][counts > 0]]
    size = _head_size(rows, counts, ranks, ~missing & (counts > 0), has_own, requested)
    if size == 0:
        return None
    keep = ranks <= size
    held = np.bincount(rows.owner[keep], minlength=len(counts))
    short = (held != size) & ~missing
    if short.any():
        position = int(short.argmax())
        remedy = f"Every row should hold the {size} most likely: the response is damaged."
        raise fail("rows of different length", "logprobs", int(held[position]), remedy, position)
    complete = np.zeros(len(counts), dtype=np.bool_)
    return Rows(_narrow(rows.ids[keep]), rows.logprobs[keep], offsets_of(held), complete)


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
    usable = given & has_own
    if not usable.any():
        if given.any():
            remedy = "vLLM's rows hold it beside the candidates: the response is damaged."
            raise fail("no row holds its own token", "logprobs", None, remedy, int(given.argmax()))
        return 0
    sizes, own = counts[usable], ranks[rows.offsets[:-1][usable]]
    if rows.ranks is None and rows.cut:
        odd = usable & (counts != sizes.max())
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
        position = int(np.flatnonzero(usable)[sizes.argmin()])
        remedy = "Every row should hold as many of the most likely: the response is damaged."
        raise fail("rows of different length", "logprobs", int(counts[position]), remedy, position)
    return least


def _implied_ranks(rows: RawRows) -> NDArray[np.int64]:
    """Places by value within each row; equals in the row's order, the sampled token after them."""
    owner = rows.owner
    last = np.zeros(len(rows.ids), dtype=np.bool_)
    last[rows.offsets[:-1][np.diff(rows.offsets) > 0]] = True
    order = np.lexsort((last, -rows.logprobs.astype(np.float64), owner))
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order)) - rows.offsets[:-1][owner] + 1
    return ranks


def join_mask(mask: Any, rows: RawRows | None, tokens: NDArray[np.int64]) -> Rows:
    """``sampling_mask`` (nested ids, or CSR) with the rows' log-probs joined by id; or ids alone."""
    ids, offsets = _mask_ids(mask, len(tokens))
    complete = np.ones(len(tokens), dtype=np.bool_)
    if rows is None or len(rows.ids) <= len(tokens) < len(ids):
        return Rows(_narrow(ids), None, offsets, complete)
    owner = np.repeat(np.arange(len(tokens)), np.diff(offsets))
    real = rows.logprobs > SENTINEL
    keys, values = _keys(rows.owner[real], rows.ids[real]), rows.logprobs[real]
    order = np.argsort(keys)
    wanted = _keys(owner, ids)
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
            int(owner[position]),
        )
    extra = ~np.isin(keys, wanted)
    if extra.any():
        position = int(extra.argmax())
        remedy = "Mask and log-probs describe different steps, or the log-probs are raw."
        token = int(rows.owner[real][position])
        raise fail(
            "a candidate outside the mask has a log-prob", "logprobs", float(values[position]), remedy, token
        )
    return Rows(_narrow(ids), values[order][at], offsets, complete)


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
        if offsets[0] != 0 or offsets[-1] != len(flat) or (np.diff(offsets) < 0).any():
            remedy = "They start at 0, never fall, and end at the number of ids."
            raise fail("offsets are not CSR", field + ".offsets", int(offsets[-1]), remedy)
    empty = np.diff(offsets) == 0
    if empty.any():
        raise fail(
            "an empty support", field, None, "Every token was drawn from something.", int(empty.argmax())
        )
    return flat, offsets


def _keys(owner: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return (owner << 33) + np.clip(ids, -(2**31), 2**31)


def sampled_values(rows: RawRows, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Each token's own value, looked up by id; NaN where its row has none."""
    values = np.full(len(tokens), np.nan, dtype=np.float32)
    owner = rows.owner
    at = rows.ids == tokens[owner]
    values[owner[at]] = rows.logprobs[at]
    values[is_missing(values)] = np.nan
    return values


def sampled_first(rows: RawRows, tokens: NDArray[np.int64]) -> RawRows:
    """The same rows with each token's own entry in front. Rows without it stay as they are."""
    owner = rows.owner
    own = rows.ids == tokens[owner]
    order = np.lexsort((np.arange(len(owner)), ~own, owner))
    ranks = None if rows.ranks is None else rows.ranks[order]
    return replace(rows, ids=rows.ids[order], logprobs=rows.logprobs[order], ranks=ranks)


def _require_rows(offsets: NDArray[np.int64], field: str) -> None:
    empty = np.diff(offsets) == 0
    if empty.any():
        raise fail("an empty row", field, None, "Sample again: the engine lost a row.", int(empty.argmax()))


def _narrow(ids: NDArray[np.int64]) -> NDArray[np.int32]:
    wide = (ids < -(2**31)) | (ids >= 2**31)
    if wide.any():
        raise fail("id beyond 32 bits", "logprobs", int(ids[wide.argmax()]), DAMAGED)
    return ids.astype(np.int32)
