"""Records: Arrow tables and Parquet files, one row per sample, for audit tools, SQL and notebooks."""

from __future__ import annotations

import json
import os
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..csr import offsets_from_counts
from .candidates import CandidateSet
from .errors import RecordError
from .record import SamplerRecord
from .sampler_spec import SamplerSpec, specs_from_plain, specs_to_plain
from .storage import write_atomically
from .trajectory import Batch, Trajectory

VERSION = 3  # 1: no specs; 2: the mask could be left out
_VERSION_KEY, _SPECS_KEY = b"offpolicy_corr.table", b"offpolicy_corr.specs"
_MISSING_KEY = b"offpolicy_corr.missing"
REMEDY = "Write the table again from its source."
_COLUMNS = {
    "logprobs", "temperature", "group", "weight_version", "loss_mask", "complete", "candidate_ids",
    "candidate_logprobs",
}  # fmt: skip


def to_arrow(data: SamplerRecord | Trajectory | Batch) -> Any:
    """A ``pyarrow.Table``, one row per sequence, in order of sequence id.

    Columns: ``sequence`` int64; lists over the sequence's tokens: ``tokens``, ``logprobs``, ``temperature``,
    ``group`` (names), ``weight_version`` (strings), ``loss_mask``; lists of lists: ``candidate_ids``,
    ``candidate_logprobs``; and ``complete``. Fields that the record lacks are left out. The schema's metadata
    holds the specs as JSON under ``offpolicy_corr.specs``, and `Batch.missing` under ``offpolicy_corr.missing``.

    Args:
        data: a batch, or a trajectory or record that becomes one (see `Batch.of`). Tokens of a sequence need not be
            contiguous; they keep their order.

    Raises:
        ImportError: pyarrow is missing (``pip install offpolicy-corr[records]``).
    """
    arrow, batch = _pyarrow(), Batch.of(data)
    record, sequence = batch.record.to("cpu"), batch.sequence_ids.cpu()
    order = sequence.argsort(stable=True)
    record = record.select(order)
    numbers, counts = torch.unique_consecutive(sequence[order], return_counts=True)
    rows = np.concatenate([[0], counts.numpy().cumsum()])
    columns: dict[str, Any] = {"tokens": record.tokens.numpy()}
    if record.logprobs is not None:
        columns["logprobs"] = record.logprobs.numpy()
    temperature = record.temperature
    columns["temperature"] = (
        temperature.numpy() if isinstance(temperature, Tensor) else np.full(len(record), temperature)
    )
    columns |= _named(arrow, "group", record.group, record.group_names)
    columns |= _named(arrow, "weight_version", record.weight_version, record.version_names or ())
    columns["loss_mask"] = batch.loss_mask.cpu()[order].numpy()
    if record.candidates is not None:
        columns |= _candidate_columns(arrow, record.candidates)
    lists = {name: _lists(arrow, rows, values) for name, values in columns.items()}
    table = arrow.table({"sequence": numbers.numpy(), **lists})
    specs = json.dumps(specs_to_plain(record.specs)).encode()
    metadata = {
        _VERSION_KEY: str(VERSION).encode(),
        _SPECS_KEY: specs,
        _MISSING_KEY: str(batch.missing).encode(),
    }
    return table.replace_schema_metadata(metadata)


def from_arrow(table: Any) -> Batch:
    """The batch of a table that `to_arrow` made, validated where its mask trains.

    Raises:
        RecordError: columns missing, lengths that disagree, two rows with one ``sequence``, or a record that
            does not validate.
    """
    metadata = table.schema.metadata or {}
    if metadata.get(_VERSION_KEY) != str(VERSION).encode():
        value = metadata.get(_VERSION_KEY)
        raise RecordError(
            "not a table of records, or of another version", field="schema", value=value, remedy=REMEDY
        )
    tokens, lengths = _values(table, "tokens")
    columns = {
        name: _values(table, name) for name in table.column_names if name not in ("sequence", "tokens")
    }
    unknown = sorted(set(columns) - _COLUMNS)
    if unknown:
        remedy = "Select the columns of to_arrow before reading: a damaged name must not lose a column."
        raise RecordError("unknown columns", field="schema", value=unknown, remedy=remedy)
    for name, (_, own) in columns.items():
        if not np.array_equal(own, lengths):
            raise RecordError("lists of different length in one row", field=name, remedy=REMEDY)
    for name in ("temperature", "loss_mask"):
        if name not in columns:
            raise RecordError("column is missing", field=name, remedy=REMEDY)
    numbers = _sequence_numbers(table)
    sequence_ids = numbers.repeat_interleave(torch.from_numpy(lengths))
    group, group_names = _indexed(columns, "group")
    version, version_names = _indexed(columns, "weight_version")
    ids = _tensor(tokens, "tokens", "i")
    record = SamplerRecord(
        ids,
        _tensor(columns["logprobs"][0], "logprobs", "f") if "logprobs" in columns else None,
        _candidates(columns, len(ids)),
        _temperature(_tensor(columns["temperature"][0], "temperature", "f")),
        group,
        group_names,
        version,
        version_names or None,
        _specs(metadata.get(_SPECS_KEY)),
    )
    loss_mask = _tensor(columns["loss_mask"][0], "loss_mask", "b")
    return Batch(record, loss_mask, sequence_ids, _missing(metadata)).validate()


def to_parquet(data: SamplerRecord | Trajectory | Batch, path: str | os.PathLike[str]) -> None:
    """`to_arrow`, written atomically with page checksums."""
    parquet = _parquet()
    table = to_arrow(data)
    write_atomically(path, lambda partial: parquet.write_table(table, partial, write_page_checksum=True))


def from_parquet(path: str | os.PathLike[str]) -> Batch:
    """`from_arrow` of a Parquet file.

    Raises:
        RecordError: also a truncated or corrupt file.
    """
    arrow, parquet = _pyarrow(), _parquet()
    try:
        # one open file: a path would be opened twice, and a folder's files joined under the first one's specs
        with arrow.OSFile(os.fspath(path)) as file:
            table = parquet.read_table(file, page_checksum_verification=True)
    except FileNotFoundError:
        raise
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise RecordError(f"not readable Parquet ({str(error)[:80]})", field="file", remedy=REMEDY) from None
    return from_arrow(table)


def _pyarrow() -> Any:
    try:
        return import_module("pyarrow")
    except ImportError:
        raise ImportError("Arrow tables need pyarrow: pip install offpolicy-corr[records]") from None


def _parquet() -> Any:
    _pyarrow()
    return import_module("pyarrow.parquet")


def _lists(arrow: Any, rows: Any, values: Any) -> Any:
    kind = arrow.LargeListArray if int(rows[-1]) >= 2**31 else arrow.ListArray
    width = np.int64 if kind is arrow.LargeListArray else np.int32
    return kind.from_arrays(arrow.array(rows.astype(width)), arrow.array(values))


def _named(arrow: Any, name: str, index: Tensor | None, names: tuple[str, ...]) -> dict[str, Any]:
    """Names in place of indices; numbers where there are none; null for −1."""
    if index is None:
        return {}
    values = index.numpy()
    if not names:
        return {name: arrow.array(values.astype(np.int64), mask=values < 0)}
    indices = arrow.array(values.astype(np.int32), mask=values < 0)
    return {name: arrow.DictionaryArray.from_arrays(indices, arrow.array(list(names)))}


def _candidate_columns(arrow: Any, candidates: CandidateSet) -> dict[str, Any]:
    offsets = candidates.offsets.numpy()
    columns = {
        "complete": candidates.complete.numpy(),
        "candidate_ids": _lists(arrow, offsets, candidates.ids.numpy()),
    }
    if candidates.logprobs is not None:
        columns["candidate_logprobs"] = _lists(arrow, offsets, candidates.logprobs.numpy())
    return columns


def _values(table: Any, name: str) -> tuple[Any, Any]:
    """The column's items end to end, and the length of each row's list."""
    try:
        column = table.column(name).combine_chunks()
        if column.null_count:
            raise RecordError("nulls in the column", field=name, value=column.null_count, remedy=REMEDY)
        lengths = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        return column.flatten(), lengths
    except (KeyError, AttributeError, ValueError) as error:
        raise RecordError(f"not a column of lists ({str(error)[:60]})", field=name, remedy=REMEDY) from None


def _sequence_numbers(table: Any) -> Tensor:
    if "sequence" not in table.column_names:
        raise RecordError("column is missing", field="sequence", remedy=REMEDY)
    numbers = _tensor(table.column("sequence").combine_chunks(), "sequence", "i").to(torch.int64)
    values, counts = numbers.unique(return_counts=True)
    if bool((counts > 1).any()):
        remedy = "Two samples would become one: number them anew where tables are joined."
        value = int(values[counts > 1][0])
        raise RecordError("two rows of one sequence", field="sequence", value=value, remedy=remedy)
    return numbers


def _tensor(values: Any, name: str, kinds: str) -> Tensor:
    """``kinds``: the numpy kinds allowed, of ``i`` (integers), ``f`` (floats), ``b`` (bools). No nulls."""
    if values.null_count:
        raise RecordError("nulls in the column", field=name, value=values.null_count, remedy=REMEDY)
    if np.dtype(values.type.to_pandas_dtype()).kind not in kinds:
        raise RecordError("another type", field=name, value=str(values.type), remedy=REMEDY)
    return torch.from_numpy(np.array(values.to_numpy(zero_copy_only=False)))


def _specs(text: bytes | None) -> tuple[SamplerSpec, ...]:
    try:
        return specs_from_plain(json.loads(text or b""))
    except ValueError as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError("the specs are not JSON", field="schema", value=text, remedy=REMEDY) from None


def _missing(metadata: dict[bytes, bytes]) -> int:
    text = metadata.get(_MISSING_KEY, b"")
    if not text.isdigit():
        raise RecordError("the number of missing tokens is lost", field="schema", value=text, remedy=REMEDY)
    return int(text)


def _temperature(values: Tensor) -> float | Tensor:
    return float(values[0]) if len(values) and bool((values == values[0]).all()) else values


def _indexed(columns: dict[str, Any], name: str) -> tuple[Tensor | None, tuple[str, ...]]:
    if name not in columns:
        return None, ()
    values = columns[name][0]
    if hasattr(values, "dictionary"):
        names = tuple(values.dictionary.to_pylist())
        return _tensor(values.indices.fill_null(-1), name, "i").to(torch.int64), names
    if np.dtype(values.type.to_pandas_dtype()).kind != "i":
        raise RecordError("another type", field=name, value=str(values.type), remedy=REMEDY)
    return _tensor(values.fill_null(-1), name, "i").to(torch.int64), ()


def _candidates(columns: dict[str, Any], count: int) -> CandidateSet | None:
    if "candidate_ids" not in columns:
        return None
    if "complete" not in columns:
        raise RecordError("column is missing", field="complete", remedy=REMEDY)
    complete = _tensor(columns["complete"][0], "complete", "b")
    ids, lengths = _inner(columns["candidate_ids"][0], "candidate_ids")
    logprobs = None
    if "candidate_logprobs" in columns:
        values, own = _inner(columns["candidate_logprobs"][0], "candidate_logprobs")
        if not torch.equal(own, lengths):
            raise RecordError("ids and log-probs differ in length", field="candidate_logprobs", remedy=REMEDY)
        logprobs = _tensor(values, "candidate_logprobs", "f")
    return CandidateSet(_tensor(ids, "candidate_ids", "i"), logprobs, offsets_from_counts(lengths), complete)


def _inner(values: Any, name: str) -> tuple[Any, Tensor]:
    """Items and lengths of a column's inner lists."""
    if values.null_count or not hasattr(values, "value_lengths"):
        raise RecordError("not a column of lists of lists", field=name, value=str(values.type), remedy=REMEDY)
    return values.flatten(), torch.from_numpy(values.value_lengths().to_numpy().astype(np.int64))
