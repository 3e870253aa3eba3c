"""Reader: vLLM's rows in one form: the sampled token, then the k most likely. Copies are dropped, ranks kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offpolicy_corr.records.missing import is_missing

from ._answer import check_count
from ._arrays import DAMAGED, columns, fail, flatten, floats, integers, offsets_of, sequence

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
    def row_index(self) -> NDArray[np.int64]:
        """The row of every entry, int64 ``[nnz]``."""
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
    row_index = rows.row_index
    copy = rows.ids == rows.ids[first][row_index]
    copy[first] = False
    unequal = copy & (rows.logprobs != rows.logprobs[first][row_index]) & ~np.isnan(rows.logprobs)
    if unequal.any():
        position = int(unequal.argmax())
        remedy = "Only an exact repetition of the sampled entry may be dropped."
        value = float(rows.logprobs[position])
        raise fail(
            "the sampled id stands twice with different values",
            "logprobs",
            value,
            remedy,
            int(row_index[position]),
        )
    keep = np.ones(len(rows.ids), dtype=np.bool_)
    keep[first] = np.bincount(row_index[copy], minlength=len(first)) == 0
    # the sampled entry goes where the copy is: its own rank counts ties, the copy's is its place in the row
    counts = np.bincount(row_index[keep], minlength=len(first))
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


def sampled_values(rows: RawRows, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Each token's own value, looked up by id; NaN where its row has none."""
    values = np.full(len(tokens), np.nan, dtype=np.float32)
    row_index = rows.row_index
    at = rows.ids == tokens[row_index]
    values[row_index[at]] = rows.logprobs[at]
    values[is_missing(values)] = np.nan
    return values


def sampled_first(rows: RawRows, tokens: NDArray[np.int64]) -> RawRows:
    """The same rows with each token's own entry in front. Rows without it stay as they are."""
    row_index = rows.row_index
    own = rows.ids == tokens[row_index]
    order = np.lexsort((np.arange(len(row_index)), ~own, row_index))
    ranks = None if rows.ranks is None else rows.ranks[order]
    return replace(rows, ids=rows.ids[order], logprobs=rows.logprobs[order], ranks=ranks)


def _require_rows(offsets: NDArray[np.int64], field: str) -> None:
    empty = np.diff(offsets) == 0
    if empty.any():
        raise fail("an empty row", field, None, "Sample again: the engine lost a row.", int(empty.argmax()))
