"""Preparation: where the sequences of a padded or packed batch lie, and which row of the logits predicts a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .records.candidates import is_integer


@dataclass(frozen=True, eq=False)
class BatchLayout:
    """Which sequence every position of ``input_ids`` belongs to, and which row of the logits predicts it.

    ``sequence`` and ``row`` are int64 ``[B·L]``; −1 is padding, and a position that no row predicts. ``sequence_ids``
    is int64 ``[B·K]``, the sequence of every row of the logits.
    """

    shape: tuple[int, int]
    num_kept: int
    num_sequences: int
    sequence: Tensor
    row: Tensor
    sequence_ids: Tensor

    @classmethod
    def of(
        cls,
        ids: Tensor,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        position_ids: Tensor | None,
        logits_to_keep: int,
    ) -> BatchLayout:
        batch, length = ids.shape
        kept = logits_to_keep or length
        if cu_seqlens is None and position_ids is None:
            number, sequence_of_row = batch, torch.arange(batch)[:, None].expand(batch, length)
            sequence = sequence_of_row
            attended = mask_on_host("attention_mask", attention_mask, ids.shape)
            if attended is not None:
                sequence = torch.where(attended.view(ids.shape), sequence, -1)
        else:
            if attention_mask is not None or (cu_seqlens is not None and position_ids is not None):
                raise ValueError("give one of attention_mask (padded), cu_seqlens and position_ids (packed)")
            number, sequence = _packed_sequences(ids, cu_seqlens, position_ids)
            sequence_of_row = sequence
        predicted = torch.zeros(ids.shape, dtype=torch.bool)
        predicted[:, 1:] = (sequence[:, 1:] == sequence[:, :-1]) & (sequence[:, 1:] >= 0)
        column = torch.arange(length) - 1 - (length - kept)
        row = torch.arange(batch)[:, None] * kept + column
        row = torch.where(predicted & (column >= 0), row, -1)
        return cls(
            (batch, length),
            kept,
            number,
            sequence.flatten(),
            row.flatten(),
            sequence_of_row[:, length - kept :].flatten(),
        )

    def of_next_token(self, values: Tensor) -> Tensor:
        """For every row of the logits the value of the token that it predicts, from ``[B, L]`` to ``[B·K]``."""
        return values.roll(-1, 1)[:, self.shape[1] - self.num_kept :].flatten()

    def sample_and_column(self, position: int) -> tuple[int | None, int]:
        """The sample and the column of a flat position, for errors."""
        sample = int(self.sequence[position])
        return None if sample < 0 else sample, position % self.shape[1]


def _packed_sequences(
    ids: Tensor, cu_seqlens: Tensor | None, position_ids: Tensor | None
) -> tuple[int, Tensor]:
    """How many sequences one packed row holds, and which of them owns each position, ``[1, L]``; −1 behind them."""
    batch, length = ids.shape
    if batch != 1:
        raise ValueError(f"packed sequences lie in one row, input_ids [1, L], got {tuple(ids.shape)}")
    if position_ids is not None:
        if position_ids.shape != ids.shape or not is_integer(position_ids):
            raise ValueError(
                f"position_ids must be integer {tuple(ids.shape)}, got {tuple(position_ids.shape)}"
            )
        start = position_ids.cpu() == 0
        if length and not bool(start[0, 0]):
            raise ValueError("position_ids must start at 0: every 0 starts a sequence")
        return int(start.sum()), start.cumsum(1) - 1
    assert cu_seqlens is not None
    bounds = cu_seqlens.cpu()
    if bounds.dim() != 1 or not is_integer(bounds) or len(bounds) < 2:
        raise ValueError(
            f"cu_seqlens must be integer [S + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()) or int(bounds[-1]) > length:
        raise ValueError(f"cu_seqlens must start at 0, never fall and end by {length}, got {bounds.tolist()}")
    sequence = torch.full((1, length), -1)
    sequence[0, : int(bounds[-1])] = torch.arange(len(bounds) - 1).repeat_interleave(bounds.diff())
    return len(bounds) - 1, sequence


def mask_on_host(name: str, mask: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """A mask ``[B, L]`` as bool ``[B·L]`` on the host."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or tuple(mask.shape) != tuple(shape):
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{name} must have the shape of input_ids, {tuple(shape)}, got {got}")
    flat = mask.detach().cpu().flatten()
    if flat.dtype != torch.bool and bool(((flat != 0) & (flat != 1)).any()):
        raise ValueError(f"{name} must be bool, 0 or 1")
    return flat.bool()
