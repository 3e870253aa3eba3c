"""One visit to a block of logit rows: the sums a softmax needs, and the gradient written over them.

Everything is taken relative to the row's largest logit, after temperature, so nothing overflows. The mass
outside the candidates is summed directly, never as 1 − Σ: where the trainer's tail is small, the subtraction
would lose every digit of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .csr import segment_sum
from .loss_inputs import Terms
from .records.candidates import CandidateSet

_LOWEST = -1e4  # exp of it is 0 in every dtype; finite, so that 0 · _LOWEST is 0 where 0 · −inf is NaN


@dataclass(frozen=True, eq=False)
class RowStats:
    """Statistics of ``R`` rows, relative to ``peak``, the largest logit of each (raw, before temperature).

    ``total`` = Σ e^d over the vocabulary and ``tail`` = the same without the candidates, with
    d = (logit − peak) / temperature; ``moment`` = Σ d·e^d; ``token`` and ``candidates`` hold d of the sampled
    token ``[R]`` and of the candidates ``[nnz]``.
    """

    peak: Tensor
    total: Tensor
    tail: Tensor
    moment: Tensor
    token: Tensor
    candidates: Tensor


@dataclass(frozen=True, eq=False)
class RowGradient:
    """A gradient over ``R`` rows of logits after temperature, in the form the closed form gives it.

    Row ``t`` is ``dense[t] · p_v + entropy[t] · p_v (log p_v + H)`` at most columns; at the sampled token it is
    ``token[t]``, and at the candidates, the sampled token too where it is one of them, ``candidates``.
    ``log_total`` is the log-sum-exp relative to the row's peak, ``mean_logp`` = −H.
    """

    dense: Tensor
    candidates: Tensor
    token: Tensor
    log_total: Tensor
    entropy: Tensor | None = None
    mean_logp: Tensor | None = None

    def narrow(self, rows: slice, candidates: slice) -> RowGradient:
        """The same for a run of rows and the candidates they own."""
        return RowGradient(
            self.dense[rows],
            self.candidates[candidates],
            self.token[rows],
            self.log_total[rows],
            None if self.entropy is None else self.entropy[rows],
            None if self.mean_logp is None else self.mean_logp[rows],
        )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64; everything else is computed in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Scratch:
    """Memory reused from block to block: the exponentials of one block, the shifted logits of one tile of it."""

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

    def __init__(self, logits: Tensor, terms: Terms, scratch: Scratch, first_id: int = 0) -> None:
        self.logits, self.scratch = logits, scratch
        self.exps = scratch.exps[: logits.numel()].view(logits.shape)
        temperature = terms.temperature
        self.temperature = temperature.to(self.exps.dtype) if isinstance(temperature, Tensor) else temperature
        rows = torch.arange(len(terms), device=logits.device)
        candidates = terms.candidates
        if candidates is None:
            candidates = CandidateSet.empty(len(terms), logits.device)
        self.offsets, self.num_candidates = candidates.offsets, candidates.ids.numel()
        self.token = Place.of(rows, terms.tokens, first_id, logits.shape[1])
        self.candidates = Place.of(candidates.rows, candidates.ids, first_id, logits.shape[1])
        self.tiles = [
            slice(start, min(start + scratch.tile_rows, len(terms)))
            for start in range(0, len(terms), scratch.tile_rows)
        ]

    def statistics(self, peak: Tensor | None = None) -> RowStats:
        """First pass. ``peak`` ``[R]`` is the row's largest logit where it is known already."""
        given, size = peak, self.logits.shape[0]
        peak, moment, tail = self.exps.new_empty(3, size).unbind(0)
        owned = self.candidates.tiles(self.tiles)
        for tile, (rows, columns) in zip(self.tiles, owned, strict=True):
            logits, exps = self.logits[tile], self.exps[tile]
            peak[tile] = logits.amax(1) if given is None else given[tile]
            shifted = self._shift(tile, peak)
            moment[tile] = torch.linalg.vecdot(torch.exp(shifted, out=exps), shifted)
            if exps.device.type != "cpu" or bool(moment[tile].isnan().any()):
                # 0 · −inf: where a logit is −inf, take a finite number whose exponential is 0 all the same
                moment[tile] = torch.linalg.vecdot(exps, shifted.clamp_(min=_LOWEST))
            exps[rows, columns] = 0.0
            torch.sum(exps, 1, out=tail[tile])
        token = self._gather(self.token, peak, size)
        candidates = self._gather(self.candidates, peak, self.num_candidates)
        total = tail + segment_sum(candidates.exp(), self.offsets)
        return RowStats(peak, total, tail, moment, token, candidates)

    def revisit(self, peak: Tensor) -> None:
        """Restore the exponentials, for a gradient pass that comes later than the first."""
        for tile in self.tiles:
            torch.exp(self._shift(tile, peak), out=self.exps[tile])

    def gradient(self, gradient: RowGradient, peak: Tensor, out: Tensor) -> None:
        """Second pass: write the gradient with respect to raw logits to ``out`` ``[R, V]``, of any dtype.

        ``out`` may be the logits. Every element is written once; the sparse ones are rounded from fp32.
        """
        scale = (-gradient.log_total).exp() / self.temperature
        for tile in self.tiles:
            exps = self.exps[tile]
            if gradient.entropy is None:
                factor = (gradient.dense * scale)[tile, None]
            else:
                assert gradient.mean_logp is not None
                slope = gradient.entropy * scale
                level = gradient.dense * scale - slope * (gradient.log_total + gradient.mean_logp)
                shifted = self._shift(tile, peak).clamp_(min=_LOWEST)
                factor = shifted.mul_(slope[tile, None]).add_(level[tile, None])
            if out.dtype == exps.dtype:
                torch.mul(exps, factor, out=out[tile])
            else:
                out[tile] = exps.mul_(factor)
        self._scatter(self.token, gradient.token, out)
        self._scatter(self.candidates, gradient.candidates, out)

    def _shift(self, tile: slice, peak: Tensor) -> Tensor:
        logits = self.logits[tile]
        shifted = self.scratch.shifted[: logits.numel()].view(logits.shape)
        torch.sub(logits, peak[tile, None], out=shifted)
        if isinstance(self.temperature, Tensor):
            shifted.div_(self.temperature[tile, None])
        elif self.temperature != 1.0:
            shifted.div_(self.temperature)
        return shifted

    def _gather(self, place: Place, peak: Tensor, size: int) -> Tensor:
        """Shifted logits at ``place``; −inf for ids that live on another shard."""
        out = torch.full((size,), -torch.inf, dtype=self.exps.dtype, device=peak.device)
        shifted = self.logits[place.rows, place.columns].to(out.dtype) - peak[place.rows]
        out[place.present] = shifted / self._cooling(place)
        return out

    def _scatter(self, place: Place, values: Tensor, out: Tensor) -> None:
        out[place.rows, place.columns] = (values[place.present] / self._cooling(place)).to(out.dtype)

    def _cooling(self, place: Place) -> Tensor | float:
        return self.temperature[place.rows] if isinstance(self.temperature, Tensor) else self.temperature


@dataclass(frozen=True, eq=False)
class Place:
    """Where ids live in a block: row and column, and their position among all ids of the block."""

    rows: Tensor
    columns: Tensor
    present: Tensor

    @classmethod
    def of(cls, rows: Tensor, ids: Tensor, first_id: int, width: int) -> Place:
        """Of the ids in columns ``[first_id, first_id + width)``; ``rows`` ascends."""
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
