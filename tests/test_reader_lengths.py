"""Lengths that a server declares, against what came, in every shape."""

from __future__ import annotations

from typing import Any

import pytest
from offpolicy_corr.integrations import sglang, vllm

import offpolicy_corr as oc
from answers import HEAD, PLAIN, good_rows, good_sglang, vllm_generate
from test_sglang import as_chat
from test_sglang_streams import chunks

PROMPT = [1, 2, 3, 4, 5]


def sglang_response(prompt_tokens: Any) -> dict[str, Any]:
    response = good_sglang()
    response["meta_info"]["prompt_tokens"] = prompt_tokens
    return response


def chat_response(prompt: Any, **usage: Any) -> dict[str, Any]:
    response = as_chat(good_sglang())
    response["choices"][0]["prompt_token_ids"] = prompt
    return response | {"usage": usage}


def vllm_response(prompt: Any, place: str = "response", **usage: Any) -> dict[str, Any]:
    response = vllm_generate([5, 7], good_rows()) | {"usage": usage}
    (response if place == "response" else response["choices"][0])["prompt_token_ids"] = prompt
    return response


REFUSED: dict[str, Any] = {
    "SGLang, five ids given": lambda n: sglang.read_turns(sglang_response(n), HEAD, prompt=PROMPT),
    "SGLang, none given": lambda n: sglang.read_turns(sglang_response(n), HEAD, prompt=[]),
    "SGLang, five ids returned": lambda n: sglang.read_generate(
        sglang_response(n) | {"prompt_ids": PROMPT}, HEAD
    ),
    "SGLang, none returned": lambda n: sglang.read_generate(sglang_response(n) | {"prompt_ids": []}, HEAD),
    "SGLang stream": lambda n: sglang.read_stream_turns(
        [sglang_response(n)], HEAD, incremental=False, prompt=PROMPT
    ),
    "SGLang chat, five": lambda n: sglang.read_chat(chat_response(PROMPT, prompt_tokens=n), HEAD),
    "SGLang chat, none": lambda n: sglang.read_chat(chat_response([], prompt_tokens=n), HEAD),
    "vLLM, five": lambda n: vllm.read_json(vllm_response(PROMPT, prompt_tokens=n), PLAIN),
    "vLLM, none": lambda n: vllm.read_json(vllm_response([], prompt_tokens=n), PLAIN),
    "vLLM completions": lambda n: vllm.read_json(vllm_response(PROMPT, "choice", prompt_tokens=n), PLAIN),
    "vLLM, five given": lambda n: vllm.read_json_turns(
        vllm_response(None, prompt_tokens=n), PLAIN, prompt=PROMPT
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_count_of_260_beside_five_or_no_prompt_ids_is_refused(name: str) -> None:
    with pytest.raises(oc.RecordError, match=r"prompt_tokens disagrees with the [50] ids") as caught:
        REFUSED[name](260)
    assert caught.value.value == 260 and caught.value.field.endswith(".prompt_tokens") and caught.value.remedy
    for odd in ("260", True, -1, 5.0):
        with pytest.raises(oc.RecordError, match="no count"):
            REFUSED[name](odd)
    if "none" not in name:
        assert REFUSED[name](5)


def test_a_response_without_prompt_ids_is_a_record_but_no_turn_to_assemble() -> None:
    assert len(sglang.read_generate(sglang_response(260), HEAD)) == 3
    assert len(vllm.read_json(vllm_response(None, prompt_tokens=260), PLAIN)) == 2
    for turns in (
        sglang.read_turns(sglang_response(260), HEAD),
        vllm.read_json_turns(vllm_response(None, prompt_tokens=260), PLAIN),
    ):
        assert turns[0].prompt is None
        with pytest.raises(oc.RecordError, match="context ids are unknown"):
            oc.assemble(turns)


@pytest.mark.parametrize(
    ("usage", "field"),
    [
        ({"completion_tokens": 9}, "usage.completion_tokens"),
        ({"completion_tokens": "3"}, "usage.completion_tokens"),
        ({"prompt_tokens": 5, "total_tokens": 9}, "usage.total_tokens"),
    ],
)
def test_the_rest_of_the_usage_is_compared_too(usage: dict[str, Any], field: str) -> None:
    for read in (
        lambda: sglang.read_chat(chat_response(PROMPT, **usage), HEAD),
        lambda: vllm.read_json(vllm_response(PROMPT, **usage), PLAIN),
    ):
        with pytest.raises(oc.RecordError) as caught:
            read()
        assert caught.value.field == field
    assert vllm.read_json(vllm_response(PROMPT, prompt_tokens=5, completion_tokens=2, total_tokens=7), PLAIN)
    with pytest.raises(oc.RecordError, match="expected an object"):
        vllm.read_json(vllm_response(PROMPT) | {"usage": 3}, PLAIN)


def test_usage_counts_every_prompt_once() -> None:
    def several(prompts: list[list[int]], declared: int) -> Any:
        response = vllm_response(None, prompt_tokens=declared)
        choice = response["choices"][0]
        response["choices"] = [choice | {"index": i, "prompt_token_ids": p} for i, p in enumerate(prompts)]
        return vllm.read_json(response, PLAIN)

    assert len(several([PROMPT] * 4, 5)) == 4  # four samples of one prompt
    assert len(several([PROMPT, PROMPT, [1], [1]], 6)) == 4  # two samples of each of two
    assert len(several([PROMPT, [1, 2]], 7)) == 2
    with pytest.raises(oc.RecordError, match="disagrees"):
        several([PROMPT, [1, 2]], 260)


def test_the_prompt_that_was_sent_must_be_the_one_that_came_back() -> None:
    for read in (
        lambda p: sglang.read_turns(good_sglang() | {"prompt_ids": PROMPT}, HEAD, prompt=p),
        lambda p: sglang.read_chat_turns(chat_response(PROMPT), HEAD, prompt=p),
        lambda p: vllm.read_json_turns(vllm_response(PROMPT), PLAIN, prompt=p),
    ):
        assert read(PROMPT)[0].prompt.tolist() == PROMPT
        with pytest.raises(oc.RecordError, match="prompt= differs") as caught:
            read([1, 2, 3, 4, 6])
        assert caught.value.field == "prompt"


@pytest.mark.parametrize("incremental", [True, False])
def test_the_prompts_length_comes_with_the_last_chunk_of_a_stream(incremental: bool) -> None:
    parts = chunks(incremental)
    for part in parts:
        part["meta_info"]["prompt_tokens"] = 260
    with pytest.raises(oc.RecordError, match="prompt_tokens disagrees"):
        sglang.read_stream_turns(parts, HEAD, incremental=incremental, prompt=PROMPT)
