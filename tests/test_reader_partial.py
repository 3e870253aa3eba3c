"""Unfinished answers: refused as whole ones, read as prefixes, and continued under newer weights."""

from __future__ import annotations

import copy
import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offpolicy_corr.integrations import sglang, vllm

import offpolicy_corr as oc
from answers import FILTERED, HEAD, PLAIN, SUPPORT, good_rows, good_sglang, vllm_dicts, vllm_generate
from offpolicy_corr.records.assembly import assemble
from test_sglang import as_chat
from test_sglang_streams import chunks as sglang_chunks


def sglang_answer(reason: Any) -> dict[str, Any]:
    response = good_sglang()
    response["meta_info"]["finish_reason"] = reason
    return response


def vllm_answer(reason: Any) -> dict[str, Any]:
    return vllm_generate([5, 7], good_rows(), finish_reason=reason)


def vllm_object(reason: Any) -> SimpleNamespace:
    output = vllm_dicts([5, 7], [{t: (v, r) for t, v, r in row} for row in good_rows()])
    output.finish_reason = reason
    return output


def as_type(reason: Any) -> Any:
    return None if reason is None else {"type": reason, "message": "paused for new weights"}


FORMS: dict[str, Any] = {
    "SGLang": lambda reason, **o: sglang.read_turns(sglang_answer(as_type(reason)), HEAD, **o),
    "SGLang chat": lambda reason, **o: sglang.read_chat_turns(
        as_chat(sglang_answer(as_type(reason))), HEAD, **o
    ),
    "vLLM JSON": lambda reason, **o: vllm.read_json_turns(vllm_answer(reason), PLAIN, **o),
    "vLLM object": lambda reason, **o: vllm.read_turns(vllm_object(reason), PLAIN, **o),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reason", [None, "abort"])
def test_an_unfinished_answer_is_refused_unless_partial_is_said(form: str, reason: str | None) -> None:
    with pytest.raises(oc.RecordError, match=r"unfinished.*partial=True") as caught:
        FORMS[form](reason)
    assert caught.value.field == "finish_reason" and str(reason) in str(caught.value.value)
    turn = FORMS[form](reason, partial=True)[0]
    whole = FORMS[form]("stop")[0]
    assert turn.truncated and turn.finish_reason == reason and not whole.truncated
    assert turn.record.tokens.tolist() == whole.record.tokens.tolist()
    assert torch.equal(turn.record.logprobs, whole.record.logprobs)


def test_every_reader_takes_partial() -> None:
    finished, answer = {"type": "abort"}, sglang_answer(None)
    assert len(sglang.read_generate(answer, HEAD, partial=True)) == 3
    assert len(sglang.read_chat(as_chat(sglang_answer(finished)), HEAD, partial=True)) == 3
    assert len(vllm.read_json(vllm_answer(None), PLAIN, partial=True)) == 2
    assert len(vllm.read_output(vllm_object("abort"), PLAIN, partial=True)) == 2


@pytest.mark.parametrize("module", [sglang, vllm])
def test_every_turn_reader_takes_the_prompt_that_assemble_asks_for(module: Any) -> None:
    readers = {name: getattr(module, name) for name in vars(module) if name.startswith("read_")}
    readers = {name: read for name, read in readers.items() if read.__module__ == module.__name__}
    parameters = {name: set(inspect.signature(read).parameters) for name, read in readers.items()}
    assert len(parameters) == 6
    for name, accepted in parameters.items():
        assert {"on_missing", "weight_version", "partial"} <= accepted
        assert ("prompt" in accepted) == name.endswith("turns")


def test_a_missing_finish_reason_is_not_a_finished_answer() -> None:
    response = good_sglang()
    del response["meta_info"]["finish_reason"]
    with pytest.raises(oc.RecordError, match="unfinished"):
        sglang.read_generate(response, HEAD)
    choice = vllm_answer("stop")
    del choice["choices"][0]["finish_reason"]
    with pytest.raises(oc.RecordError, match="unfinished"):
        vllm.read_json(choice, PLAIN)


@pytest.mark.parametrize("incremental", [True, False])
def test_a_canceled_prefix_is_resumed_under_newer_weights(incremental: bool) -> None:
    prefix = sglang_chunks(incremental)[:1]
    with pytest.raises(oc.RecordError, match=r"no last chunk.*partial=True"):
        sglang.read_stream(prefix, HEAD, incremental=incremental)
    options: dict[str, Any] = {"incremental": incremental, "partial": True, "weight_version": 41}
    assert len(sglang.read_stream(prefix, HEAD, **options)) == 1
    first = sglang.read_stream_turns(prefix, HEAD, prompt=[1, 2], **options)
    sent = [1, 2, *first[0].record.tokens.tolist()]  # the second call continues the first's ids
    rest = good_sglang()
    rest["meta_info"]["weight_versions"] = [
        {"version": "42", "start": 0, "end": 1},
        {"version": "43", "start": 1, "end": 3},
    ]
    whole = assemble([*first, *sglang.read_turns(rest, HEAD, prompt=sent)])
    assert whole.record.tokens.tolist() == [1, 2, 5, 5, 6, 7]
    assert whole.record.weight_version.tolist() == [-1, -1, 41, 42, 43, 43]
    assert whole.loss_mask.tolist() == [False, False, True, True, True, True] and not whole.truncated
    assert assemble(first).truncated


def vllm_chunks(counted: bool) -> list[dict[str, Any]]:
    parts = [
        vllm_generate([t], [row], finish_reason=None) for t, row in zip([5, 7], good_rows(), strict=True)
    ]
    for number, part in enumerate(parts, 1):
        part["prompt_token_ids"] = [1, 2]
        if counted:
            part["usage"] = {"prompt_tokens": 2, "completion_tokens": number, "total_tokens": 2 + number}
    return parts


def test_a_canceled_vllm_stream_must_count_its_chunks() -> None:
    with pytest.raises(oc.RecordError, match="no last chunk"):
        vllm.read_stream(vllm_chunks(True), PLAIN)
    with pytest.raises(oc.RecordError, match="continuous_usage_stats"):
        vllm.read_stream(vllm_chunks(False), PLAIN, partial=True)
    turn = vllm.read_stream_turns(vllm_chunks(True), PLAIN, partial=True, weight_version=3)[0]
    assert turn.truncated and turn.record.tokens.tolist() == [5, 7] and turn.prompt.tolist() == [1, 2]
    assert turn.record.weight_version.tolist() == [3, 3]
    with pytest.raises(oc.RecordError, match="2 tokens so far, 1 came"):
        vllm.read_stream(vllm_chunks(True)[1:], PLAIN, partial=True)  # a chunk was lost
    texts = [json.dumps(part) for part in vllm_chunks(True)]
    assert vllm.read_stream(texts, PLAIN, partial=True).tokens.tolist() == [5, 7]


def test_running_counts_of_several_choices_are_each_their_own() -> None:
    first, second = vllm_chunks(True)
    second["choices"][0]["index"], second["usage"]["completion_tokens"] = 1, 1
    assert [len(record) for record in vllm.read_stream([first, second], PLAIN, partial=True)] == [1, 1]


def test_python_deltas_that_were_canceled_are_a_prefix() -> None:
    part = vllm_object(None)
    with pytest.raises(oc.RecordError, match="no last chunk"):
        vllm.read_stream([part], PLAIN)
    request = SimpleNamespace(request_id="a", outputs=[part], prompt_token_ids=[1, 2])
    turn = vllm.read_stream_turns([request], PLAIN, partial=True, weight_version=7)[0]
    assert turn.truncated and turn.prompt.tolist() == [1, 2] and len(turn.record) == 2


@pytest.mark.parametrize("spec", [HEAD, SUPPORT])
def test_an_answer_canceled_before_its_first_token_is_empty(spec: oc.SamplerSpec) -> None:
    response = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 0}}
    with pytest.raises(oc.RecordError, match="unfinished"):
        sglang.read_generate(response, spec)
    turn = sglang.read_turns(response, spec, prompt=[1], partial=True)[0]
    assert len(turn.record) == 0 and turn.truncated
    empty = {"choices": [{"index": 0, "token_ids": [], "logprobs": None, "finish_reason": "abort"}]}
    own = PLAIN if spec is HEAD else FILTERED
    assert len(vllm.read_json(empty, own, partial=True)) == 0
    output = SimpleNamespace(token_ids=[], logprobs=None, finish_reason="abort")
    assert len(vllm.read_output(output, own, partial=True)) == 0


SPANS = [{"version": "42", "start": 0, "end": 2}]


def two(**second: Any) -> dict[str, Any]:
    response = vllm_generate([5, 7], good_rows(), weight_versions=SPANS)
    response["choices"].append(copy.deepcopy(response["choices"][0]) | {"index": 1} | second)
    return response


def test_spans_in_one_of_two_choices_are_refused() -> None:
    with pytest.raises(oc.RecordError, match="in some samples and not in others") as caught:
        vllm.read_json(two(weight_versions=None), PLAIN)
    assert (caught.value.sample, caught.value.field) == (1, "weight_versions")
    answers = [good_sglang(), good_sglang()]
    answers[1]["meta_info"]["weight_versions"] = [{"version": "42", "start": 0, "end": 3}]
    with pytest.raises(oc.RecordError, match="in some samples and not in others") as caught:
        sglang.read_generate(answers, HEAD)
    assert caught.value.sample == 0
    with pytest.raises(oc.RecordError, match="declared twice"):
        vllm.read_json(two(weight_versions=None), PLAIN, weight_version=42)
    assert [r.weight_version.tolist() for r in vllm.read_json(two(), PLAIN)] == [[42, 42], [42, 42]]
    empty = two(token_ids=[], logprobs=None, weight_versions=None)  # no token lacks a version
    assert [len(record) for record in vllm.read_json(empty, PLAIN)] == [2, 0]


def test_a_version_that_falls_inside_one_answer_is_refused() -> None:
    def read(*versions: str) -> oc.SamplerRecord:
        response = good_sglang()
        response["meta_info"]["weight_versions"] = [
            {"version": version, "start": token, "end": token + 1} for token, version in enumerate(versions)
        ]
        return sglang.read_generate(response, HEAD)

    for versions, token in ((("42", "41", "41"), 1), (("42", "default", "41"), 2)):
        with pytest.raises(oc.RecordError, match="falls inside one answer, from 42 to 41") as caught:
            read(*versions)
        assert (caught.value.token, caught.value.field, caught.value.value) == (token, "weight_versions", 41)
    assert read("41", "41", "42").weight_version.tolist() == [41, 41, 42]
    assert read("default", "41", "42").weight_version.tolist() == [-1, 41, 42]
    assert read("step-42", "step-41", "step-41").version_names == ("step-42", "step-41")  # opaque: no order
