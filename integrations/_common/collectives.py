"""Adapter: collectives of a context-parallel group, and errors that all its ranks raise together."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
_AGREED = "_raised_on_every_rank"


def all_reduce(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over the group, in place; the values themselves where there is no group."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def raise_together(
    compute: Callable[[], T], group: dist.ProcessGroup | None, device: torch.device | str
) -> T:
    """``compute()``; an error that it raises on one rank is raised on every rank of the group.

    Without this, the peers of a rank with a bad record would wait for it in their next collective until the time
    limit. Costs an all-reduce of one number, and waits for ``device`` where the group does. The error raised is that
    of the lowest failing rank; where ``compute`` itself contains collectives of this group, they must be behind a
    `raise_together` of their own, so that no rank is missing in them.
    """
    if group is None:
        return compute()
    result: T | None = None
    error: Exception | None = None
    try:
        result = compute()
    except Exception as found:
        if getattr(found, _AGREED, False):
            raise
        error = found
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if not bool(failed):
        return result  # type: ignore[return-value]
    first = _first_error(error, group)
    setattr(first, _AGREED, True)
    raise first from None


def _first_error(error: Exception | None, group: dist.ProcessGroup) -> Exception:
    """The error of the lowest failing rank: the own one there, a copy elsewhere."""
    errors: list[Exception | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, _portable(error), group=group)
    rank = next(rank for rank, found in enumerate(errors) if found is not None)
    if error is not None and rank == dist.get_rank(group):
        return error
    first = errors[rank]
    assert first is not None
    return first


def _portable(error: Exception | None) -> Exception | None:
    """The error, or one that says the same, where it does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
