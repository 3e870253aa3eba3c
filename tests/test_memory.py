"""Nothing of size [T, V] but the gradient: every tensor that an operation makes is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import offpolicy_corr as oc
from offpolicy_corr import lm_head, torch_loss
from support import Problem

T, V = 32, 64


class Allocations(TorchDispatchMode):
    """Sizes of the storages that appear, by the number of elements they could hold."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, int] = {}
        self.keep: list[torch.Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in self.storages:
                    self.storages[storage.data_ptr()] = storage.nbytes() // value.element_size()
                    self.keep.append(value)
        return result

    def large(self, known: torch.Tensor) -> int:
        """How many hold T·V elements or more, besides ``known``."""
        sizes = {ptr: n for ptr, n in self.storages.items() if ptr != known.untyped_storage().data_ptr()}
        return sum(n >= T * V for n in sizes.values())


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_loss, "_BLOCK_ON_CPU", 4 * V)
    monkeypatch.setattr(torch_loss, "_TILE_ON_CPU", 2 * V)
    monkeypatch.setattr(lm_head, "_LOGITS_ON_CPU", 4 * V)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_from_logits_the_gradient_is_the_only_large_tensor(
    dtype: torch.dtype, inplace: bool, factor: float
) -> None:
    problem = Problem(size=T, vocab=V, dtype=torch.float32)
    logits = problem.logits.to(dtype)
    inner = logits.requires_grad_().view(T, V)
    mask = torch.arange(T) % 5 != 0
    with Allocations() as seen:
        out = oc.policy_loss(
            inner, problem.record(), problem.advantages, loss_mask=mask, inplace=inplace, entropy_coef=0.1
        )
        (factor * out.loss).backward()
    # in place, the gradient *is* the logits' memory
    assert seen.large(logits) == (0 if inplace else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_factor_for_every_token_makes_no_further_large_tensor(dtype: torch.dtype) -> None:
    problem = Problem(size=256, vocab=V, dtype=torch.float32)
    logits = problem.logits.to(dtype).requires_grad_()
    with Allocations() as seen:
        out = oc.policy_loss(logits, problem.record(), problem.advantages, reduction="none")
        (out.loss * torch.linspace(0, 1, 256)).sum().backward()
    assert sum(n >= 256 * V for n in seen.storages.values()) <= 2  # the logits and their gradient


@pytest.mark.parametrize("needs", ["both", "hidden only"])
def test_from_hidden_no_large_tensor_exists(needs: str) -> None:
    problem = Problem(size=T, vocab=V, dtype=torch.float32, kind="head")
    states = torch.randn(T, 8, requires_grad=True)
    head = torch.randn(V, 8, requires_grad=needs == "both")
    with Allocations() as seen:
        oc.policy_loss_from_hidden(states, head, problem.record(), problem.advantages).loss.backward()
    assert seen.large(states) == 0


def test_selected_logprobs_makes_one_large_tensor_in_its_backward_and_none_before() -> None:
    problem = Problem(size=T, vocab=V, dtype=torch.float32)
    leaf = problem.logits.requires_grad_()
    with Allocations() as seen:
        logp, candidates, _ = oc.selected_logprobs(
            leaf, problem.tokens, problem.candidates, problem.temperature
        )
        assert seen.large(leaf) == 0
        (logp.sum() + candidates.sum()).backward()
    assert seen.large(leaf) == 1
