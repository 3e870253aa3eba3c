"""Ranks of a process group in one process: threads of which one runs at a time, and collectives between them.

Triton's interpreter has global state, so ranks take turns: each runs until its next collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

_PATIENCE = 120.0  # seconds; a rank that died leaves the others waiting


@dataclass
class Ranks:
    """``size`` ranks; `run` calls a function once as each of them."""

    size: int
    turn: threading.Condition = field(default_factory=threading.Condition)
    given: list[dict[int, Tensor]] = field(default_factory=list)

    def run(self, body: Callable[[Group], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """What ``body(group)`` returns on each rank. Raises what the first rank that failed raised."""
        for name in ("all_reduce", "get_rank", "get_world_size"):
            monkeypatch.setattr(dist, name, getattr(Group, name))
        results: list[Any] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size

        def rank_main(rank: int) -> None:
            with self.turn:
                try:
                    results[rank] = body(Group(self, rank))
                except BaseException as error:
                    errors[rank] = error

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if error is not None:
                raise error
        return results


@dataclass
class Group:
    """One rank's handle of the group, and what stands in for torch's functions of a group."""

    ranks: Ranks
    rank: int
    calls: int = 0

    @staticmethod
    def get_rank(group: Group) -> int:
        return group.rank

    @staticmethod
    def get_world_size(group: Group) -> int:
        return group.ranks.size

    @staticmethod
    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        ranks, call = group.ranks, group.calls
        group.calls += 1
        while len(ranks.given) <= call:
            ranks.given.append({})
        ranks.given[call][group.rank] = tensor.clone()
        ranks.turn.notify_all()
        assert ranks.turn.wait_for(lambda: len(ranks.given[call]) == ranks.size, _PATIENCE), (
            "a rank is missing"
        )
        parts = torch.stack([ranks.given[call][rank] for rank in range(ranks.size)])
        tensor.copy_(parts.amax(0) if op == dist.ReduceOp.MAX else parts.sum(0))
