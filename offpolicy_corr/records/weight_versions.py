"""Weight versions: the engines' spans over output tokens, as one integer per token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .errors import RecordError

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


def versions_of_calls(
    versions: Sequence[str], lengths: Sequence[int]
) -> tuple[Tensor, tuple[str, ...] | None]:
    """One version string per engine call (how Miles, slime and vime carry them) as one integer per token.

    Args:
        versions: one string a call.
        lengths: tokens that each call sampled.

    Raises:
        RecordError: fewer or more strings than calls; a scalar cannot be spread over calls that it does not
            name.
    """
    if len(versions) != len(lengths):
        remedy = "Record one version a call, or the engine's per-token spans: staleness per token needs them."
        problem = f"{len(versions)} version strings for {len(lengths)} calls"
        raise RecordError(problem, field="weight_versions", value=list(versions)[:4], remedy=remedy)
    ends = list(accumulate(lengths))
    spans = [(v, end - n, end) for v, end, n in zip(versions, ends, lengths, strict=True) if n]
    tensor, names = versions_from_spans(spans, sum(lengths))
    assert tensor is not None
    return tensor, names
