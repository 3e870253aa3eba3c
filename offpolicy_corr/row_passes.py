"""Row passes: the two passes over a block of logit rows, the sums of a softmax and the gradient written over it.

Everything is relative to the row's largest logit, after temperature, so nothing overflows. The mass outside the
candidates is summed directly, never as 1 − Σ: where the trainer's tail is small, the subtraction would lose every
digit of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .csr import segment_sum
from .loss_inputs import LossInputs
from .numerics import compute_dtype
from .records.candidates import CandidateSet
from .rows import RowGradient, RowStats

_LOWEST = -1e4  # exp of it is 0 in every dtype; finite, so that 0 · _LOWEST is 0 where 0 · −inf is NaN


class Scratch:
    """Memory reused from block to block: the exponentials of a block, and the shifted logits of one of its tiles."""

    def __init__(self, logits: Tensor, width: int, block: int, tile: int) -> None:
        width = max(width, 1)
        self.rows = max(1, min(block // width, logits.shape[0]))
        self.tile_rows = max(1, min(tile // width, self.rows))
        dtype = compute_dtype(logits.dtype)
        self.exps = torch.empty(self.rows * width, dtype=dtype, device=logits.device)
        self.shifted = torch.empty(self.tile_rows * width, dtype=dtype, device=logits.device)


class RowBlock:
    """A block of logit rows ``[R, V]`` and the two passes over it. ``V`` may be a shard from id ``first_id`` on.

    Each pass goes tile by tile, a few rows that stay in cache; the exponentials stay in scratch memory between
    the passes.
    """

    def __init__(self, logits: Tensor, inputs: LossInputs, scratch: Scratch, first_id: int = 0) -> None:
        self.logits, self.scratch = logits, scratch
        self.exps = scratch.exps[: logits.numel()].view(logits.shape)
        temperature = inputs.temperature
        self.temperature = temperature.to(self.exps.dtype) if isinstance(temperature, Tensor) else temperature
        rows = torch.arange(len(inputs), device=logits.device)
        candidates = inputs.candidates
        if candidates is None:
            candidates = CandidateSet.empty(len(inputs), logits.device)
        self.offsets, self.num_candidates = candidates.offsets, candidates.ids.numel()
        self.token_index = ColumnIndex.of(rows, inputs.tokens, first_id, logits.shape[1])
        self.candidate_index = ColumnIndex.of(candidates.rows, candidates.ids, first_id, logits.shape[1])
        self.tiles = [
            slice(start, min(start + scratch.tile_rows, len(inputs)))
            for start in range(0, len(inputs), scratch.tile_rows)
        ]

    def row_stats(self, row_max: Tensor | None = None) -> RowStats:
        """First pass. ``row_max`` ``[R]`` is the row's largest logit where it is known already."""
        known, size = row_max, self.logits.shape[0]
        row_max, sum_d_exp, tail_sum_exp = self.exps.new_empty(3, size).unbind(0)
        in_tiles = self.candidate_index.tiles(self.tiles)
        for tile, (rows, columns) in zip(self.tiles, in_tiles, strict=True):
            logits, exps = self.logits[tile], self.exps[tile]
            row_max[tile] = logits.amax(1) if known is None else known[tile]
            shifted = self._shift(tile, row_max)
            sum_d_exp[tile] = torch.linalg.vecdot(torch.exp(shifted, out=exps), shifted)
            if exps.device.type != "cpu" or bool(sum_d_exp[tile].isnan().any()):
                # 0 · −inf: where a logit is −inf, take a finite number whose exponential is 0 all the same
                sum_d_exp[tile] = torch.linalg.vecdot(exps, shifted.clamp_(min=_LOWEST))
            exps[rows, columns] = 0.0
            torch.sum(exps, 1, out=tail_sum_exp[tile])
        token_logit = self._gather(self.token_index, row_max, size)
        candidate_logits = self._gather(self.candidate_index, row_max, self.num_candidates)
        sum_exp = tail_sum_exp + segment_sum(candidate_logits.exp(), self.offsets)
        return RowStats(row_max, sum_exp, tail_sum_exp, sum_d_exp, token_logit, candidate_logits)

    def recompute_exp(self, row_max: Tensor) -> None:
        """Restore the exponentials, for a gradient pass that does not directly follow the first."""
        for tile in self.tiles:
            torch.exp(self._shift(tile, row_max), out=self.exps[tile])

    def gradient(self, gradient: RowGradient, row_max: Tensor, out: Tensor) -> None:
        """Second pass: write the gradient with respect to raw logits to ``out`` ``[R, V]``, of any dtype.

        ``out`` may be the logits. Every element is written once; those of candidates are rounded from fp32.
        """
        scale = (-gradient.log_sum_exp).exp() / self.temperature
        for tile in self.tiles:
            exps = self.exps[tile]
            if gradient.entropy_coef is None:
                factor = (gradient.prob_coef * scale)[tile, None]
            else:
                assert gradient.entropy is not None
                # p (prob_coef + entropy_coef (log p + H)) as e^d (intercept + slope·d)
                slope = gradient.entropy_coef * scale
                intercept = gradient.prob_coef * scale - slope * (gradient.log_sum_exp - gradient.entropy)
                shifted = self._shift(tile, row_max).clamp_(min=_LOWEST)
                factor = shifted.mul_(slope[tile, None]).add_(intercept[tile, None])
            if out.dtype == exps.dtype:
                torch.mul(exps, factor, out=out[tile])
            else:
                out[tile] = exps.mul_(factor)
        self._scatter(self.token_index, gradient.token_grad, out)
        self._scatter(self.candidate_index, gradient.candidate_grads, out)

    def _shift(self, tile: slice, row_max: Tensor) -> Tensor:
        logits = self.logits[tile]
        shifted = self.scratch.shifted[: logits.numel()].view(logits.shape)
        torch.sub(logits, row_max[tile, None], out=shifted)
        if isinstance(self.temperature, Tensor):
            shifted.div_(self.temperature[tile, None])
        elif self.temperature != 1.0:
            shifted.div_(self.temperature)
        return shifted

    def _gather(self, index: ColumnIndex, row_max: Tensor, size: int) -> Tensor:
        """Shifted logits at ``index``; −inf for ids on another shard."""
        out = torch.full((size,), -torch.inf, dtype=self.exps.dtype, device=row_max.device)
        shifted = self.logits[index.rows, index.columns].to(out.dtype) - row_max[index.rows]
        out[index.present] = shifted / self._temperature_of(index)
        return out

    def _scatter(self, index: ColumnIndex, values: Tensor, out: Tensor) -> None:
        out[index.rows, index.columns] = (values[index.present] / self._temperature_of(index)).to(out.dtype)

    def _temperature_of(self, index: ColumnIndex) -> Tensor | float:
        return self.temperature[index.rows] if isinstance(self.temperature, Tensor) else self.temperature


@dataclass(frozen=True, eq=False)
class ColumnIndex:
    """Row and column of ids in a block, and the positions of those ids among all ids of the block."""

    rows: Tensor
    columns: Tensor
    present: Tensor

    @classmethod
    def of(cls, rows: Tensor, ids: Tensor, first_id: int, width: int) -> ColumnIndex:
        """The index of the ids in columns ``[first_id, first_id + width)``; ``rows`` ascends."""
        columns = ids.to(torch.int64) - first_id
        present = ((columns >= 0) & (columns < width)).nonzero().squeeze(1)
        return cls(rows[present], columns[present], present)

    def tiles(self, tiles: list[slice]) -> list[tuple[Tensor, Tensor]]:
        """(row within the tile, column) of the ids of each tile."""
        if len(tiles) == 1:
            return [(self.rows, self.columns)]
        starts = torch.tensor([tile.start for tile in tiles], device=self.rows.device)
        ends = [*torch.searchsorted(self.rows, starts).tolist(), self.rows.numel()]
        return [
            (self.rows[first:last] - tile.start, self.columns[first:last])
            for tile, first, last in zip(tiles, ends[:-1], ends[1:], strict=True)
        ]
