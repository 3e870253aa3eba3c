"""Responses as they arrive: bytes, text, or already parsed."""

from __future__ import annotations

import json
from typing import Any

from ._arrays import fail


def parsed(response: Any) -> Any:
    """``response`` itself, or what its JSON bytes or text say. Uses orjson where it is installed.

    Raises:
        RecordError: not JSON; truncated; nested too deeply.
    """
    if not isinstance(response, (bytes, bytearray, memoryview, str)):
        return response
    try:
        return _loads(response)
    except (ValueError, RecursionError) as error:
        remedy = "The response is damaged or truncated: sample again."
        raise fail(f"not JSON ({str(error)[:80]})", "response", None, remedy) from None


def _loads(response: bytes | bytearray | memoryview | str) -> Any:
    try:
        import orjson
    except ImportError:
        return json.loads(bytes(response) if isinstance(response, memoryview) else response)
    return orjson.loads(response)
