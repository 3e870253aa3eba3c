"""What `run_vllm.py` kept of a real engine, read by the library and held against the trainer.

VLLM_ANSWERS=DIR python -m pytest tests/engines/check_vllm.py
"""

from __future__ import annotations

import json
import os
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offpolicy_corr.integrations.vllm import read_json, read_output, read_stream

import offpolicy_corr as oc
from offpolicy_corr.records.inspection import inspect
from offpolicy_corr.records.sampler_spec import SamplerSpec

FOLDER = Path(os.environ.get("VLLM_ANSWERS", "build/vllm"))
TEMPERATURE, VOCAB = 0.7, 192
PLAIN = SamplerSpec(
    engine="vllm", logprobs="processed", temperature=TEMPERATURE, group="cpu", vocab_size=VOCAB
)
FILTERED = SamplerSpec(
    engine="vllm", logprobs="processed", temperature=TEMPERATURE, top_p=0.6, top_k=24, group="cpu", vocab_size=VOCAB
)  # fmt: skip
SPECS = {"head": PLAIN, "sampled": PLAIN, "whole": PLAIN, "filtered": FILTERED}


@cache
def answers(part: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{part}.json").read_text())["answers"]
    return loaded


@cache
def trainer() -> dict[str, list[torch.Tensor]]:
    loaded: dict[str, list[torch.Tensor]] = torch.load(FOLDER / "trainer.pt")
    return loaded


def as_object(plain: dict[str, Any]) -> SimpleNamespace:
    """The engine's object again, from what JSON can hold of it."""
    rows = plain["logprobs"]
    if isinstance(rows, dict):
        logprobs: Any = SimpleNamespace(**rows)
    else:
        logprobs = [{i: SimpleNamespace(logprob=v, rank=r) for i, v, r in row} for row in rows]
    spans = [SimpleNamespace(**span) for span in plain["weight_versions"] or []] or None
    return SimpleNamespace(**(plain | {"logprobs": logprobs, "weight_versions": spans}))


def read(part: str, name: str, spec: SamplerSpec) -> list[oc.SamplerRecord]:
    return [read_output(as_object(item["output"]), spec) for item in answers(part)[name]]


def equal(left: oc.SamplerRecord, right: oc.SamplerRecord) -> bool:
    def rows(record: oc.SamplerRecord) -> Any:
        ids, logprobs = record.candidates.to_padded()
        order = ids.argsort(1)
        return ids.gather(1, order), logprobs.gather(1, order)

    same = torch.equal(left.tokens, right.tokens) and torch.allclose(left.logprobs, right.logprobs)
    if left.candidates is None or right.candidates is None:
        return same and left.candidates is right.candidates
    (ids, values), (other_ids, other_values) = rows(left), rows(right)
    return same and torch.equal(ids, other_ids) and torch.allclose(values, other_values)


@pytest.mark.parametrize("name", SPECS)
def test_every_answer_gives_a_record_and_both_containers_give_the_same(name: str) -> None:
    nested, flat = read("processed", name, SPECS[name]), read("processed", name + "_flat", SPECS[name])
    assert all(equal(a, b) for a, b in zip(nested, flat, strict=True))
    joined = oc.SamplerRecord.concat(nested)
    if name == "sampled":
        assert joined.candidates is None
        return
    assert bool(joined.candidates.complete.all()) == (name == "filtered")
    counts = joined.candidates.offsets.diff()
    expected = {"head": {5}, "whole": {VOCAB}}.get(name)
    assert set(counts.tolist()) == expected if expected else counts.min() < counts.max() < 24


@pytest.mark.parametrize("name", ["head", "filtered"])
def test_http_shapes_agree_with_python(name: str) -> None:
    spec, http = SPECS[name], answers("http")
    whole = read_json(http[f"generate_{name}"], spec)
    assert equal(read_stream(http[f"generate_{name}_stream"], spec), whole)
    completions, chat = read_json(http[f"completions_{name}"], spec), read_json(http[f"chat_{name}"], spec)
    assert equal(read_stream(http[f"chat_{name}_stream"], spec), chat)
    assert equal(read_stream(http[f"completions_{name}_stream"], spec), completions)
    # one seed, one prompt: the same tokens and values on every route, up to the batch's rounding
    python = read("processed", name, spec)[0]
    for record in (whole, completions, chat):
        assert record.tokens.tolist() == python.tokens[: len(record)].tolist()
        assert torch.allclose(record.logprobs, python.logprobs[: len(record)], atol=0.05)
    if name == "filtered":
        assert equal(completions, whole) and equal(chat, whole)


@pytest.mark.parametrize("route", ["generate", "chat", "completions"])
def test_a_chunk_lost_on_the_way_is_noticed(route: str) -> None:
    chunks = answers("http")[f"{route}_head_stream"]
    for index in range(len(chunks)):
        tokens = [choice.get("token_ids") for choice in chunks[index]["choices"]]
        if any(tokens):
            with pytest.raises(oc.RecordError):
                read_stream(chunks[:index] + chunks[index + 1 :], PLAIN)


def test_usage_counts_the_tokens_of_all_choices() -> None:
    two = answers("http")["completions_two"]
    assert len(read_json(two, PLAIN)) == 2
    with pytest.raises(oc.RecordError, match="completion_tokens disagrees"):
        read_json({**two, "choices": two["choices"] * 2}, PLAIN)


@pytest.mark.parametrize("name", ["whole", "filtered"])
def test_importance_weights_average_to_one_under_the_recorded_q(name: str) -> None:
    """E_q[p/q] = 1 for every p over the same set: here the trainer at another temperature, far from q."""
    record = oc.SamplerRecord.concat(read("processed", name, SPECS[name]))
    policy = torch.cat(trainer()[name]) * TEMPERATURE  # back to raw logits up to a constant
    candidates = record.candidates
    rows = candidates.rows
    logits = policy[rows, candidates.ids.long()]
    total = torch.zeros(len(record)).index_add_(0, rows, logits.exp())
    logp = policy.gather(1, record.tokens[:, None]).squeeze(1) - total.log()
    ratio = (logp - record.logprobs).exp()
    error = ratio.std() / len(ratio) ** 0.5
    assert (ratio.mean() - 1).abs() < 4 * error + 0.005
    assert ratio.std() > 0.1  # the two differ, so the mean says something


@pytest.mark.parametrize("name", ["head", "whole", "filtered"])
def test_trainer_agrees_to_bfloat16(name: str) -> None:
    record = oc.SamplerRecord.concat(read("processed", name, SPECS[name]))
    logits = torch.cat(trainer()[name]) * TEMPERATURE
    logp, candidate_logp, _ = oc.selected_logprobs(
        logits, record.tokens, record.candidates, record.temperature
    )
    difference = (logp - record.logprobs).abs()
    assert difference.mean() < 0.02 and difference.quantile(0.99) < 0.12
    assert (candidate_logp - record.candidates.logprobs).abs().mean() < 0.03


def test_a_version_that_changed_while_sampling_comes_as_spans() -> None:
    (item,) = answers("processed")["relabeled"]
    record = read_output(as_object(item["output"]), PLAIN)
    versions = record.weight_version.tolist()
    assert versions == sorted(versions) and set(versions) == {-1, 42}


def test_raw_mode_under_filters_is_refused() -> None:
    refused = 0
    for item in answers("raw")["filtered"]:
        with pytest.raises(oc.RecordError, match="raw-mode server"):
            read_output(as_object(item["output"]), FILTERED)
        refused += 1
    assert refused == len(answers("raw")["filtered"]) > 0


def test_raw_mode_without_filters_is_caught_against_the_trainer() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        honest = oc.SamplerRecord.concat(read("processed", "head", PLAIN))
        raw = oc.SamplerRecord.concat(read("raw", "head", PLAIN))
    for record, part in ((honest, "processed"), (raw, "raw")):
        logits = torch.cat(trainer()["head"]) * TEMPERATURE
        same = [a["output"]["token_ids"] == b["output"]["token_ids"]
                for a, b in zip(answers("raw")["head"], answers("processed")["head"], strict=True)]  # fmt: skip
        assert all(same), "mode changes what is reported, never what is drawn"
        logp, _, _ = oc.selected_logprobs(logits, record.tokens, None, record.temperature)
        kinds = {f.kind for f in inspect(record, trainer_logprobs=logp, on_finding="ignore").findings}
        assert ("mismatch" in kinds) == (part == "raw"), kinds


@pytest.mark.parametrize("route", ["generate", "chat", "completions"])
def test_raw_mode_under_filters_is_refused_over_http(route: str) -> None:
    read_json(answers("http")[f"{route}_filtered"], FILTERED)
    with pytest.raises(oc.RecordError, match="raw-mode server"):
        read_json(answers("http_raw")[f"{route}_filtered"], FILTERED)


def test_raw_mode_without_filters_is_caught_over_http_against_the_trainer() -> None:
    drawn = []
    for part in ("http", "http_raw"):
        record = oc.SamplerRecord.concat([
            read_json(answers(part)[f"prompt_{i}"], PLAIN) for i in range(len(trainer()[part]))
        ])  # fmt: skip
        drawn.append(record.tokens.tolist())
        logits = torch.cat(trainer()[part]) * TEMPERATURE
        logp, _, _ = oc.selected_logprobs(logits, record.tokens, None, record.temperature)
        kinds = {f.kind for f in inspect(record, trainer_logprobs=logp, on_finding="ignore").findings}
        assert ("mismatch" in kinds) == (part == "http_raw"), (part, kinds)
    assert drawn[0] == drawn[1], "mode changes what is reported, never what is drawn"


def test_raw_mode_is_refused_by_its_own_spec() -> None:
    with pytest.raises(oc.RecordError, match="processed_logprobs"):
        SamplerSpec(engine="vllm", logprobs="raw", temperature=TEMPERATURE)
