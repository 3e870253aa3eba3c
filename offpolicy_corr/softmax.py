"""One visit to a block of logit rows: the sums a softmax needs, and the gradient written over them.

Everything is taken relative to the row's largest logit, after temperature, so nothing overflows. The mass
outside the candidates is summed directly, never as 1 − Σ: where the trainer's tail is small, the subtraction
would lose every digit of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .candidates import CandidateSet
from .segments import segment_sum
from .terms import Terms

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

    Row ``t`` is ``dense[t] · p_v + entropy[t] · p_v (log p_v + H)`` off the candidates, ``candidates`` on them, and
    ``token[t]`` more at the sampled token. ``log_total`` and ``mean_logp`` = −H belong to the softmax p.
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


class RowBlock:
    """A block of logit rows ``[R, V]`` and the two passes over it. ``V`` may be a shard from id ``first_id`` on."""

    def __init__(self, logits: Tensor, terms: Terms, scratch: Scratch, first_id: int = 0) -> None:
        self.logits, self.scratch = logits, scratch
        self.temperature = terms.temperature
        self.shifted, self.exps = scratch.pair(logits.shape)
        candidates = terms.candidates if terms.candidates is not None else CandidateSet.empty(len(terms))
        self.offsets = candidates.offsets.to(logits.device)
        rows = torch.arange(len(terms), device=logits.device)
        self.token = _local(rows, terms.tokens, first_id, logits.shape[1])
        self.candidates = _local(candidates.rows.to(logits.device), candidates.ids, first_id, logits.shape[1])
        self.num_candidates = candidates.ids.numel()

    def statistics(self, peak: Tensor | None = None) -> RowStats:
        """First pass. ``peak`` ``[R]`` is the row's largest logit where it is known, as on a second visit."""
        if peak is None:
            peak = self.logits.amax(1).to(self.exps.dtype)
        self._shift(peak)
        moment = torch.linalg.vecdot(self.exps, self.shifted)
        token = self._gather(self.token, peak, len(peak))
        candidates = self._gather(self.candidates, peak, self.num_candidates)
        self._put(self.exps, 0.0)
        tail = self.exps.sum(1)
        total = tail + segment_sum(candidates.exp(), self.offsets)
        return RowStats(peak, total, tail, moment, token, candidates)

    def revisit(self, peak: Tensor) -> None:
        """Restore what the first pass left behind, for a gradient pass that comes later."""
        self._shift(peak)

    def gradient(self, gradient: RowGradient) -> Tensor:
        """Second pass: the gradient with respect to raw logits, ``[R, V]``, in scratch memory."""
        scale = (-gradient.log_total).exp()
        if gradient.entropy is None:
            out = self.exps.mul_((gradient.dense * scale)[:, None])
        else:
            assert gradient.mean_logp is not None
            slope = gradient.entropy * scale
            level = gradient.dense * scale - slope * (gradient.log_total + gradient.mean_logp)
            out = self.shifted.mul_(slope[:, None]).add_(level[:, None]).mul_(self.exps)
        self._put(out, gradient.candidates)
        rows, columns, present = self.token
        out[rows, columns] += gradient.token[present]
        if isinstance(self.temperature, Tensor):
            out.div_(self.temperature.to(out.dtype)[:, None])
        elif self.temperature != 1.0:
            out.div_(self.temperature)
        return out

    def _shift(self, peak: Tensor) -> None:
        torch.sub(self.logits, peak[:, None], out=self.shifted)
        self._cool(self.shifted)
        self.shifted.clamp_(min=_LOWEST)
        torch.exp(self.shifted, out=self.exps)

    def _cool(self, shifted: Tensor) -> None:
        if isinstance(self.temperature, Tensor):
            shifted.div_(self.temperature.to(shifted.dtype)[:, None])
        elif self.temperature != 1.0:
            shifted.div_(self.temperature)

    def _gather(self, place: tuple[Tensor, Tensor, Tensor], peak: Tensor, size: int) -> Tensor:
        """d at ``place`` (−inf kept, unlike in ``shifted``); −inf for ids that live on another shard."""
        rows, columns, present = place
        out = torch.full((size,), -torch.inf, dtype=self.exps.dtype, device=peak.device)
        shifted = self.logits[rows, columns].to(out.dtype) - peak[rows]
        temperature = self.temperature
        divisor = temperature.to(out.dtype)[rows] if isinstance(temperature, Tensor) else temperature
        out[present] = shifted / divisor
        return out

    def _put(self, target: Tensor, values: Tensor | float) -> None:
        rows, columns, present = self.candidates
        if isinstance(values, Tensor):
            target[rows, columns] = values[present]
        else:
            target[rows, columns] = values


class Scratch:
    """Two buffers of one chunk's size, reused from chunk to chunk."""

    def __init__(self, rows: int, columns: int, like: Tensor) -> None:
        dtype = compute_dtype(like.dtype)
        self.buffers = [torch.empty(rows * columns, dtype=dtype, device=like.device) for _ in range(2)]

    def pair(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        first, second = (buffer[: shape.numel()].view(shape) for buffer in self.buffers)
        return first, second


def _local(rows: Tensor, ids: Tensor, first_id: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and original position of the ids that live in columns [first_id, first_id + width)."""
    columns = ids.to(torch.int64) - first_id
    present = ((columns >= 0) & (columns < width)).nonzero().squeeze(1)
    return rows[present], columns[present], present
