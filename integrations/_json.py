"""Reader: responses as they arrive (bytes, text, or already parsed), and error bodies named as such."""

from __future__ import annotations

import json
import re
from typing import Any

from ._arrays import fail, mapping

EVENT_STREAM = re.compile(r"\s*(data|event|id|retry)?:")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
READ_EVENTS = "Take what follows 'data: ' of every line, leave out [DONE], and pass the list to read_stream."


def parsed(response: Any) -> Any:
    """``response`` itself, or what its JSON bytes or text say.

    The same documents are refused with and without orjson, which is used where it is installed: NaN and
    infinities, text that is no UTF-8, lone surrogates. An integer beyond 64 bits becomes a float. Of a key that
    stands twice, the last counts.

    Raises:
        RecordError: not JSON; truncated; nested too deeply; lines of an event stream; a web page.
    """
    if not isinstance(response, (bytes, bytearray, memoryview, str)):
        return response
    try:
        return _loads(response)
    except (ValueError, RecursionError) as error:
        raise fail(*_named(response, error)) from None


def response_object(value: Any, field: str) -> dict[str, Any]:
    """``value`` (parsed) as an answer's object.

    Raises:
        RecordError: no object, or the body with which a server says that it failed; the message is repeated.
    """
    body = mapping(value, field)
    if "choices" in body or "meta_info" in body:
        return body
    said = body.get("error") or body.get("detail")
    if said is None and body.get("object") == "error":
        said = body
    if said is None:
        return body
    if isinstance(said, dict):
        said = said.get("message", said)
    remedy = "There is no answer to read: mend the request, or send it again."
    raise fail(f"the server answered with an error: {str(said)[:300]}", field, None, remedy)


def _named(response: bytes | bytearray | memoryview | str, error: Exception) -> tuple[str, str, None, str]:
    """Problem, field, value and remedy of a text that is not JSON."""
    head = response[:200] if isinstance(response, str) else bytes(response[:200]).decode("utf-8", "replace")
    if not head.strip():
        return (
            "an empty response",
            "response",
            None,
            "The connection was closed before the answer: send it again.",
        )
    if head.strip() == "[DONE]":
        return (
            "[DONE] is the mark that ends an event stream",
            "response",
            None,
            "Leave it out: it is no chunk.",
        )
    if EVENT_STREAM.match(head):
        return "lines of an event stream (SSE), not JSON", "response", None, READ_EVENTS
    if head.lstrip().startswith("<"):
        remedy = "A proxy or a wrong address answered: ask the server itself."
        return f"a web page, not JSON: {' '.join(head.split())[:80]}", "response", None, remedy
    remedy = "The response is damaged or truncated: sample again."
    return f"not JSON ({str(error)[:80]})", "response", None, remedy


def _loads(response: bytes | bytearray | memoryview | str) -> Any:
    try:
        import orjson
    except ImportError:
        return _loads_as_orjson(response)
    return orjson.loads(response)


def _loads_as_orjson(response: bytes | bytearray | memoryview | str) -> Any:
    """The standard library's parser, as strict as orjson."""
    text = response if isinstance(response, str) else bytes(response).decode("utf-8")
    text.encode("utf-8")  # refuses lone surrogates of a str
    found = json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_refuse_constant)
    if SURROGATE.search(text):
        json.dumps(found, ensure_ascii=False).encode("utf-8")  # refuses lone surrogates that were escaped
    return found


def _integer(digits: str) -> int | float:
    if len(digits) < 19:
        return int(digits)
    if len(digits) <= 20 and -(2**63) <= int(digits) < 2**64:
        return int(digits)
    return _finite(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError("number is infinity when parsed as double")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")
