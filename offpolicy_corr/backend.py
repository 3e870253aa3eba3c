"""The one place where PyTorch or Triton is chosen."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from . import torch_logprobs, torch_loss
from .weights import ClampedIS, FullIS, MaskedIS, PPOClip, TruncatedIS, Unweighted, WeightRule

BACKENDS = ("auto", "torch", "triton")
_FUSED_RULES = (Unweighted, FullIS, TruncatedIS, MaskedIS, ClampedIS, PPOClip)

Visit = Callable[[Tensor, torch_loss.Job, "Tensor | None"], Tensor]


def choose(backend: str, like: Tensor, rule: WeightRule | None = None) -> str:
    """``"torch"`` or ``"triton"``, for logits of the dtype and on the device of ``like``.

    ``"auto"`` takes Triton on a GPU where it can serve, PyTorch elsewhere.

    Raises:
        ValueError: an unknown name.
        RuntimeError: Triton was asked for and is not to be had; says why.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch":
        return "torch"
    obstacle = _triton_obstacle(like, rule)
    if backend == "triton" and obstacle:
        raise RuntimeError(f"backend='triton' cannot serve: {obstacle}. Use backend='torch' or 'auto'")
    return "torch" if obstacle or (backend == "auto" and like.device.type != "cuda") else "triton"


def visit(backend: str) -> Visit:
    """The function that computes loss, diagnostics and gradient of a block of logits."""
    if backend != "triton":
        return torch_loss.visit
    from .kernels import triton_loss

    return triton_loss.visit


def logprob_passes(backend: str) -> ModuleType:
    """The module whose ``forward`` and ``backward`` serve `selected_logprobs`."""
    if backend != "triton":
        return torch_logprobs
    from .kernels import triton_logprobs

    return triton_logprobs


def has_kernels() -> bool:
    """Triton is installed, and so are our kernels."""
    # a submodule of a package that is missing cannot be looked for
    return all(importlib.util.find_spec(name) for name in ("triton", "offpolicy_corr.kernels"))


def _triton_obstacle(like: Tensor, rule: WeightRule | None) -> str | None:
    if rule is not None and type(rule) not in _FUSED_RULES:
        return f"{type(rule).__name__} is not one of the fused weight rules"
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    if importlib.util.find_spec("offpolicy_corr.kernels") is None:
        return "this build has no kernels"
    if like.dtype == torch.float64:
        return "the kernels compute in float32 and the logits are float64"
    if like.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        where = f"the logits are on {like.device.type}"
        return f"{where}; set TRITON_INTERPRET=1 before importing to interpret kernels"
    return None
