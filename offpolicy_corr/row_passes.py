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
from .threads import Workers

_LOWEST = -1e4  # exp of it is 0 in every dtype; finite, so that 0 · _LOWEST is 0 where 0 · −inf is NaN


class Scratch:
    """Memory reused from block to block: the exponentials of a block, and the shifted logits of a tile per worker."""

    def __init__(self, logits: Tensor, block: int, tile: int, workers: Workers) -> None:
        width = max(logits.shape[1], 1)
        self.workers = workers
        self.rows = max(1, min(block // width, logits.shape[0]))
        self.tile_rows = max(1, min(tile // width, self.rows))
        dtype = compute_dtype(logits.dtype)
        self.exps = torch.empty(self.rows * width, dtype=dtype, device=logits.device)
        self.shifted = torch.empty(workers.count, self.tile_rows * width, dtype=dtype, device=logits.device)


class RowBlock:
    """A block of logit rows ``[R, V]`` and the two passes over it. ``V`` may be a shard from id ``first_id`` on.

    The block is ``logits[rows[row_slice]]``, or ``logits[row_slice]`` where ``rows`` is None. Each pass goes tile by
    tile, a few rows that stay in cache, which the workers divide among them; the exponentials stay in scratch memory
    between the passes.
    """

    def __init__(
        self,
        logits: Tensor,
        rows: Tensor | None,
        row_slice: slice,
        inputs: LossInputs,
        scratch: Scratch,
        first_id: int = 0,
    ) -> None:
        size, width = len(inputs), logits.shape[1]
        self.row_slice, self.rows = row_slice, None if rows is None else rows[row_slice]
        self.logits, self.scratch = self._rows_of(logits), scratch
        self.exps = scratch.exps[: size * width].view(size, width)
        temperature = inputs.temperature
        self.temperature = temperature.to(self.exps.dtype) if isinstance(temperature, Tensor) else temperature
        block_rows = torch.arange(size, device=logits.device)
        candidates = inputs.candidates
        if candidates is None:
            candidates = CandidateSet.empty(size, logits.device)
        self.offsets, self.num_candidates = candidates.offsets, candidates.ids.numel()
        self.token_index = ColumnIndex.of(block_rows, inputs.tokens, first_id, width)
        self.candidate_index = ColumnIndex.of(candidates.rows, candidates.ids, first_id, width)
        self.tiles = [
            slice(start, min(start + scratch.tile_rows, size)) for start in range(0, size, scratch.tile_rows)
        ]

    def row_max(self) -> Tensor:
        """The largest logit of each row, ``[R]``, of this shard."""
        row_max = self.exps.new_empty(self.exps.shape[0])

        def reduce(_: int, tile: slice) -> None:
            row_max[tile] = self._logits_of(tile).amax(1)

        self.scratch.workers.run(reduce, self.tiles)
        return row_max

    def row_stats(self, row_max: Tensor | None = None) -> RowStats:
        """First pass. ``row_max`` ``[R]`` is the row's largest logit where it is known already."""
        known, size = row_max, self.exps.shape[0]
        row_max, sum_d_exp, tail_sum_exp = self.exps.new_empty(3, size).unbind(0)

        def reduce(worker: int, item: tuple[slice, tuple[Tensor, Tensor]]) -> None:
            tile, (rows, columns) = item
            logits, exps = self._logits_of(tile), self.exps[tile]
            row_max[tile] = logits.amax(1) if known is None else known[tile]
            shifted = self._shift(worker, tile, logits, row_max)
            sum_d_exp[tile] = torch.linalg.vecdot(torch.exp(shifted, out=exps), shifted)
            if exps.device.type != "cpu" or bool(sum_d_exp[tile].isnan().any()):
                # 0 · −inf: where a logit is −inf, take a finite number whose exponential is 0 all the same
                sum_d_exp[tile] = torch.linalg.vecdot(exps, shifted.clamp_(min=_LOWEST))
            exps[rows, columns] = 0.0
            torch.sum(exps, 1, out=tail_sum_exp[tile])

        in_tiles = self.candidate_index.tiles(self.tiles)
        self.scratch.workers.run(reduce, list(zip(self.tiles, in_tiles, strict=True)))
        token_logit = self._gather(self.token_index, row_max, size)
        candidate_logits = self._gather(self.candidate_index, row_max, self.num_candidates)
        sum_exp = tail_sum_exp + segment_sum(candidate_logits.exp(), self.offsets)
        return RowStats(row_max, sum_exp, tail_sum_exp, sum_d_exp, token_logit, candidate_logits)

    def recompute_exp(self, row_max: Tensor) -> None:
        """Restore the exponentials, for a gradient pass that does not directly follow the first."""

        def restore(worker: int, tile: slice) -> None:
            torch.exp(self._shift(worker, tile, self._logits_of(tile), row_max), out=self.exps[tile])

        self.scratch.workers.run(restore, self.tiles)

    def gradient(self, gradient: RowGradient, row_max: Tensor, out: Tensor) -> None:
        """Second pass: write the gradient with respect to raw logits to the block's rows of ``out``, of any dtype.

        ``out`` has the shape of the logits and may be the logits. Every element of the rows is written once; those of
        candidates are rounded from fp32.
        """
        out = self._rows_of(out)
        scale = (-gradient.log_sum_exp).exp() / self.temperature
        intercept, slope = gradient.prob_coef * scale, None
        if gradient.entropy_coef is not None:
            assert gradient.entropy is not None
            # p (prob_coef + entropy_coef (log p + H)) as e^d (intercept + slope·d)
            slope = gradient.entropy_coef * scale
            intercept = intercept - slope * (gradient.log_sum_exp - gradient.entropy)

        def write(worker: int, tile: slice) -> None:
            exps, factor = self.exps[tile], intercept[tile, None]
            if slope is not None:
                shifted = self._shift(worker, tile, self._logits_of(tile), row_max).clamp_(min=_LOWEST)
                factor = shifted.mul_(slope[tile, None]).add_(factor)
            if self.rows is not None:
                out.index_copy_(0, self.rows[tile], exps.mul_(factor).to(out.dtype))
            elif out.dtype == exps.dtype:
                torch.mul(exps, factor, out=out[tile])
            else:
                out[tile] = exps.mul_(factor)

        self.scratch.workers.run(write, self.tiles)
        self._scatter(self.token_index, gradient.token_grad, out)
        self._scatter(self.candidate_index, gradient.candidate_grads, out)

    def _rows_of(self, matrix: Tensor) -> Tensor:
        """What `_logits_of` and `_position` count in: the block's rows, or all of them where these are scattered."""
        return matrix[self.row_slice] if self.rows is None else matrix

    def _logits_of(self, tile: slice) -> Tensor:
        return self.logits[tile] if self.rows is None else self.logits.index_select(0, self.rows[tile])

    def _position(self, index: ColumnIndex) -> tuple[Tensor, Tensor]:
        return index.rows if self.rows is None else self.rows[index.rows], index.columns

    def _shift(self, worker: int, tile: slice, logits: Tensor, row_max: Tensor) -> Tensor:
        shifted = self.scratch.shifted[worker, : logits.numel()].view(logits.shape)
        torch.sub(logits, row_max[tile, None], out=shifted)
        if isinstance(self.temperature, Tensor):
            shifted.div_(self.temperature[tile, None])
        elif self.temperature != 1.0:
            shifted.div_(self.temperature)
        return shifted

    def _gather(self, index: ColumnIndex, row_max: Tensor, size: int) -> Tensor:
        """Shifted logits at ``index``; −inf for ids on another shard."""
        out = torch.full((size,), -torch.inf, dtype=self.exps.dtype, device=row_max.device)
        shifted = self.logits[self._position(index)].to(out.dtype) - row_max[index.rows]
        out[index.present] = shifted / self._temperature_of(index)
        return out

    def _scatter(self, index: ColumnIndex, values: Tensor, out: Tensor) -> None:
        out[self._position(index)] = (values[index.present] / self._temperature_of(index)).to(out.dtype)

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
