"""Adapter: candidates of some tokens of a response, out of arrays over the whole response.

Rows are selected first and turned into CSR form after, so that a context-parallel rank pays for its own rows alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offpolicy_corr.csr import offsets_from_counts, take_rows
from offpolicy_corr.records.candidates import CandidateSet


def heads_at(ids: Tensor, logprobs: Tensor, index: Tensor) -> CandidateSet:
    """Heads of the tokens ``index`` (int64) out of tables ``[R, K]``; slots with a negative id are left out."""
    return CandidateSet.from_topk(ids[index], logprobs[index])


def supports_at(ids: Tensor, offsets: Tensor, logprobs: Tensor | None, index: Tensor) -> CandidateSet:
    """Supports of the tokens ``index`` (int64) out of a CSR record: ``ids`` ``[nnz]``, ``offsets`` ``[R + 1]``."""
    position, row_offsets = take_rows(offsets, index)
    row_logprobs = None if logprobs is None else logprobs[position]
    return CandidateSet.from_support(ids[position], row_offsets, row_logprobs)


def scatter_rows(candidates: CandidateSet, rows: Tensor, size: int) -> CandidateSet:
    """The set's rows at the ascending ``rows`` (int64) of ``size`` rows; all others are empty heads."""
    counts = torch.zeros(size, dtype=torch.int64, device=rows.device)
    counts[rows] = candidates.offsets.diff()
    complete = torch.zeros(size, dtype=torch.bool, device=rows.device)
    complete[rows] = candidates.complete
    return CandidateSet(candidates.ids, candidates.logprobs, offsets_from_counts(counts), complete)
