"""Streamed SGLang answers, cumulative and incremental: the record of the whole, or an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from offpolicy_corr.integrations.sglang import read_generate, read_stream

import offpolicy_corr as oc
from answers import HEAD, good_sglang
from test_sglang import same


def chunks(incremental: bool) -> list[dict[str, Any]]:
    whole = good_sglang()
    cuts = [(0, 1), (1, 3)] if incremental else [(0, 1), (0, 3)]
    parts = []
    for index, (begin, end) in enumerate(cuts):
        part = copy.deepcopy(whole)
        part["output_ids"] = whole["output_ids"][begin:end]
        meta = part["meta_info"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            meta[name] = meta[name][begin:end]
        meta["output_token_logprobs_length"] = meta["completion_tokens"] = end
        meta["finish_reason"] = {"type": "stop"} if index == len(cuts) - 1 else None
        parts.append(part)
    return parts


@pytest.mark.parametrize("incremental", [True, False])
def test_a_stream_gives_the_record_of_the_whole(incremental: bool) -> None:
    read = read_stream(chunks(incremental), HEAD, incremental=incremental)
    assert same(read, read_generate(good_sglang(), HEAD))


@pytest.mark.parametrize("incremental", [True, False])
def test_a_stream_without_its_end_is_refused(incremental: bool) -> None:
    with pytest.raises(oc.RecordError, match="no last chunk"):
        read_stream(chunks(incremental)[:1], HEAD, incremental=incremental)
    with pytest.raises(oc.RecordError, match="without chunks"):
        read_stream([], HEAD, incremental=incremental)


def test_increments_that_nobody_counted_are_refused_and_a_lost_chunk_is_noticed() -> None:
    parts = chunks(True)
    with pytest.raises(oc.RecordError):
        read_stream(parts[1:], HEAD, incremental=True)
    for part in parts:
        part["meta_info"] |= {"output_token_logprobs_length": None, "completion_tokens": None}
    with pytest.raises(oc.RecordError, match="how many tokens") as caught:
        read_stream(parts, HEAD, incremental=True)
    assert caught.value.field == "completion_tokens"
    assert len(read_stream(chunks(False), HEAD, incremental=False)) == 3


@pytest.mark.parametrize("server_is_incremental", [True, False])
def test_the_wrong_kind_of_stream_is_refused(server_is_incremental: bool) -> None:
    with pytest.raises(oc.RecordError):
        read_stream(chunks(server_is_incremental), HEAD, incremental=not server_is_incremental)


def test_a_token_sent_twice_by_an_abort_is_refused() -> None:
    parts = chunks(True)
    again = copy.deepcopy(parts[1])
    again["output_ids"] = again["output_ids"][-1:]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        again["meta_info"][name] = again["meta_info"][name][-1:]
    parts[1]["meta_info"]["finish_reason"] = None
    with pytest.raises(oc.RecordError, match="again"):
        read_stream([*parts, again], HEAD, incremental=True)


def test_chunks_of_two_samples_are_not_one_answer() -> None:
    first, second = (dict(chunks(False)[1], index=index) for index in (0, 1))
    first = copy.deepcopy(first)
    first["output_ids"].pop()  # what the other sample begins with
    with pytest.raises(oc.RecordError, match="several answers") as caught:
        read_stream([first, second], HEAD, incremental=False)
    assert caught.value.field == "index"
