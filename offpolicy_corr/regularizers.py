"""KL to a reference policy, estimated on the sampled token from d = log p − log p_ref.

k1 = d, k2 = d²/2, k3 = e^(−d) − 1 + d. Source: J. Schulman, "Approximating KL divergence", 2020,
http://joschu.net/blog/kl-approx.html. Differentiated as they stand, unweighted by the importance ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_value(estimator: str, gap: Tensor) -> Tensor:
    """The estimate, same shape as ``gap`` (nats), differentiable."""
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return 0.5 * gap.square()
    return torch.expm1(-gap) + gap


def kl_slope(estimator: str, gap: Tensor) -> Tensor:
    """Derivative of `kl_value` in ``gap``."""
    if estimator == "k1":
        return torch.ones_like(gap)
    if estimator == "k2":
        return gap
    return -torch.expm1(-gap)
