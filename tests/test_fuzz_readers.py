"""Damaged responses: a reader raises `RecordError`, or returns exactly what the damaged response says.

The number of cases per test is READER_FUZZ_CASES (default 100: over 10³ in all; the nightly target sets 10000).
"""

from __future__ import annotations

import copy
import json
import os
import string
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offpolicy_corr.integrations.sglang import read_chat, read_generate, read_stream
from offpolicy_corr.integrations.vllm import read_json, read_output
from offpolicy_corr.integrations.vllm import read_stream as read_vllm_stream

import offpolicy_corr as oc
from answers import (
    HEAD,
    PLAIN,
    SELECTED,
    SUPPORT,
    as_flat,
    good_rows,
    good_sglang,
    good_support,
    log,
    vllm_dicts,
    vllm_flat,
    vllm_generate,
)
from offpolicy_corr.records.errors import RecordWarning

CASES = int(os.environ.get("READER_FUZZ_CASES", "100"))
many = settings(max_examples=CASES, deadline=10_000, suppress_health_check=list(HealthCheck))


def sglang_chunks() -> list[dict[str, Any]]:
    """Two incremental chunks of one answer."""
    parts = []
    for begin, end in ((0, 1), (1, 3)):
        part = good_sglang()
        part["output_ids"] = part["output_ids"][begin:end]
        meta = part["meta_info"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            meta[name] = meta[name][begin:end]
        meta |= {"output_token_logprobs_length": end, "completion_tokens": end}
        parts.append(part)
    parts[0]["meta_info"]["finish_reason"] = None
    return parts


def vllm_chunks() -> list[dict[str, Any]]:
    parts = [vllm_generate([t], [row]) for t, row in zip([5, 7], good_rows(), strict=True)]
    parts[0]["choices"][0]["finish_reason"] = None
    spans = [{"version": "3", "start": 0, "end": 2}]
    parts[1]["choices"][0]["weight_versions"] = spans
    return parts


def sglang_chat() -> dict[str, Any]:
    whole = good_sglang()
    return {"choices": [{"response_token_ids": whole["output_ids"], "meta_info": whole["meta_info"]}]}


def sglang_unfinished() -> dict[str, Any]:
    response = good_sglang()
    response["meta_info"]["finish_reason"] = None
    return response


def sglang_selected() -> dict[str, Any]:
    response = good_support()
    response["meta_info"]["output_token_sampling_logprobs"] = log([0.3, 1.0])
    return response


def vllm_chat() -> dict[str, Any]:
    response = vllm_generate([5, 7], [row[:2] for row in good_rows()])
    for entry in response["choices"][0]["logprobs"]["content"]:
        for item in (entry, *entry["top_logprobs"]):
            item["token"] = f"token_id:{item.pop('token_id')}"
    return response


def vllm_completions() -> dict[str, Any]:
    rows = good_rows()
    block = {
        "tokens": [f"token_id:{row[0][0]}" for row in rows],
        "token_logprobs": [row[0][1] for row in rows],
        "top_logprobs": [{f"token_id:{token}": value for token, value, _ in row} for row in rows],
    }
    return {"choices": [{"token_ids": [5, 7], "logprobs": block, "finish_reason": "stop"}]}


BASES: dict[str, Any] = {
    "sglang nested": (good_sglang(), HEAD, read_generate),
    "sglang flat": (as_flat(good_sglang(), coded=False), HEAD, read_generate),
    "sglang base64": (as_flat(good_sglang(), coded=True), HEAD, read_generate),
    "sglang support": (good_support(), SUPPORT, read_generate),
    "sglang selected": (sglang_selected(), SELECTED, read_generate),
    "sglang chat": (sglang_chat(), HEAD, read_chat),
    "sglang partial": (sglang_unfinished(), HEAD, lambda r, spec: read_generate(r, spec, partial=True)),
    "vllm generate": (vllm_generate([5, 7], good_rows()), PLAIN, read_json),
    "vllm partial": (
        vllm_generate([5, 7], good_rows(), finish_reason=None),
        PLAIN,
        lambda r, spec: read_json(r, spec, partial=True),
    ),
    "vllm chat": (vllm_chat(), PLAIN, read_json),
    "vllm completions": (vllm_completions(), PLAIN, read_json),
}
STREAMS: dict[str, Any] = {
    "sglang": (sglang_chunks(), HEAD, lambda chunks, spec: read_stream(chunks, spec, incremental=True)),
    "vllm": (vllm_chunks(), PLAIN, read_vllm_stream),
}
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 130), st.floats(), st.text(max_size=6),
    st.sampled_from([-9999.0, -99999.0, -3.4028234663852886e38, 0.0, 1e300, 2**63, "token_id:5"]),
)  # fmt: skip
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(string.ascii_lowercase, max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


def paths(node: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a response."""
    found = [here] if here else []
    if isinstance(node, dict):
        for key, value in node.items():
            found += paths(value, (*here, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            found += paths(value, (*here, index))
    return found


def parent(response: Any, path: tuple[Any, ...]) -> Any:
    for step in path[:-1]:
        response = response[step]
    return response


@st.composite
def damaged(draw: st.DrawFn, base: str) -> tuple[Any, str]:
    response = copy.deepcopy((BASES | STREAMS)[base][0])
    for _ in range(draw(st.integers(1, 3))):
        places = paths(response)
        if not places:
            break
        path = draw(st.sampled_from(places))
        node, key = parent(response, path), path[-1]
        kind = draw(st.sampled_from(["replace", "delete", "duplicate", "swap", "truncate", "bits"]))
        if kind == "replace":
            node[key] = draw(junk)
        elif kind == "delete":
            del node[key]
        elif kind == "duplicate" and isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
        elif kind == "swap" and isinstance(node, list) and len(node) > 1:
            other = draw(st.integers(0, len(node) - 1))
            node[key], node[other] = node[other], node[key]
        elif kind == "truncate" and isinstance(node[key], (list, str)):
            node[key] = node[key][: draw(st.integers(0, len(node[key])))]
        elif kind == "bits" and isinstance(node[key], str) and node[key]:
            at = draw(st.integers(0, len(node[key]) - 1))
            node[key] = node[key][:at] + draw(st.sampled_from("A/z=é ")) + node[key][at + 1 :]
    return response, base


def outcome(response: Any, base: str) -> oc.SamplerRecord | None:
    """The record, or None where it was refused with a remedy. Any other exception fails the test."""
    _, spec, read = (BASES | STREAMS)[base]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)
        try:
            record = read(response, spec)
        except oc.RecordError as error:
            assert error.remedy
            return None
    return record if isinstance(record, oc.SamplerRecord) else None


def literal(response: Any, base: str) -> tuple[list[int], list[float], list[set[int]]]:
    """Ids, log-probs and candidate sets as the response spells them, one token at a time."""
    if base.startswith("vllm"):
        return literal_vllm(response["choices"][0])
    if base == "sglang chat":
        choice = response["choices"][0]
        response = {"output_ids": choice.get("response_token_ids"), "meta_info": choice["meta_info"]}
    meta = response["meta_info"]
    triples = meta.get("output_token_logprobs")
    ids = response.get("output_ids")
    ids = [entry[1] for entry in triples] if ids is None else ids
    values = meta.get("output_token_sampling_logprobs")
    if base == "sglang selected":
        return ids, values, [set(row) for row in meta["output_token_sampling_mask"]]
    if base == "sglang support":
        mask = meta["output_token_sampling_mask"]
        own = [row[ids_.index(t)] for t, ids_, row in zip(ids, mask, values, strict=True)]
        return ids, own, [set(row) for row in mask]
    nested = meta.get("output_top_logprobs")
    sets = [{entry[1] for entry in row} for row in nested] if nested else []
    return ids, [entry[0] for entry in triples], sets


def literal_vllm(choice: dict[str, Any]) -> tuple[list[int], list[float], list[set[int]]]:
    def number(entry: dict[str, Any]) -> int:
        return entry["token_id"] if "token_id" in entry else int(entry["token"].removeprefix("token_id:"))

    block, ids = choice["logprobs"], choice.get("token_ids")
    if "token_logprobs" in block:
        named = [[{"token": name} for name in row or ()] for row in block.get("top_logprobs") or ()]
        ids = [number({"token": name}) for name in block["tokens"]] if ids is None else ids
        return ids, block["token_logprobs"], [set(map(number, row)) for row in named]
    content = block["content"]
    ids = [number(entry) for entry in content] if ids is None else ids
    candidates = [set(map(number, entry.get("top_logprobs") or ())) for entry in content]
    return ids, [entry["logprob"] for entry in content], candidates


@pytest.mark.parametrize("base", BASES)
@many
@given(data=st.data())
def test_damage_is_refused_or_read_literally(base: str, data: st.DataObject) -> None:
    response, _ = data.draw(damaged(base))
    record = outcome(response, base)
    if record is None:
        return
    ids, logprobs, sets = literal(response, base)
    assert record.tokens.tolist() == ids
    assert record.logprobs.tolist() == pytest.approx(logprobs, rel=1e-6, abs=1e-30)
    assert not record.logprobs.isnan().any()
    if record.candidates is not None and sets:
        offsets, found = record.candidates.offsets.tolist(), record.candidates.ids.tolist()
        for index, allowed in enumerate(sets):
            assert set(found[offsets[index] : offsets[index + 1]]) <= allowed
    record.validate(BASES[base][1].vocab_size)


@pytest.mark.parametrize("base", STREAMS)
@many
@given(data=st.data())
def test_damaged_streams_are_refused_or_read_literally(base: str, data: st.DataObject) -> None:
    chunks, _ = data.draw(damaged(base))
    record = outcome(chunks, base)
    if record is None:
        return
    if base == "sglang":
        assert record.tokens.tolist() == [token for chunk in chunks for token in chunk["output_ids"]]
        return
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    entries = [e for choice in choices for e in (choice.get("logprobs") or {}).get("content") or []]
    assert record.tokens.tolist() == [entry["token_id"] for entry in entries]
    assert record.logprobs.tolist() == pytest.approx([entry["logprob"] for entry in entries], rel=1e-6)


@pytest.mark.parametrize("base", ["sglang nested", "sglang support", "vllm generate"])
@many
@given(cut=st.integers(0, 10_000), flip=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_damaged_bytes_are_refused_or_read_literally(base: str, cut: int, flip: int, byte: int) -> None:
    text = bytearray(json.dumps(BASES[base][0]).encode())
    if cut % 2:
        del text[cut % len(text) :]
    if text:
        text[flip % len(text)] = byte
    record = outcome(bytes(text), base)
    if record is not None:
        ids, logprobs, _ = literal(json.loads(text), base)
        assert record.tokens.tolist() == ids
        assert record.logprobs.tolist() == pytest.approx(logprobs, rel=1e-6)


@many
@given(response=junk)
def test_junk_is_refused_by_every_reader(response: Any) -> None:
    for read, spec in ((read_generate, HEAD), (read_chat, HEAD), (read_json, PLAIN), (read_output, PLAIN)):
        with pytest.raises(oc.RecordError):
            read(response, spec)
    with pytest.raises(oc.RecordError):
        read_stream(response, HEAD, incremental=True)


FAULTS = {
    "one id changed": lambda r, i: r["output_ids"].__setitem__(i % 3, 50 + i % 40),
    "one id lost": lambda r, i: r["output_ids"].pop(i % 3),
    "one triple lost": lambda r, i: r["meta_info"]["output_token_logprobs"].pop(i % 3),
    "one triple twice": lambda r, i: r["meta_info"]["output_token_logprobs"].insert(i % 3, [-0.1, 5, None]),
    "one head lost": lambda r, i: r["meta_info"]["output_top_logprobs"].pop(i % 3),
    "one head null": lambda r, i: r["meta_info"]["output_top_logprobs"].__setitem__(i % 3, None),
    "value positive": lambda r, i: r["meta_info"]["output_token_logprobs"][i % 3].__setitem__(0, 1e-3 + i),
    "value lost": lambda r, i: r["meta_info"]["output_token_logprobs"][i % 3].__setitem__(
        0, [None, -9999.0][i % 2]
    ),
    "count off": lambda r, i: r["meta_info"].__setitem__("completion_tokens", 4 + i),
}


@pytest.mark.parametrize("fault", FAULTS)
@settings(max_examples=max(10, CASES // 10), deadline=10_000)
@given(index=st.integers(0, 1000))
def test_planted_faults_never_pass(fault: str, index: int) -> None:
    response = good_sglang()
    FAULTS[fault](response, index)
    with pytest.raises(oc.RecordError):
        read_generate(response, HEAD)


@settings(max_examples=CASES, deadline=10_000)
@given(rows=junk, ids=junk, flat=st.booleans())
def test_damaged_engine_objects_are_refused(rows: Any, ids: Any, flat: bool) -> None:
    good = vllm_flat([5, 7], good_rows()) if flat else vllm_dicts([5, 7], [{5: (-0.5, 1)}, {7: (-3.0, 2)}])
    for output in (
        SimpleNamespace(token_ids=[5, 7], logprobs=rows, finish_reason="stop"),
        SimpleNamespace(token_ids=ids, logprobs=good.logprobs, finish_reason="stop"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecordWarning)
            with pytest.raises(oc.RecordError):
                read_output(output, PLAIN)
