"""What each token counts for: Miles' reducer as weights, sequence guards, and the share of dropped tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offpolicy_corr import guards
from offpolicy_corr.result import TokenDiagnostics

from .host import all_reduce
from .layout import Layout
from .settings import Settings

if TYPE_CHECKING:
    from .loss import Inputs


def reducer_weights(
    reducer: Callable[[Tensor], Tensor], layout: Layout, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What the reducer multiplies every token of the CP-local lists by, ``[C]``: its gradient, as it is linear."""
    size = len(layout.listed())
    if size == 0:
        return torch.zeros(0, dtype=dtype, device=device)
    # own hooks: under activation recomputation the surrounding ones would run this loss again from inside itself
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        probe = torch.zeros(size, dtype=dtype, device=device, requires_grad=True)
        total = reducer(probe)
        (weights,) = torch.autograd.grad(total, probe)
    return weights.detach()


def keep_sequences(
    settings: Settings, layout: Layout, inputs: Inputs, tokens: TokenDiagnostics, group: Any
) -> Tensor | None:
    """Which samples the guards keep, bool ``[B]``, the same on every context-parallel rank; None without guards."""
    if not settings.guards:
        return None
    device = inputs.weights.device
    log_ratio, advantages = whole_responses([tokens.log_ratio, inputs.advantages], layout, inputs, group)
    sequence, mask = layout.samples().to(device), inputs.full_mask.to(device)
    keep = torch.ones(len(layout.responses), dtype=torch.bool, device=device)
    for name, bounds in settings.guards:
        values = dict(bounds)
        if name == "staleness":
            assert inputs.full_lag is not None
            stale = (inputs.full_lag.to(device) > values["max_lag"]) & mask
            kept = torch.bincount(sequence[stale], minlength=keep.numel()) == 0
        elif name == "off_policy":
            kept = guards.off_policy(log_ratio, advantages, sequence, mask, **values)
        else:
            kept = getattr(guards, name)(log_ratio, sequence, mask, **values)
        keep[: kept.numel()] &= kept  # trailing samples without a response have no verdict
    return keep


def share_of_kept(layout: Layout, inputs: Inputs, kept: Tensor, group: Any) -> Tensor:
    """By what a token's weight grows when its sample's dropped tokens leave the denominator, ``[C]``.

    A sample with nothing left has nothing to grow.
    """
    (whole,) = whole_responses([(kept & inputs.trained).to(inputs.weights.dtype)], layout, inputs, group)
    trained = inputs.full_mask.to(whole.device, whole.dtype)
    ratio = layout.per_sample(trained) / layout.per_sample(whole).clamp(min=1.0)
    return ratio[inputs.held.sample.to(ratio.device)]


def whole_responses(columns: list[Tensor], layout: Layout, inputs: Inputs, group: Any) -> list[Tensor]:
    """Held tokens' numbers laid out over full responses end to end, joined over context-parallel ranks."""
    stacked = torch.stack(columns)
    full = stacked.new_zeros(len(columns), sum(layout.responses))
    full[:, inputs.held.flat(layout).to(full.device)] = stacked
    return list(all_reduce(full, group).unbind(0))
