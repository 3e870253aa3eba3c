"""Row passes: the one place where PyTorch or Triton is chosen."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from . import torch_logprobs, torch_loss
from .correction import RULES
from .loss_inputs import LossProblem
from .weights import WeightRule

BACKENDS = ("auto", "torch", "triton")

LossAndGrad = Callable[[Tensor, LossProblem, "Tensor | None"], Tensor]


def choose(backend: str, device_ref: Tensor, rule: WeightRule | None = None) -> str:
    """``"torch"`` or ``"triton"``, for logits of the dtype and on the device of ``device_ref``.

    ``"auto"`` takes Triton on a GPU where it can serve, PyTorch elsewhere.

    Raises:
        ValueError: an unknown name.
        RuntimeError: Triton was asked for and cannot serve; says why.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch":
        return "torch"
    obstacle = _triton_obstacle(device_ref, rule)
    if backend == "triton" and obstacle:
        raise RuntimeError(f"backend='triton' cannot serve: {obstacle}. Use backend='torch' or 'auto'")
    return "torch" if obstacle or (backend == "auto" and device_ref.device.type != "cuda") else "triton"


def loss_and_grad(backend: str) -> LossAndGrad:
    """The function that computes loss, diagnostics and gradient of a block of logits."""
    if backend != "triton":
        return torch_loss.loss_and_grad
    from .kernels import triton_loss

    return triton_loss.loss_and_grad


def logprob_passes(backend: str) -> ModuleType:
    """The module whose ``forward`` and ``backward`` serve `selected_logprobs`."""
    if backend != "triton":
        return torch_logprobs
    from .kernels import triton_logprobs

    return triton_logprobs


def rescale_(backend: str, gradient: Tensor, factor: Tensor) -> Tensor:
    """``gradient`` times the scalar ``factor``, in place; never waits for a device."""
    if factor.device.type == "cpu":
        number = float(factor)
        return gradient if number == 1.0 else gradient.mul_(number)
    if backend == "triton":
        # reads the factor on the device and returns at once where it is 1
        from .kernels.rescale import scale_

        return scale_(gradient, factor)
    # a half-precision row times an fp32 factor passes through fp32: a few rows at a time, not [T, V]
    for rows in gradient.split(64):
        rows.mul_(factor)
    return gradient


def _triton_obstacle(device_ref: Tensor, rule: WeightRule | None) -> str | None:
    if rule is not None and type(rule) not in RULES.values():
        return f"{type(rule).__name__} is not one of the fused weight rules"
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    if importlib.util.find_spec("offpolicy_corr.kernels") is None:
        return "this build has no kernels"
    if device_ref.dtype == torch.float64:
        return "the kernels compute in float32 and the logits are float64"
    if device_ref.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        where = f"the logits are on {device_ref.device.type}"
        return f"{where}; set TRITON_INTERPRET=1 before importing to interpret kernels"
    return None
