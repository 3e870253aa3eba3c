"""Records on disk come back the same, or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

import offpolicy_corr as oc
from offpolicy_corr.records.sampler_spec import SamplerSpec
from support import same_record

pytest.importorskip("safetensors", reason="needs the records extra")


def heads(count: int, size: int, seed: int = 0) -> oc.SamplerRecord:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 4 * size, generator=generator)
    top = (logits * 3).log_softmax(1).topk(size)
    candidates = oc.CandidateSet.from_topk(top.indices, top.values)
    return oc.SamplerRecord(
        top.indices[:, 0].clone(),
        top.values[:, 0].clone(),
        candidates,
        torch.full((count,), 0.8),
        torch.arange(count) % 2,
        ("h100", "b200"),
        torch.arange(count) % 3 - 1,
        ("41", "step 42"),
    )


def mixed() -> oc.SamplerRecord:
    first = oc.CandidateSet.from_topk(
        torch.tensor([[1, 2], [3, -1]]), torch.tensor([[-0.5, -2.0], [-0.1, 0.0]])
    )
    second = oc.CandidateSet.from_support(
        torch.tensor([7, 8]), torch.tensor([0, 2]), torch.tensor([0.5, 0.5]).log()
    )
    records = [
        oc.SamplerRecord(torch.tensor([1, 3]), torch.tensor([-0.5, -0.1]), first, 0.7),
        oc.SamplerRecord(torch.tensor([8]), torch.tensor([0.5]).log(), second, 1.0),
    ]
    return oc.SamplerRecord.concat(records)


SPECS = (
    SamplerSpec(engine="sglang", logprobs="support", temperature=0.8, top_p=0.95, top_k=512, group="h100",
                weights="fp8", kv_cache="fp8", architecture="sm90", tokenizer_hash="ab", vocab_size=151_936),
    SamplerSpec(engine="vllm", logprobs="processed", temperature=0.8, group="b200", constrained=True),
)  # fmt: skip


RECORDS = {
    "specs": lambda: dataclasses.replace(heads(5, 2), specs=SPECS),
    "heads": lambda: heads(50, 8),
    "mixed": mixed,
    "ids alone": lambda: oc.SamplerRecord(
        torch.tensor([7, 9]), None,
        oc.CandidateSet.from_support(torch.tensor([7, 8, 9], dtype=torch.int32), torch.tensor([0, 2, 3])),
    ),
    "tokens alone": lambda: oc.SamplerRecord(torch.tensor([7, 9]), temperature=0.6),
    "empty": lambda: oc.SamplerRecord(torch.zeros(0, dtype=torch.int64), torch.zeros(0)),
    "missing values": lambda: oc.SamplerRecord(torch.tensor([1, 2]), torch.tensor([-0.5, torch.nan])),
    "float64": lambda: oc.SamplerRecord(torch.tensor([1]), torch.tensor([-0.1], dtype=torch.float64)),
    "names": lambda: oc.SamplerRecord(
        torch.tensor([1]), group=torch.tensor([0]), group_names=("größe 漢\n\"",),
        weight_version=torch.tensor([2**40]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("compact", [True, False])
def test_a_record_comes_back_bit_for_bit(kind: str, verify: bool, compact: bool, tmp_path: Path) -> None:
    record = RECORDS[kind]()
    oc.save_records(record, tmp_path / "r.safetensors", compact)
    assert same_record(oc.load_records(tmp_path / "r.safetensors", verify=verify).record, record)
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]


def test_same_record_sees_differences() -> None:
    record = heads(4, 2)
    changed = record.logprobs.clone()
    changed[2] -= 1e-6
    others = [
        oc.SamplerRecord(record.tokens, changed, record.candidates, record.temperature),
        oc.SamplerRecord(record.tokens, record.logprobs),
        record.select(torch.tensor([0, 1, 2])),
    ]
    assert same_record(record, heads(4, 2)) and not any(same_record(record, other) for other in others)
    plain = [oc.SamplerRecord(record.tokens, temperature=t) for t in (0.7, 0.8)]
    assert not same_record(*plain)
    assert not same_record(record, dataclasses.replace(record, specs=SPECS))


@pytest.mark.parametrize(("compact", "per_candidate"), [(False, 8), (True, 7)])
def test_columns_of_small_integers_take_few_bytes(compact: bool, per_candidate: int, tmp_path: Path) -> None:
    count, size = 4000, 8
    record = dataclasses.replace(heads(count, size), temperature=0.8)
    ids = record.candidates.ids.int() + 100_000  # beyond two bytes, as a large vocabulary's are
    ids[0], record.tokens[0] = 0, 150_000
    record = dataclasses.replace(record, candidates=dataclasses.replace(record.candidates, ids=ids))
    oc.save_records(record, tmp_path / "r", compact)
    # token 3, log-prob 4, candidates 1, group 1, weight version 1, complete, mask, sequence 0; header 2,170
    assert (tmp_path / "r").stat().st_size < count * (10 + per_candidate * size) + 2200


@pytest.mark.parametrize(("kind", "compact"), [("mixed", True), ("specs", False)])
def test_any_changed_byte_raises_or_changes_nothing(kind: str, compact: bool, tmp_path: Path) -> None:
    record, path = RECORDS[kind](), tmp_path / "r"
    oc.save_records(record, path, compact)
    good = path.read_bytes()
    refused = 0
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x15]) + good[position + 1 :])
        try:
            assert same_record(oc.load_records(path).record, record), position
        except oc.RecordError:
            refused += 1
    assert refused > 0.95 * len(good)  # what is left is padding between the header and the data


def test_every_truncation_raises(tmp_path: Path) -> None:
    path = tmp_path / "r"
    oc.save_records(mixed(), path)
    good = path.read_bytes()
    for size in [*range(0, len(good), 7), len(good) - 1]:
        path.write_bytes(good[:size])
        with pytest.raises(oc.RecordError):
            oc.load_records(path, verify=False)
    path.write_bytes(good + b"\0")
    with pytest.raises(oc.RecordError):
        oc.load_records(path)


def rewrite(path: Path, **changes: Any) -> None:
    """Change the header and make its checksum right again."""
    from safetensors.torch import load_file, safe_open, save_file

    with safe_open(str(path), framework="pt") as file:
        header = json.loads(file.metadata()["header"])
    text = json.dumps(header | changes)
    save_file(load_file(path), path, {"header": text, "header_crc32": str(crc32(text.encode()))})


TOKENS = {"dtype": "int64", "size": 3, "least": 1, "width": 1}
WRONG_HEADERS: list[dict[str, Any]] = [
    {"version": 1}, {"version": 4}, {"format": "other"}, {"tensors": {}}, {"columns": {}}, {"columns": 3},
    {"columns": {"tokens": TOKENS | {"size": 4}}}, {"columns": {"tokens": TOKENS | {"dtype": "float32"}}},
    {"specs": 3}, {"specs": [{"engine": "vllm"}]}, {"specs": [{"engine": "vllm", "logprobs": "raw", "top_p": 0.9}]},
    {"specs": [{"engine": "vllm", "logprobs": "raw", "invented": 1}]}, {"group_names": None},
    {"columns": {"tokens": TOKENS | {"least": 2**70}}}, {"tensors": 3}, {"tensors": None},
]  # fmt: skip


@pytest.mark.parametrize("changes", WRONG_HEADERS, ids=str)
def test_other_versions_and_formats_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r"
    oc.save_records(mixed(), path)
    rewrite(path, **changes)
    with pytest.raises(oc.RecordError) as caught:
        oc.load_records(path)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "text", ["[]", "3", "null", "{", '{"format": "offpolicy_corr.record", "version": 3}']
)
def test_a_header_that_is_no_header_is_refused(text: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(
        {"tokens": torch.zeros(3)},
        tmp_path / "r",
        {"header": text, "header_crc32": str(crc32(text.encode()))},
    )
    with pytest.raises(oc.RecordError) as caught:
        oc.load_records(tmp_path / "r")
    assert caught.value.field == "file" and caught.value.remedy


def test_fields_that_share_memory_are_kept(tmp_path: Path) -> None:
    zeros, ids = torch.zeros(2), torch.tensor([1, 2])
    candidates = oc.CandidateSet.from_support(ids, torch.arange(3), zeros)
    record = oc.SamplerRecord(ids, zeros, candidates)
    oc.save_records(record, tmp_path / "r")
    assert same_record(oc.load_records(tmp_path / "r").record, record)


def test_files_have_the_rights_that_the_umask_leaves_and_keep_those_they_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(_: int) -> int:
        raise AssertionError(
            "the umask belongs to all threads: between reading it and setting it back, others write"
        )

    path = tmp_path / "r"
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", changed)
            oc.save_records(mixed(), path)
            assert path.stat().st_mode & 0o777 == 0o640
            path.chmod(0o600)
            oc.save_records(mixed(), path)
            assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"tokens": torch.zeros(3)}, tmp_path / "r")
    with pytest.raises(oc.RecordError, match="no record header"):
        oc.load_records(tmp_path / "r")
    with pytest.raises(FileNotFoundError):
        oc.load_records(tmp_path / "nothing")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r"
    oc.save_records(mixed(), path)

    def broken(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        oc.save_records(heads(5, 2), path)
    assert same_record(oc.load_records(path).record, mixed())
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


WRITER = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_storage import heads
record = heads(20_000, 64)
print("ready", flush=True)
while True:
    oc.save_records(record, {path!r})
"""


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03])
def test_a_killed_writer_leaves_a_whole_file(delay: float, tmp_path: Path) -> None:
    path = tmp_path / "r"
    oc.save_records(mixed(), path)
    script = WRITER.format(tests=str(Path(__file__).parent), path=str(path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        with contextlib.suppress(subprocess.TimeoutExpired):
            writer.wait(delay)
        writer.send_signal(signal.SIGKILL)
    read = oc.load_records(path).record
    assert same_record(read, mixed()) or len(read) == 20_000


def test_a_mapped_record_outlives_its_replacement(tmp_path: Path) -> None:
    path = tmp_path / "r"
    oc.save_records(heads(500, 16), path)
    mapped = oc.load_records(path, verify=False).record
    oc.save_records(heads(500, 16, seed=1), path)
    assert same_record(mapped, heads(500, 16)) and same_record(
        oc.load_records(path).record, heads(500, 16, seed=1)
    )


def test_a_file_replaced_while_it_is_opened_is_read_from_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, original, turns = tmp_path / "r", torch.UntypedStorage.from_file, iter([True])
    old = dataclasses.replace(heads(500, 16), group_names=("old", "b200"))
    oc.save_records(old, path)

    def replaced(*arguments: Any, **more: Any) -> Any:
        if next(turns, False):
            oc.save_records(heads(500, 16, seed=1), path)
        return original(*arguments, **more)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replaced)
    assert same_record(oc.load_records(path, verify=False).record, heads(500, 16, seed=1))
    assert next(turns, None) is None, "the file was opened in another way: replace it there"

    monkeypatch.setattr("offpolicy_corr.records.storage.ATTEMPTS", 1)
    turns = iter([True])
    with pytest.raises(oc.RecordError, match="replaced faster"):
        oc.load_records(path)


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for act in (lambda: oc.save_records(mixed(), tmp_path / "r"), lambda: oc.load_records(tmp_path / "r")):
        with pytest.raises(ImportError, match=r"offpolicy-corr\[records\]"):
            act()


def test_loading_maps_the_file(tmp_path: Path) -> None:
    record = heads(200_000, 64)
    oc.save_records(record, tmp_path / "r")
    del record
    size = (tmp_path / "r").stat().st_size
    script = (
        "import torch, offpolicy_corr as oc, sys\n"
        "pages = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "oc.load_records(sys.argv[2])\n"
        "before = pages(); r = oc.load_records(sys.argv[1], verify=False); print(pages() - before)"
    )
    oc.save_records(mixed(), tmp_path / "small")
    arguments = [sys.executable, "-c", script, str(tmp_path / "r"), str(tmp_path / "small")]
    grown = int(subprocess.run(arguments, capture_output=True, check=True, text=True).stdout)
    assert grown < size / 10
