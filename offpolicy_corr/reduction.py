"""Mathematics: from token losses to one number, what each token's loss is divided by."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

REDUCTIONS = ("token-mean", "sequence-mean", "sum", "none")


def check_reduction(
    reduction: str, denominator: str | float | Tensor | None, sequence_ids: Tensor | None
) -> None:
    """Refuse settings that contradict each other or would have no effect.

    Raises:
        ValueError: unknown names, a denominator that is not positive or is not used, missing sequence ids.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if reduction == "sequence-mean" and sequence_ids is None:
        raise ValueError("reduction='sequence-mean' needs sequence_ids, an int [T] tensor")
    if denominator is None:
        return
    if reduction in ("sum", "none"):
        raise ValueError(f"reduction={reduction!r} does not divide: leave denominator=None")
    if denominator == "kept" if isinstance(denominator, str) else False:
        if reduction != "token-mean":
            raise ValueError("denominator='kept' counts tokens: use it with reduction='token-mean'")
        return
    if isinstance(denominator, str):
        raise ValueError(f"denominator must be None, 'kept' or a positive number, got {denominator!r}")
    if isinstance(denominator, bool):
        raise ValueError("denominator must be None, 'kept' or a positive number, got a bool")
    if isinstance(denominator, Tensor) and denominator.dim() != 0:
        raise ValueError(f"denominator must be 0-dimensional, got shape {tuple(denominator.shape)}")
    on_host = not isinstance(denominator, Tensor) or denominator.device.type == "cpu"
    if on_host and not 0 < float(denominator) < math.inf:
        raise ValueError(f"denominator must be positive and finite, got {float(denominator)}")


def token_scale(
    reduction: str,
    tokens: Tensor,
    trained: Tensor | None,
    denominator: str | float | Tensor | None = None,
    sequence_ids: Tensor | None = None,
    sequence_keep: Tensor | None = None,
) -> Tensor:
    """What multiplies each token's loss, float64 ``[T]``: 0 on masked tokens and on dropped sequences.

    A dropped sequence stays in the denominator. With ``denominator="kept"`` the count is not known before the
    weights are, so the scale is 1 and the caller divides.
    """
    mask = torch.ones_like(tokens, dtype=torch.float64) if trained is None else trained.double()
    scale = mask
    if reduction == "token-mean" and not isinstance(denominator, str):
        if denominator is None:
            denominator = max(tokens.numel(), 1) if trained is None else mask.sum().clamp(min=1.0)
        scale = mask / denominator
    elif reduction == "sequence-mean":
        assert sequence_ids is not None
        ids = sequence_ids if trained is None else torch.where(trained, sequence_ids, 0)
        index = dense_ids(ids)
        lengths = torch.zeros_like(mask).index_add_(0, index, mask)
        assert not isinstance(denominator, str)
        sequences = (lengths > 0).sum().clamp(min=1) if denominator is None else denominator
        scale = mask / lengths.clamp(min=1.0)[index] / sequences
    if sequence_keep is not None:
        assert sequence_ids is not None
        ids = sequence_ids if trained is None else torch.where(trained, sequence_ids, 0)
        scale = torch.where(sequence_keep[ids], scale, 0.0)
    return scale


def dense_ids(ids: Tensor) -> Tensor:
    """Map ids to 0 … S−1, int64 ``[T]``, like ``torch.unique(return_inverse=True)`` but without a host sync."""
    ordered, order = ids.sort()
    index = (ordered.diff(prepend=ordered[:1]) != 0).cumsum(0)
    return torch.empty_like(index).index_copy_(0, order, index)


def global_denominator(loss_mask: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """Count of trained tokens over all ranks, a float64 0-d tensor of at least 1.

    Every rank divides by it and the ranks' gradients are *added*; under DDP, which averages, multiply the loss
    by the world size. Without ``torch.distributed`` it is the local count.

    Args:
        loss_mask: bool or {0, 1}, any shape: this rank's tokens, over all of its micro-batches.
        process_group: the data-parallel group; None is the default group, where one exists.
    """
    count = (loss_mask != 0).sum().double()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(count, group=process_group)
    return count.clamp(min=1.0)
