"""Adapter: a framework's loss reducer as one weight per token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Reducer = Callable[[Tensor], Tensor]


def reducer_weights(reducer: Reducer, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a linear reducer multiplies each of its ``size`` tokens by, ``[size]``: its gradient."""
    if size == 0:
        return torch.zeros(0, dtype=dtype, device=device)
    # own hooks: under activation recomputation the surrounding ones would run the loss again from inside itself
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        probe = torch.zeros(size, dtype=dtype, device=device, requires_grad=True)
        total = reducer(probe)
        (weights,) = torch.autograd.grad(total, probe)
    return weights.detach()
