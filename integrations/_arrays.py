"""Reader: parsed JSON and Python objects as numpy arrays. A wrong type is an error, never a conversion.

The loops over candidates run in C (``map``, ``chain``, numpy): nothing here iterates in Python per candidate.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offpolicy_corr.csr import offsets_from_counts
from offpolicy_corr.records.errors import RecordError

Array = NDArray[Any]
INTEGERS = {"int32": "<i4", "int64": "<i8"}
FLOATS = {"float32": "<f4", "float64": "<f8"}
DAMAGED = "The response is damaged or of another shape."
_LIST_TYPES = {list, tuple}


def fail(
    problem: str, field: str, value: Any = None, remedy: str | None = None, token: int | None = None
) -> RecordError:
    """The error to raise, its value cut short: a response can be gigabytes."""
    shown = value if isinstance(value, (int, float, type(None))) else repr(value)[:80]
    return RecordError(problem, field=field, value=shown, remedy=remedy, token=token)


def sequence(value: Any, field: str) -> Sequence[Any]:
    """``value`` as a list or tuple."""
    if isinstance(value, (list, tuple)):
        return value
    raise fail(f"expected a list, got {type(value).__name__}", field, value, DAMAGED)


def mapping(value: Any, field: str) -> dict[str, Any]:
    """``value`` as a dict."""
    if isinstance(value, dict):
        return value
    raise fail(f"expected an object, got {type(value).__name__}", field, value, DAMAGED)


def integers(value: Any, field: str) -> NDArray[np.int64]:
    """Ids or counts: a list of int, or an integer array. A bool, a float, a string or None is an error."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        return value.astype(np.int64)
    value = list(value) if hasattr(value, "typecode") else sequence(value, field)
    _only(value, {int}, "integer", field)
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        raise fail("integer beyond 64 bits", field, None, "Token ids fit in 32 bits.") from None


def floats(value: Any, field: str) -> NDArray[np.float32]:
    """Log-probs: a list of numbers, None (JSON null) becoming NaN. Float32, which is what engines compute."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind == "f":
        return value.astype(np.float32)
    value = sequence(value, field)
    _only(value, {float, int, type(None)}, "number", field)
    try:
        with np.errstate(over="ignore"):
            return np.array(value, dtype=np.float64).astype(np.float32)
    except OverflowError:
        raise fail("number beyond a float", field, None, "A log-prob is at most 0.") from None


def _only(values: Sequence[Any], allowed: set[type], what: str, field: str) -> None:
    found = set(map(type, values))
    if found <= allowed:
        return
    position = next(i for i, value in enumerate(values) if type(value) not in allowed)
    problem = f"expected an {what}" if what == "integer" else f"expected a {what}"
    raise fail(problem, field, values[position], DAMAGED, position)


def flatten(rows: Any, field: str) -> tuple[list[Any], NDArray[np.int64], NDArray[np.bool_]]:
    """Rows, each a list or None, end to end: the items, each row's length, and which rows were None."""
    rows = sequence(rows, field)
    kinds = set(map(type, rows))
    if not kinds <= _LIST_TYPES | {type(None)}:
        position = next(i for i, row in enumerate(rows) if type(row) not in _LIST_TYPES and row is not None)
        raise fail("expected a list in every row", field, rows[position], DAMAGED, position)
    absent = np.zeros(len(rows), dtype=np.bool_)
    if type(None) in kinds:
        absent = np.fromiter((row is None for row in rows), np.bool_, len(rows))
        rows = [() if row is None else row for row in rows]
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    return list(chain.from_iterable(rows)), counts, absent


def columns(entries: Sequence[Any], field: str, getters: Sequence[Callable[[Any], Any]]) -> list[list[Any]]:
    """Several fields of every entry, as one list each."""
    try:
        return [list(map(getter, entries)) for getter in getters]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise fail(f"an entry lacks a field ({error!r})", field, None, DAMAGED) from None


def tuples(entries: Sequence[Any], field: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """SGLang's ``[logprob, id, text]`` triples, or ``[logprob, id]`` pairs: the log-probs and the ids."""
    flat, counts, absent = flatten(entries, field)
    width = int(counts[0]) if len(counts) else 3
    if absent.any() or width not in (2, 3) or (counts != width).any():
        odd = absent | (counts != width) | (counts < 2) | (counts > 3)
        position = int(odd.argmax())
        problem = "expected [logprob, id, text] or [logprob, id]"
        raise fail(problem, field, entries[position], DAMAGED, position)
    return floats(flat[0::width], field), integers(flat[1::width], field)


def offsets_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """CSR offsets of rows with these lengths, int64 ``[T + 1]``."""
    offsets: NDArray[np.int64] = offsets_from_counts(torch.from_numpy(counts)).numpy()
    return offsets


def to_int32(ids: NDArray[np.int64], field: str) -> NDArray[np.int32]:
    """Token ids in 32 bits; anything wider is no token id."""
    wide = (ids < -(2**31)) | (ids >= 2**31)
    if wide.any():
        raise fail("id beyond 32 bits", field, int(ids[wide.argmax()]), DAMAGED)
    return ids.astype(np.int32)


def check_offsets(offsets: NDArray[np.int64], num_ids: int, field: str) -> None:
    """CSR offsets start at 0, never fall, and end at the number of ids."""
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if offsets[0] == 0 and offsets[-1] == num_ids and not len(falls):
        return
    first = int(falls[0]) if len(falls) else 0
    if len(falls) and offsets[first] - offsets[first + 1] > 2**31:  # a row would hold more ids than 2³¹
        remedy = "Sum lengths in int64: a sum beyond 2**31 - 1 came back as a negative number."
        raise fail("int32 offsets overflowed", field, int(offsets[first + 1]), remedy, first)
    remedy = "They start at 0, never fall, and end at the number of ids."
    raise fail("offsets are not CSR", field, int(offsets[-1]), remedy)


def from_base64(text: Any, dtype: Any, known: dict[str, str], field: str) -> Array:
    """A little-endian array sent as base64 with a dtype marker. Uses pybase64 where it is installed."""
    if not isinstance(text, (str, bytes)):
        raise fail(f"expected base64 text, got {type(text).__name__}", field, text, DAMAGED)
    if not isinstance(dtype, str) or dtype not in known:
        remedy = f"Readable are {', '.join(known)}; half precision loses the mass of a head."
        raise fail("missing or unknown dtype marker", field + "_dtype", dtype, remedy)
    try:
        raw = _decode(text)
    except (binascii.Error, ValueError, UnicodeEncodeError) as error:
        raise fail(f"not base64 ({error})", field, text, "The response is damaged or truncated.") from None
    size = np.dtype(known[dtype]).itemsize
    if len(raw) % size:
        remedy = "The response is truncated, or the dtype marker is wrong."
        raise fail(f"{len(raw)} bytes are not a whole number of {dtype}", field, len(raw), remedy)
    return np.frombuffer(raw, dtype=known[dtype])


def _decode(text: str | bytes) -> bytearray:
    if len(text) % 4:  # the standard library would overlook padding behind a whole number of groups
        raise ValueError(f"{len(text)} characters are not a whole number of groups of four")
    try:
        import pybase64
    except ImportError:
        return bytearray(base64.b64decode(text, validate=True))
    return pybase64.b64decode_as_bytearray(text, validate=True)
