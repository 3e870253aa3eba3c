"""Adapter: errors counted as the user counts: by sample and response token, not by rows of packed logits."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from offpolicy_corr.records.errors import RecordError

from .layout import ResponseTokens


def in_response(error: RecordError, tokens: ResponseTokens) -> RecordError:
    """The same error, a row of the local logits replaced by the response token that it predicts."""
    if error.token is None:
        return error
    at = (tokens.rows == error.token).nonzero()
    if not at.numel():
        return error
    return error.at(sample=int(tokens.sample[at[0, 0]]), token=int(tokens.position[at[0, 0]]))


def message_in_response(message: str, tokens: ResponseTokens) -> str:
    """The same message, ``sample s, token row`` replaced by ``sample s, response token k``."""

    def replace_token(found: re.Match[str]) -> str:
        at = (tokens.rows == int(found[2])).nonzero()
        return f"{found[1]}, response token {int(tokens.position[at[0, 0]])}" if at.numel() else found[0]

    return re.sub(r"(sample \d+), token (\d+)", replace_token, message)


def check_row_lengths(key: str, values: Iterable[Any], lengths: Iterable[int], remedy: str) -> None:
    """Raise RecordError unless each value of a per-sample list has its sample's length."""
    for sample, (value, length) in enumerate(zip(values, lengths, strict=True)):
        if len(value) != length:
            problem = f"{len(value)} values for {length} tokens"
            raise RecordError(problem, sample=sample, field=key, value=len(value), remedy=remedy)
