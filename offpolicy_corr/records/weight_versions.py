"""Records: weight versions, the engines' spans over output tokens as one integer per token, and which are fresh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import RecordError
from .record import SamplerRecord
from .validation import as_mask

UNDECLARED = "default"  # what both engines report until somebody names a version
Span = tuple[str, int, int]


def parse_spans(value: Any, field: str = "weight_versions") -> list[Span] | None:
    """``[{"version": str, "start": int, "end": int}, …]``, or objects with these attributes; or None."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        remedy = "Pass the engine's weight_versions as they came; one version for all is weight_version=."
        kind = type(value).__name__
        raise RecordError("version spans must be a list", field=field, value=kind, remedy=remedy)
    spans: list[Span] = []
    for index, item in enumerate(value):
        get = item.get if isinstance(item, dict) else lambda name, item=item: getattr(item, name, None)
        version, start, end = get("version"), get("start"), get("end")
        if not (isinstance(version, str) and type(start) is int and type(end) is int):
            remedy = "Each span needs a version string and integer bounds [start, end)."
            raise RecordError(
                "not a version span", field=f"{field}[{index}]", value=repr(item)[:80], remedy=remedy
            )
        spans.append((version, start, end))
    return spans


def versions_from_spans(
    spans: Sequence[Span] | None, num_tokens: int, field: str = "weight_versions"
) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """``weight_version`` (int64 ``[T]``) and ``version_names`` of spans that cover all ``T`` tokens once, in
    order.

    Numerals become the integers themselves and there are no names. Any other string is opaque: versions index
    the names. ``"default"`` means that nobody named a version: −1. Without spans both are None.

    Raises:
        RecordError: a gap, an overlap, an empty span, or an end that is not ``T``.
    """
    if spans is None:
        return None, None
    reached = 0
    for version, start, end in spans:
        if start != reached or end <= start or end > num_tokens:
            kind = "gap" if start > reached else "overlap" if start < reached else "bad span"
            where = f"[{start}, {end}) of {version!r} after {reached} of {num_tokens} tokens"
            problem = f"{kind} in the version spans: {where}"
            remedy = "Spans must cover every output token once, in order."
            raise RecordError(problem, token=min(start, reached), field=field, value=version, remedy=remedy)
        reached = end
    if reached != num_tokens:
        remedy = "Spans must cover every output token once; read them from the finished response."
        raise RecordError("version spans end early", token=reached, field=field, value=reached, remedy=remedy)
    named = [version for version, *_ in spans if version != UNDECLARED]
    numeric = all(_is_numeral(version) for version in named)
    names = tuple(dict.fromkeys(named))
    versions = torch.full((num_tokens,), -1, dtype=torch.int64)
    for version, start, end in spans:
        if version != UNDECLARED:
            versions[start:end] = int(version) if numeric else names.index(version)
    return versions, None if numeric or not names else names


def _is_numeral(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19 and str(int(text)) == text


def fresh_tokens(
    record: SamplerRecord, current_version: int, max_lag: int, loss_mask: Tensor | None = None
) -> Tensor:
    """Tokens drawn by weights at most ``max_lag`` versions behind ``current_version``: bool ``[T]``.

    AND it into the loss mask to drop only the stale tokens of a partial rollout, whose first part older weights drew
    (`guards.staleness` drops the whole sequence). Under a centered loss nothing else is needed: which tokens are fresh
    does not depend on what they are.

    Args:
        loss_mask: bool or {0, 1} ``[T]``; tokens that are not trained may have any version and give False.

    Raises:
        RecordError: the record has no weight versions, or names in place of numbers; a trained token's version is
            undeclared (−1) or ahead of the current one.
    """
    if max_lag < 0:
        raise ValueError(f"max_lag must be >= 0, got {max_lag}")
    lag = lag_of(record, current_version, loss_mask)
    trained = as_mask(loss_mask, record.tokens)
    fresh = lag <= max_lag
    return fresh if trained is None else fresh & trained


def lag_of(record: SamplerRecord, current_version: int, loss_mask: Tensor | None) -> Tensor:
    """current version − weight version of every token, int64 ``[T]``, checked where tokens are trained.

    Raises:
        RecordError: as `fresh_tokens`.
    """
    versions = record.weight_version
    if versions is None:
        remedy = "Stamp every token with the version of the weights that drew it."
        raise RecordError("staleness needs weight versions", field="weight_version", remedy=remedy)
    if record.version_names is not None:
        remedy = "Number the versions in the order of the trainer's updates, without version_names."
        raise RecordError("staleness cannot count named versions", field="version_names", remedy=remedy)
    lag = current_version - versions
    trained = as_mask(loss_mask, versions, check=True)
    bad = (versions < 0) | (lag < 0)
    bad = bad if trained is None else bad & trained
    if bool(bad.any()):
        token = int(bad.nonzero()[0, 0])
        raise RecordError(
            "weight version is undeclared or ahead of the current one",
            token=token,
            field="weight_version",
            value=int(versions[token]),
            remedy=f"Versions must lie in [0, {current_version}].",
        )
    return lag
