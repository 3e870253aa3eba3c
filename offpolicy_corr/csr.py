"""Arithmetic: ragged rows stored back to back (CSR). Row ``t`` owns ``values[offsets[t]:offsets[t + 1]]``.

Every reduction is row-local: the result of a row does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_index(offsets: Tensor, size: int) -> Tensor:
    """For every stored value the row that owns it, int64 [nnz]. ``size`` is nnz: given, it saves a host sync."""
    return torch.repeat_interleave(offsets.diff(), output_size=size)


def offsets_from_counts(counts: Tensor) -> Tensor:
    """int64 [T + 1] offsets of rows that hold ``counts`` [T] values each."""
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each row, [T]; an empty row gives 0."""
    return torch.segment_reduce(values, "sum", offsets=offsets, initial=0, unsafe=True)


def segment_max(values: Tensor, offsets: Tensor) -> Tensor:
    """Maximum of each row, [T]; an empty row gives −inf."""
    return torch.segment_reduce(values, "max", offsets=offsets, initial=-torch.inf, unsafe=True)


def row_mass(logprobs: Tensor, offsets: Tensor) -> Tensor:
    """Σ exp(logprobs) of each row, float64 [T]: 1 minus it must keep the digits of a small tail."""
    return segment_sum(logprobs.double().exp(), offsets)


def segment_logsumexp(values: Tensor, offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ exp of each row as two addends ``[T]``: the row's maximum, and the rest.

    Two numbers, because values can lie far from 0: subtracting first one, then the other keeps the digits that
    their sum would round away. An empty row, or one of −inf only, gives (0, −inf).
    """
    largest = segment_max(values, offsets)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    return largest, segment_sum((values - largest[rows]).exp(), offsets).log()


def as_index(index: Tensor, size: int) -> Tensor:
    """Positions int64 from an integer index, or from a bool mask, which must have ``size`` elements."""
    if index.dtype != torch.bool:
        return index
    if index.shape != (size,):
        raise ValueError(f"a bool index must be [{size}], got {tuple(index.shape)}")
    return index.nonzero().squeeze(1)


def take_rows(offsets: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Choose rows ``index``: positions of their values (int64) and the new offsets (int64 [len(index) + 1])."""
    counts = offsets.diff()[index]
    new_offsets = offsets_from_counts(counts)
    shift = (offsets[:-1][index] - new_offsets[:-1]).repeat_interleave(counts)
    return torch.arange(shift.numel(), device=offsets.device) + shift, new_offsets
