"""Arrow and Parquet: one row a sample, there and back."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import offpolicy_corr as oc
from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.records.trajectory import Batch
from support import same_record
from test_storage import RECORDS, heads, mixed

pyarrow = pytest.importorskip("pyarrow", reason="needs the records extra")

from offpolicy_corr.records.tables import from_arrow, from_parquet, to_arrow, to_parquet  # noqa: E402


def test_one_row_a_sample_with_names_in_place_of_indices() -> None:
    record, samples = heads(6, 2), torch.tensor([3, 1, 1, 3, 3, 1])
    table = to_arrow(Batch(record, torch.tensor([1, 1, 0, 1, 0, 1]) != 0, samples))
    assert table.column("sequence").to_pylist() == [1, 3]
    assert table.column("tokens").to_pylist()[0] == record.tokens[[1, 2, 5]].tolist()
    assert table.column("group").to_pylist() == [["b200", "h100", "b200"], ["h100", "b200", "h100"]]
    assert table.column("weight_version").to_pylist() == [["41", "step 42", "step 42"], [None, None, "41"]]
    assert table.column("loss_mask").to_pylist() == [[True, False, True], [True, True, False]]
    assert table.column("candidate_ids").to_pylist()[0][1] == record.candidates.ids[4:6].tolist()


@pytest.mark.parametrize("kind", sorted(set(RECORDS) - {"missing values"}))
def test_a_table_comes_back_as_the_record(kind: str, tmp_path: Path) -> None:
    record = RECORDS[kind]()
    samples = torch.arange(len(record)) // 2
    mask = torch.arange(len(record)) % 3 != 1
    batch = Batch(record, mask, samples, missing=3)
    to_parquet(batch, tmp_path / "t.parquet")
    for read in (from_arrow(to_arrow(batch)), from_parquet(tmp_path / "t.parquet")):
        assert (
            torch.equal(read.sequence_ids, samples)
            and torch.equal(read.loss_mask, mask)
            and read.missing == 3
        )
        same_temperature = torch.as_tensor(read.record.temperature) == torch.as_tensor(record.temperature)
        assert bool(same_temperature.all())
        assert same_record(*(dataclasses.replace(r, temperature=1.0) for r in (read.record, record)))


def test_masked_tokens_may_be_missing_and_trained_ones_may_not() -> None:
    record, samples = RECORDS["missing values"](), torch.zeros(2, dtype=torch.int64)
    assert from_arrow(to_arrow(record)).loss_mask.tolist() == [True, False]  # nobody named the missing token
    with pytest.raises(oc.RecordError, match="finite"):
        from_arrow(to_arrow(Batch(record, torch.tensor([True, True]), samples)))


def test_an_assembled_trajectory_written_without_its_mask_comes_back() -> None:
    """Context tokens have no log-probs: a file without the mask that says so was refused on reading."""
    spec = SamplerSpec(engine="vllm", logprobs="processed", group="a")
    answer = oc.SamplerRecord(torch.tensor([5, 6]), torch.tensor([-0.5, -1.0]))
    whole = oc.assemble([oc.Turn(answer, torch.tensor([1, 2]), spec)])
    for data in (whole, whole.record, oc.pack([whole])):
        read = from_arrow(to_arrow(data))
        assert read.loss_mask.tolist() == [False, False, True, True] and same_record(
            read.record, whole.record
        )


def test_damaged_tables_are_refused() -> None:
    table = to_arrow(mixed())
    keep = table.schema.metadata
    wrong = {
        "tokens": pyarrow.array([[1.5, 3.0, 8.0]]),
        "logprobs": pyarrow.array([[-0.5, -0.1]]),
        "temperature": pyarrow.array([None], pyarrow.list_(pyarrow.float64())),
        "candidate_ids": pyarrow.array([[1, 2, 3]]),
        "candidate_logprobs": pyarrow.array([[[-0.5], [-0.1], [-0.7, -0.7]]]),
        "complete": pyarrow.array([[None, False, True]]),
        "sequence": pyarrow.array([None], pyarrow.int64()),
    }
    for name, column in wrong.items():
        damaged = table.set_column(table.column_names.index(name), name, column)
        with pytest.raises(oc.RecordError) as caught:
            from_arrow(damaged.replace_schema_metadata(keep))
        assert caught.value.field in (name, "candidate_logprobs", "temperature")
    for name in ("tokens", "complete", "temperature", "sequence"):
        with pytest.raises(oc.RecordError):
            from_arrow(table.drop_columns([name]))
    with pytest.raises(oc.RecordError, match="not a table of records"):
        from_arrow(table.replace_schema_metadata({}))
    for specs in (b"", b"{", b"3", b'[{"engine": "vllm"}]'):
        with pytest.raises(oc.RecordError) as caught:
            from_arrow(table.replace_schema_metadata(keep | {b"offpolicy_corr.specs": specs}))
        assert caught.value.field in ("schema", "specs")


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.float64(), pyarrow.bool_()])
def test_sequences_groups_and_versions_have_their_types(kind: Any) -> None:
    table = to_arrow(heads(2, 2))
    for name in ("sequence", "group", "weight_version"):
        column = pyarrow.array([1] if name == "sequence" else [[1, 0]]).cast(
            kind if name == "sequence" else pyarrow.list_(kind)
        )
        damaged = table.set_column(table.column_names.index(name), name, column)
        with pytest.raises(oc.RecordError, match="another type") as caught:
            from_arrow(damaged)
        assert caught.value.field == name


def test_joined_tables_do_not_make_one_sample_of_two() -> None:
    table = to_arrow(Batch(heads(4, 2), torch.ones(4, dtype=torch.bool), torch.tensor([3, 3, 7, 7])))
    with pytest.raises(oc.RecordError, match="two rows of one sequence") as caught:
        from_arrow(pyarrow.concat_tables([table, table.slice(1)]))
    assert caught.value.value == 7


def test_a_folder_is_not_read_under_the_specs_of_its_first_file(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 1)):
        record = RECORDS["specs"]() if name == "a" else RECORDS["heads"]()
        batch = Batch.of(record)
        to_parquet(dataclasses.replace(batch, sequence_ids=batch.sequence_ids + first), tmp_path / name)
        assert len(from_parquet(tmp_path / name).record.specs) == len(record.specs)
    with pytest.raises(oc.RecordError, match="not readable"):
        from_parquet(tmp_path)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"offpolicy-corr\[records\]"):
        to_arrow(mixed())


def test_corrupt_and_truncated_parquet_raises(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    to_parquet(heads(300, 4), path)
    good = path.read_bytes()
    before = from_parquet(path).record
    for size in (0, 3, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(oc.RecordError):
            from_parquet(path)
    refused = 0
    positions = range(5, len(good), 97)
    for position in positions:
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x15]) + good[position + 1 :])
        try:
            assert same_record(from_parquet(path).record, before)
        except oc.RecordError:
            refused += 1
    assert refused > 0.5 * len(positions)
    with pytest.raises(FileNotFoundError):
        from_parquet(tmp_path / "nothing")
