"""Public: sequence-level guards, which sequences to drop whole, for errors that no token-wise correction can see.

Every guard returns bool keep ``[number of sequences]``, indexed by sequence id (``max(sequence_ids) + 1``), for
`policy_loss`'s ``sequence_keep``. A sequence without a trained token is kept. Guards compose with ``&``.

Means over long sequences, not products, should be the default: 300 tokens at a mean log-ratio of 0.005 have a
geometric mean of 1.005 and a product of 4.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .numerics import check_band, in_band
from .records.errors import RecordError
from .records.record import SamplerRecord
from .records.validation import as_mask
from .records.weight_versions import lag_of


def geometric_mean(
    log_ratio: Tensor, sequence_ids: Tensor, loss_mask: Tensor | None, low: float, high: float
) -> Tensor:
    """Keep where exp(mean log r) lies in ``[low, high]``, inclusive. The ratio of GSPO, as a mask.

    Args:
        log_ratio: log p − log q of each token, ``[T]``, nats (``out.diagnostics.log_ratio``).
        sequence_ids: int ``[T]``, ≥ 0 on trained tokens; need not be contiguous.
        loss_mask: bool or {0, 1} ``[T]``, or None for all tokens.
        low, high: 0 ≤ low ≤ high; 0 and inf open a side.

    Source: https://arxiv.org/abs/2507.18071 for the ratio.
    """
    check_band(low, high)
    total, count = _sums(log_ratio, sequence_ids, loss_mask)
    return in_band(total / count.clamp(min=1), low, high) | (count == 0)


def product(
    log_ratio: Tensor, sequence_ids: Tensor, loss_mask: Tensor | None, low: float, high: float
) -> Tensor:
    """Keep where the product of ratios exp(Σ log r) lies in ``[low, high]``. Arguments as `geometric_mean`."""
    check_band(low, high)
    total, count = _sums(log_ratio, sequence_ids, loss_mask)
    return in_band(total, low, high) | (count == 0)


def outlier(
    log_ratio: Tensor, sequence_ids: Tensor, loss_mask: Tensor | None, low: float, high: float
) -> Tensor:
    """Keep where *every* token's ratio lies in ``[low, high]``. Arguments as `geometric_mean`."""
    check_band(low, high)
    outside = ~in_band(log_ratio, low, high)
    total, _ = _sums(outside.to(log_ratio.dtype), sequence_ids, loss_mask)
    return total == 0


def off_policy(
    log_ratio: Tensor, advantages: Tensor, sequence_ids: Tensor, loss_mask: Tensor | None, delta: float
) -> Tensor:
    """Drop where the advantage is negative and mean(log q − log p) > ``delta``: off-policy sequence masking.

    Args:
        advantages: ``[T]``; the sign of a sequence is that of its mean over trained tokens.
        delta: threshold on the mean, nats, ≥ 0; a mean equal to it is kept.

    The other arguments as `geometric_mean`. Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556.
    """
    if not delta >= 0:
        raise ValueError(f"delta must be >= 0, got {delta}")
    total, count = _sums(log_ratio, sequence_ids, loss_mask)
    advantage, _ = _sums(advantages, sequence_ids, loss_mask)
    far = -total / count.clamp(min=1) > delta
    return ~((advantage < 0) & (far | total.isnan()))


def staleness(
    record: SamplerRecord,
    sequence_ids: Tensor,
    current_version: int,
    max_lag: int,
    loss_mask: Tensor | None = None,
) -> Tensor:
    """Drop sequences with a token drawn by weights more than ``max_lag`` versions behind ``current_version``.

    Masked tokens, prompts and tool answers among them, do not count.

    Raises:
        RecordError: the record has no weight versions, or a token's is undeclared (−1) or lies in the future.
    """
    if max_lag < 0:
        raise ValueError(f"max_lag must be >= 0, got {max_lag}")
    try:
        lag = lag_of(record, current_version, loss_mask)
    except RecordError as error:
        raise error.at(sample=None if error.token is None else int(sequence_ids[error.token])) from None
    stale, _ = _sums((lag > max_lag).double(), sequence_ids, loss_mask)
    return stale == 0


def _sums(values: Tensor, sequence_ids: Tensor, loss_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum over each sequence's trained tokens and their count, fp64 ``[number of sequences]``."""
    if values.shape != sequence_ids.shape:
        raise ValueError(
            f"lengths disagree: {tuple(values.shape)} and sequence_ids {tuple(sequence_ids.shape)}"
        )
    trained = as_mask(loss_mask, sequence_ids, check=True)
    trained = torch.ones_like(sequence_ids, dtype=torch.bool) if trained is None else trained
    if bool((trained & (sequence_ids < 0)).any()):
        raise ValueError("a trained token has a negative sequence id: number the sequences from 0")
    ids = sequence_ids.clamp(min=0)  # padding may be −1
    size = int(ids.max()) + 1 if ids.numel() else 0
    clean = torch.where(trained, values.detach().double(), 0.0)
    zeros = torch.zeros(size, dtype=torch.float64, device=values.device)
    return zeros.index_add(0, ids, clean), zeros.index_add(0, ids, trained.double())
