"""Adapter: the row layout of a micro-batch of Miles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offpolicy_corr.integrations._common.layout import RowLayout
from torch import Tensor

from offpolicy_corr.records.errors import RecordError

from .host import Batch, need


def row_layout(args: Any, batch: Batch, logits: Tensor, rank: int, size: int) -> RowLayout:
    """The layout of logits ``[1, T, V]`` (thd) or ``[B, L, V]`` (bshd) on a context-parallel rank.

    Raises:
        RecordError: lengths that contradict each other, a response without a prompt.
        ValueError: a format or a shape that is neither, logits with too few rows.
    """
    totals = tuple(int(n) for n in need(batch, "total_lengths"))
    responses = tuple(int(n) for n in need(batch, "response_lengths"))
    form = getattr(args, "qkv_format", "thd")
    if logits.dim() != 3 or form not in ("thd", "bshd"):
        shape = tuple(logits.shape)
        raise ValueError(
            f"logits must be [1, T, V] with qkv_format thd or [B, L, V] with bshd, got {shape}, {form!r}"
        )
    padded = None
    if form == "bshd":
        padded = tuple(int(n) for n in need(batch, "max_seq_lens"))
    elif logits.shape[0] != 1:
        raise ValueError(f"qkv_format thd packs all samples into [1, T, V], got {tuple(logits.shape)}")
    layout = RowLayout(
        totals,
        responses,
        rank,
        size,
        bool(getattr(args, "allgather_cp", False)) and size > 1,
        logits.shape[0] * logits.shape[1],
        logits.shape[1] if padded is not None else None,
        padded,
    )
    layout.check_rows(logits.shape[0])
    return layout


def list_layout(
    args: Any,
    totals: Sequence[int],
    responses: Sequence[int],
    padded: Sequence[int] | None,
    rank: int,
    size: int,
) -> RowLayout:
    """The layout of per-token lists alone, which are in zigzag order under every context parallelism."""
    bshd = getattr(args, "qkv_format", "thd") == "bshd"
    if bshd and padded is None:
        problem = "the hook got no max_seq_lens under qkv_format bshd"
        raise RecordError(problem, field="max_seq_lens", remedy="Upgrade Miles.")
    return RowLayout(
        tuple(int(n) for n in totals),
        tuple(int(n) for n in responses),
        rank,
        size,
        padded=tuple(int(n) for n in padded) if bshd and padded is not None else None,
    )
