"""Responses as text: one behavior with and without the optional packages, and what is no answer named as what it is."""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
from typing import Any

import numpy as np
import pytest
from offpolicy_corr.integrations._arrays import FLOATS, from_base64
from offpolicy_corr.integrations._json import parsed
from offpolicy_corr.integrations.sglang import read_chat, read_generate, read_stream
from offpolicy_corr.integrations.vllm import read_json
from offpolicy_corr.integrations.vllm import read_stream as read_vllm_stream

import offpolicy_corr as oc
from answers import HEAD, PLAIN, good_rows, good_sglang, vllm_generate


def without_or_with(module: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not there:
        monkeypatch.setitem(sys.modules, module, None)
    elif importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}")


both = pytest.mark.parametrize("there", [True, False], ids=["with", "without"])
REFUSED: dict[str, Any] = {
    "NaN": b"[NaN]",
    "Infinity": b"[Infinity]",
    "-Infinity": b"[-Infinity]",
    "infinite as a double": b"[1e999]",
    "an integer beyond doubles": b"[" + b"1" * 400 + b"]",
    "an integer of 5000 digits": b"[" + b"1" * 5000 + b"]",
    "no UTF-8": b'["\xff"]',
    "a surrogate in UTF-8": b'["\xed\xa0\x80"]',
    "a surrogate in a str": '["\ud800"]',
    "a surrogate escaped": b'["\\ud800"]',
    "surrogates in the wrong order": b'["\\udc00\\ud800"]',
    "a surrogate in a key": b'{"\\ud800": 1}',
    "a byte order mark": b"\xef\xbb\xbf[1]",
    "UTF-16": "[1]".encode("utf-16"),
    "UTF-16 without a mark": "[1]".encode("utf-16-le"),
    "a trailing comma": b"[1,]",
    "a control character": b'["\x01"]',
    "more behind the end": b"[1] x",
    "cut short": b'{"output_ids": [5,',
}
READ: dict[str, tuple[Any, Any]] = {
    "a key that stands twice": (b'{"a": 1, "a": 2}', {"a": 2}),
    "an integer beyond 64 bits": (b"[18446744073709551616, -9223372036854775809]", [2.0**64, -(2.0**63)]),
    "the widest integers": (b"[18446744073709551615, -9223372036854775808]", [2**64 - 1, -(2**63)]),
    "a pair of surrogates": (b'["\\ud83d\\ude00"]', ["\U0001f600"]),
    "an escaped backslash": (b'["\\\\ud800"]', ["\\ud800"]),
    "a memoryview": (memoryview(b"[1]"), [1]),
    "negative zero": (b"[-0.0, -0]", [0.0, 0]),
}


@both
@pytest.mark.parametrize("name", REFUSED)
def test_what_one_json_parser_refuses_the_other_refuses(
    name: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_or_with("orjson", there, monkeypatch)
    with pytest.raises(oc.RecordError, match="not JSON") as caught:
        parsed(REFUSED[name])
    assert caught.value.remedy


@both
@pytest.mark.parametrize("name", READ)
def test_what_one_json_parser_reads_the_other_reads(
    name: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_or_with("orjson", there, monkeypatch)
    text, expected = READ[name]
    found = parsed(text)
    assert found == expected
    if isinstance(found, list):
        assert list(map(type, found)) == list(map(type, expected))


@both
def test_minus_infinity_in_an_answer_is_refused(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    without_or_with("orjson", there, monkeypatch)
    text = json.dumps(good_sglang()).replace("-2.5", "-Infinity")
    with pytest.raises(oc.RecordError, match="not JSON"):
        read_generate(text, HEAD)


@both
@pytest.mark.parametrize(
    "text",
    [
        "AAAAAAAAAAAAAAAA=",
        "AAAAAAAAAAAAAAAA==",
        "AAAAgD8=",
        "AAAA=",
        "AAAAAAAA====",
        "AA=A",
        "AAA",
        "AAA\n",
        "AA AA",
        "-_8=",
    ],
)
def test_base64_is_as_strict_with_either_decoder(
    text: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_or_with("pybase64", there, monkeypatch)
    for given in (text, text.encode()):
        with pytest.raises(oc.RecordError) as caught:
            from_base64(given, "float32", FLOATS, "field")
        assert "not base64" in caught.value.problem or "whole number of float32" in caught.value.problem
    good = base64.b64encode(np.array([1.0], "<f4").tobytes()).decode()
    assert from_base64(good, "float32", FLOATS, "field").tolist() == [1.0]


READERS: dict[str, Any] = {
    "generate": lambda r: read_generate(r, HEAD),
    "batch": lambda r: read_generate([good_sglang(), r], HEAD),
    "chat": lambda r: read_chat(r, HEAD),
    "stream": lambda r: read_stream([good_sglang(), r], HEAD, incremental=True),
    "vllm": lambda r: read_json(r, PLAIN),
    "vllm stream": lambda r: read_vllm_stream([vllm_generate([5, 7], good_rows()), r], PLAIN),
}
ERRORS: dict[str, Any] = {
    "an object": {"error": {"message": "max_tokens is too large", "code": 400}},
    "a text": {"error": "max_tokens is too large"},
    "vLLM's": {
        "object": "error",
        "message": "max_tokens is too large",
        "type": "BadRequestError",
        "code": 400,
    },
    "FastAPI's": {"detail": "max_tokens is too large"},
    "FastAPI's list": {"detail": [{"loc": ["body"], "msg": "max_tokens is too large"}]},
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ERRORS)
def test_the_error_body_of_a_server_is_named_and_repeated(name: str, reader: str) -> None:
    with pytest.raises(
        oc.RecordError, match=r"server answered with an error: .*max_tokens is too large"
    ) as caught:
        READERS[reader](ERRORS[name])
    assert caught.value.remedy
    with pytest.raises(oc.RecordError, match="answered with an error") as caught:
        READERS["vllm"](json.dumps(ERRORS[name]))


def test_an_answer_that_names_no_error_is_read() -> None:
    assert len(read_json(vllm_generate([5, 7], good_rows()) | {"error": None, "detail": "x"}, PLAIN)) == 2


@pytest.mark.parametrize(
    "text", ['data: {"choices": []}\n\ndata: [DONE]\n', b"event: message\ndata: {}\n", b": ping\n\ndata: {}"]
)
def test_lines_of_an_event_stream_are_named(text: Any) -> None:
    for reader in READERS.values():
        with pytest.raises(oc.RecordError, match="event stream") as caught:
            reader(text) if reader is not READERS["batch"] else read_generate(text, HEAD)
        assert "data: " in caught.value.remedy
    with pytest.raises(oc.RecordError, match=r"\[DONE\].*Leave it out"):
        READERS["vllm stream"]("[DONE]")


def test_a_web_page_and_an_empty_body_are_named() -> None:
    with pytest.raises(oc.RecordError, match="web page"):
        read_json(b"<html><h1>502 Bad Gateway</h1></html>", PLAIN)
    with pytest.raises(oc.RecordError, match="empty response"):
        read_json(" ", PLAIN)
