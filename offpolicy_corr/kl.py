"""Arithmetic: estimators of a KL divergence from one sampled token.

For a token drawn from a, KL(a‖b) is estimated from d = log a − log b: k1 = d, k2 = d²/2, k3 = e^(−d) − 1 + d. Source:
J. Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html. ``low_var_kl`` is k3 as RL
frameworks cap it: at most 10, constant beyond. With d = log p − log p_ref they estimate the KL to a reference
policy; with d = log q − log p = −log r the mismatch KL(q‖p).
"""

from __future__ import annotations

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")
LARGEST_LOW_VAR_KL = 10.0


def kl_estimate(estimator: str, logprob_diff: Tensor) -> Tensor:
    """The estimate (nats), same shape as ``logprob_diff`` (d above, nats), differentiable.

    k3 goes through expm1: near d = 0, where most tokens are, e^(−d) − 1 + d would cancel to noise of either sign.
    """
    if estimator == "k1":
        return logprob_diff
    if estimator == "k2":
        return 0.5 * logprob_diff.square()
    value = torch.expm1(-logprob_diff) + logprob_diff
    return value.clamp(max=LARGEST_LOW_VAR_KL) if estimator == "low_var_kl" else value


def kl_derivative(estimator: str, logprob_diff: Tensor) -> Tensor:
    """Derivative of `kl_estimate` with respect to ``logprob_diff``."""
    if estimator == "k1":
        return torch.ones_like(logprob_diff)
    if estimator == "k2":
        return logprob_diff
    slope = -torch.expm1(-logprob_diff)
    if estimator == "low_var_kl":
        return torch.where(logprob_diff - slope > LARGEST_LOW_VAR_KL, 0.0, slope)
    return slope
