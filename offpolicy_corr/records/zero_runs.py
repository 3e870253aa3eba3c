"""Records: runs of exact 0.0 at the end of a sample, which frameworks fill in for missing log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..csr import segment_max
from .record import SamplerRecord
from .validation import as_mask

_CERTAIN = -1e-6  # a candidate at least this likely explains a log-prob of 0


def unsupported_zero_runs(
    record: SamplerRecord, loss_mask: Tensor | None = None, sequence_ids: Tensor | None = None, run: int = 2
) -> Tensor:
    """Tokens of runs of exact 0.0 that end a sample and that no candidate confirms: bool ``[T]``.

    Frameworks fill missing values with 0.0, and 0.0 is also a true log q where one candidate survived. A
    support of one id, or an entry of at least −1e-6 among the candidates, confirms it. A run has at least ``run``
    tokens.
    """
    found = torch.zeros_like(record.tokens, dtype=torch.bool)
    trained = as_mask(loss_mask, record.tokens)
    trained = ~found if trained is None else trained
    suspicious = trained if record.logprobs is None else trained & (record.logprobs == 0)
    if record.logprobs is None or not bool(suspicious.any()):
        return found
    suspicious = suspicious & ~_confirmed(record)
    sequence = torch.zeros_like(record.tokens) if sequence_ids is None else sequence_ids
    order = sequence.argsort(stable=True)
    order = order[trained[order]]
    zero, position = suspicious[order], torch.arange(len(order), device=order.device)
    _, sample = torch.unique_consecutive(sequence[order], return_inverse=True)
    other = torch.where(zero, -1, position)
    last_other = torch.full_like(other, -1).scatter_reduce(0, sample, other, "amax")  # one slot per sample
    trailing = zero & (position > last_other[sample])
    length = torch.zeros_like(other).index_add(0, sample, trailing.long())
    found[order] = trailing & (length[sample] >= run)
    return found


def _confirmed(record: SamplerRecord) -> Tensor:
    candidates = record.candidates
    if candidates is None:
        return torch.zeros_like(record.tokens, dtype=torch.bool)
    single = candidates.complete & (candidates.offsets.diff() == 1)
    if candidates.logprobs is None:
        return single
    return single | (segment_max(candidates.logprobs, candidates.offsets) >= _CERTAIN)
