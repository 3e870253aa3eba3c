"""Staleness of response tokens out of Miles' ``weight_versions``: one string a generation call, or spans.

Versions are counted back from the newest that any sample of the batch was drawn with: Miles does not tell a loss or a
converter which weights the trainer holds, so a lag of 0 means "the newest that a sampler had", not "on-policy".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offpolicy_corr.records.errors import RecordError
from offpolicy_corr.records.weight_versions import UNDECLARED

UNKNOWN = -1


def lags(samples: Sequence[Any]) -> list[NDArray[np.int64]]:
    """Per response token how many versions it is behind the batch's newest, int64; −1 where nothing declares it.

    Raises:
        RecordError: versions that are no numerals, or several for one run of sampled tokens.
    """
    versions = [_versions(sample, index) for index, sample in enumerate(samples)]
    newest = max((int(v.max()) for v in versions if len(v)), default=UNKNOWN)
    return [np.where(v == UNKNOWN, UNKNOWN, newest - v) for v in versions]


def _versions(sample: Any, index: int) -> NDArray[np.int64]:
    response = int(sample.response_length)
    found = np.full(response, UNKNOWN, dtype=np.int64)
    calls = list(getattr(sample, "weight_versions", None) or [])
    spans = [span for call in calls for span in _spans(call)]
    if spans:
        prompt = len(sample.tokens) - response
        for version, start, end in spans:
            found[max(start - prompt, 0) : max(end - prompt, 0)] = _numeral(version, index)
        return found
    if len(calls) == 1:
        found[:] = _numeral(calls[0], index)
    elif calls:
        runs = _sampled_runs(sample, response)
        if len(runs) != len(calls):
            problem = f"{len(calls)} version strings for {len(runs)} runs of sampled tokens"
            remedy = "Which call drew which token cannot be told: use a Miles that records spans."
            raise RecordError(problem, sample=index, field="weight_versions", value=calls[:4], remedy=remedy)
        for version, (start, end) in zip(calls, runs, strict=True):
            found[start:end] = _numeral(version, index)
    return found


def _spans(call: Any) -> list[tuple[Any, int, int]]:
    """``version, abs_start, abs_end`` of one call: a mapping, an object, or something that holds a list of them."""
    if isinstance(call, str):
        return []
    if isinstance(call, (list, tuple)):
        return [span for item in call for span in _spans(item)]
    start = _get(call, "abs_start")
    if start is not None:
        return [(_get(call, "version"), int(start), int(_get(call, "abs_end")))]
    return _spans(_get(call, "spans") or ())


def _get(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)


def _sampled_runs(sample: Any, response: int) -> list[tuple[int, int]]:
    mask = np.asarray(sample.loss_mask if sample.loss_mask is not None else [1] * response) != 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _numeral(version: Any, index: int) -> int:
    text = str(version)
    if text == UNDECLARED:
        return UNKNOWN
    if not text.isascii() or not text.isdigit():
        remedy = "Versions must count: update weights with weight_version=<number>."
        raise RecordError(
            "version is no number", sample=index, field="weight_versions", value=text, remedy=remedy
        )
    return int(text)
