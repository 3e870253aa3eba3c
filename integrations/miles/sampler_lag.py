"""Adapter: how many weight versions the sampler of each response token was behind the newest sampler.

Versions come, best first, from a record that `transport.attach` put on the sample (one version per token), from Miles'
spans (``version, abs_start, abs_end``), or from one string per generation call. With strings Miles does not record
which call drew which token, and runs of the loss mask do not tell it: the oldest of several calls then stands for all
tokens of the sample, which is what Miles' own ``oldest_weight_version`` and a guard against stale tokens look at.

Miles does not tell a converter which weights the trainer holds. It tells its rollout function which weights were last
published to the samplers (``RolloutFnTrainInput.weight_version``): see `transport.declare_newest_version`. Without that
the newest version that drew a trained token of the batch stands in, so that a lag of 0 means "as new as the newest
sampler", never "on-policy".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offpolicy_corr.records.errors import RecordError
from offpolicy_corr.records.weight_versions import UNDECLARED

VERSION_KEY = "offpolicy_corr_weight_version"  # on samples alone: int64 [R], −1 undeclared
NEWEST_KEY = "offpolicy_corr_newest_version"  # on samples alone: int

UNKNOWN = -1


def sampler_lags(samples: Sequence[Any]) -> list[NDArray[np.int64]]:
    """Per response token its lag, int64; −1 where the token is masked or its version was not declared.

    Only trained tokens count: what masked ones and removed samples declare is not looked at.

    Raises:
        RecordError: the version of a trained token is no number.
    """
    versions = [_versions(sample, index) for index, sample in enumerate(samples)]
    newest = max((newest for _, newest in versions), default=UNKNOWN)
    newest = max([newest, *(int(getattr(sample, NEWEST_KEY, UNKNOWN)) for sample in samples)])
    return [np.where(found == UNKNOWN, UNKNOWN, newest - found) for found, _ in versions]


def trained_tokens(sample: Any) -> NDArray[np.bool_]:
    """Which response tokens of a sample of Miles are trained, bool ``[R]``."""
    response = int(sample.response_length)
    if getattr(sample, "remove_sample", False):
        return np.zeros(response, dtype=bool)
    mask = sample.loss_mask
    return np.ones(response, dtype=bool) if mask is None else np.asarray(mask) != 0


def _versions(sample: Any, index: int) -> tuple[NDArray[np.int64], int]:
    """Version of each trained token, −1 elsewhere, and the newest that drew one of them."""
    mask = trained_tokens(sample)
    found = np.full(len(mask), UNKNOWN, dtype=np.int64)
    if not mask.any():
        return found, UNKNOWN
    recorded = getattr(sample, VERSION_KEY, None)
    calls = list(getattr(sample, "weight_versions", None) or [])
    spans = [span for call in calls for span in _spans(call)]
    if recorded is not None:
        found[:] = recorded
    elif spans:
        prompt = len(sample.tokens) - len(mask)
        for version, start, end in spans:
            part = slice(max(start - prompt, 0), max(end - prompt, 0))
            if mask[part].any():
                found[part] = _numeral(version, index)
    else:
        numbers = [_numeral(version, index) for version in calls]
        found[:] = min(numbers, default=UNKNOWN)
        return np.where(mask, found, UNKNOWN), max(numbers, default=UNKNOWN)
    found = np.where(mask, found, UNKNOWN)
    return found, int(found.max())


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


def _numeral(version: Any, index: int) -> int:
    text = str(version)
    if text == UNDECLARED:
        return UNKNOWN
    if not text.isascii() or not text.isdigit():
        remedy = "The guard behind_newest_sampler counts versions: name them by numbers, or drop the guard."
        raise RecordError(
            "version is no number", sample=index, field="weight_versions", value=text, remedy=remedy
        )
    return int(text)
