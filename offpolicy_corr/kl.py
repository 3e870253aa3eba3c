"""KL to a reference policy, estimated on the sampled token from d = log p − log p_ref.

k1 = d, k2 = d²/2, k3 = e^(−d) − 1 + d. Source: J. Schulman, "Approximating KL divergence", 2020,
http://joschu.net/blog/kl-approx.html. ``low_var_kl`` is k3 as RL frameworks cap it: at most 10, constant beyond.
Differentiated as they stand, unweighted by the importance ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")
LARGEST_LOW_VAR_KL = 10.0


def kl_value(estimator: str, gap: Tensor) -> Tensor:
    """The estimate, same shape as ``gap`` (nats), differentiable."""
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return 0.5 * gap.square()
    value = torch.expm1(-gap) + gap
    return value.clamp(max=LARGEST_LOW_VAR_KL) if estimator == "low_var_kl" else value


def kl_slope(estimator: str, gap: Tensor) -> Tensor:
    """Derivative of `kl_value` in ``gap``."""
    if estimator == "k1":
        return torch.ones_like(gap)
    if estimator == "k2":
        return gap
    slope = -torch.expm1(-gap)
    return torch.where(gap - slope > LARGEST_LOW_VAR_KL, 0.0, slope) if estimator == "low_var_kl" else slope
