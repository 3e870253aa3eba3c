"""Arithmetic: elementwise functions that several layers share, and the dtype that the library computes in."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def safe_mul(factor: Tensor, values: Tensor) -> Tensor:
    """factor · values, exactly 0 where factor is 0, even if values is infinite or NaN."""
    return torch.where(factor == 0, torch.zeros_like(values), factor * values)


def entropy_slope(logp: Tensor, entropy: Tensor) -> Tensor:
    """p_v (log p_v + H) = −∂H/∂z_v; 0 where p_v is 0."""
    p = logp.exp()
    return safe_mul(p, logp) + p * entropy


def log_bound(bound: float) -> float:
    """log of a bound on a ratio; −inf for 0, which leaves that side open."""
    return math.log(bound) if bound > 0 else -math.inf


def inverse_bound(bound: float) -> float:
    """1 / bound; inf for 0."""
    return 1.0 / bound if bound > 0 else math.inf


def check_band(low: float, high: float) -> None:
    """Raise ValueError unless 0 ≤ low ≤ high and low is finite."""
    if not 0.0 <= low <= high or math.isinf(low):
        raise ValueError(
            f"bounds must satisfy 0 <= low <= high with a finite low, got low={low}, high={high}"
        )


def in_band(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Whether the ratio lies in ``[low, high]``, bool, tested on log r against the rounded logarithms of the bounds.

    0 and inf leave a side open; a NaN ratio is outside.
    """
    return (log_ratio >= log_bound(low)) & (log_ratio <= log_bound(high))
