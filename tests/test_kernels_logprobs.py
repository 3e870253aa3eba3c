"""`selected_logprobs` on the device against its PyTorch twin in fp64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from offpolicy_corr.benchmarks.tile_choice import using_tiles
from offpolicy_corr.kernels import launch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import offpolicy_corr as oc
from on_device import DEVICE, MARKS, moved
from support import Problem

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with using_tiles(launch.Tiles(16, 4, 4)):
        yield


def both(
    logits: Tensor, record: oc.SamplerRecord, backend: str, upstream: tuple[Tensor, ...], **options: Any
) -> tuple[tuple[Tensor, ...], Tensor]:
    """(logp, candidate_logp, entropy) and the gradient of their product with ``upstream``."""
    leaf = logits.detach().requires_grad_()
    outputs = oc.selected_logprobs(
        leaf, record.tokens, record.candidates, record.temperature, backend=backend, **options
    )
    total = sum((u.to(o) * o).sum() for u, o in zip(upstream, outputs, strict=True))
    total.backward()
    assert leaf.grad is not None
    return outputs, leaf.grad


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("kind", ["head", "support", "mixed"])
def test_log_probs_entropy_and_gradient(kind: str, masked: bool) -> None:
    problem = Problem(size=6, vocab=75, kind=kind, seed=21, k=9)
    record = moved(problem.record())
    make = torch.Generator().manual_seed(2)
    upstream = tuple(torch.randn(n, generator=make).to(DEVICE) for n in (6, 54, 6))
    mask = torch.tensor([True, False, True, True, True, False], device=DEVICE) if masked else None
    logits = problem.logits.float().to(DEVICE)
    ours, gradient = both(logits, record, "triton", upstream, loss_mask=mask)
    exact, expected = both(logits.double(), record, "torch", upstream, loss_mask=mask)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-5)


def test_without_candidates_and_behind_padding_columns() -> None:
    problem = Problem(size=5, vocab=40, kind="head", seed=3)
    record = replace(moved(problem.record()), candidates=None)
    logits = torch.full((5, 47), torch.nan, device=DEVICE)
    logits[:, :40] = problem.logits.float()
    upstream = (
        torch.ones(5, device=DEVICE),
        torch.zeros(0, device=DEVICE),
        torch.full((5,), 0.3, device=DEVICE),
    )
    ours, gradient = both(logits, record, "triton", upstream, vocab_size=40)
    exact, expected = both(logits.double(), record, "torch", upstream, vocab_size=40)
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-5)
    assert (gradient[:, 40:] == 0).all()


def test_only_one_output_is_used() -> None:
    problem = Problem(size=5, vocab=40, kind="mixed", seed=3)
    record, logits = moved(problem.record()), problem.logits.float().to(DEVICE)
    for chosen in range(3):
        grads = {}
        for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
            leaf = logits.detach().to(dtype).requires_grad_()
            outputs = oc.selected_logprobs(
                leaf, record.tokens, record.candidates, record.temperature, backend=backend
            )
            outputs[chosen].sum().backward()
            grads[backend] = leaf.grad
        torch.testing.assert_close(grads["triton"].double(), grads["torch"], rtol=1e-5, atol=1e-5)


class Slopes(TorchDispatchMode):
    """Notes for every backward launch whether it was given the entropy's slope."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "offpolicy_corr::row_gradient":
            names = [argument.name for argument in func._schema.arguments]
            self.given.append(args[names.index("slopes")] is not None)
        return func(*args, **(kwargs or {}))


def test_an_entropy_that_nobody_differentiates_costs_nothing() -> None:
    problem = Problem(size=5, vocab=40, kind="mixed", seed=3)
    record, leaf = moved(problem.record()), problem.logits.float().to(DEVICE).requires_grad_()
    for use, sloped in ((lambda o: o[0].sum(), False), (lambda o: o[0].sum() + o[2].sum(), True)):
        outputs = oc.selected_logprobs(leaf, record.tokens, record.candidates, backend="triton")
        with Slopes() as slopes:
            use(outputs).backward()
        assert slopes.given == [sloped]


WRITES = {
    "whole": lambda z: z.detach().mul_(2.0),
    "one element of a view": lambda z: z.detach()[2].narrow(0, 3, 1).zero_(),
    "operator on the tensor": lambda z: torch.no_grad()(z.add_)(1.0),
    "through out=": lambda z: torch.exp(z.detach(), out=z.detach()),
}


def another_loss_in_place(problem: Problem, record: oc.SamplerRecord) -> Callable[[Tensor], Any]:
    advantages = problem.advantages.to(DEVICE)
    return lambda z: oc.policy_loss(z, record, advantages, backend="triton", inplace=True)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("name", [*WRITES, "another loss, in place"])
def test_logits_that_were_written_to_in_between_are_refused_or_kept_as_a_copy(
    name: str, backend: str
) -> None:
    problem = Problem(size=5, vocab=40, kind="mixed", seed=3)
    record = moved(problem.record())
    write = WRITES.get(name) or another_loss_in_place(problem, record)
    grads = []
    for copy, written in ((False, False), (True, True), (False, True)):
        leaf = problem.logits.float().to(DEVICE).requires_grad_()
        logits = leaf * 1.0
        logp, _, _ = oc.selected_logprobs(
            logits, record.tokens, record.candidates, record.temperature, backend=backend, copy=copy
        )
        if written:
            write(logits)
        if written and not copy:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                logp.sum().backward()
        else:
            logp.sum().backward()
            grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_nothing_of_the_size_of_the_logits_is_saved_but_the_logits() -> None:
    problem = Problem(size=6, vocab=200, kind="mixed", seed=3, k=5)
    record = moved(problem.record())
    leaf = problem.logits.float().to(DEVICE).requires_grad_()
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        oc.selected_logprobs(leaf, record.tokens, record.candidates, record.temperature, backend="triton")
    large = [t for t in saved if t.numel() >= leaf.numel()]
    assert len(large) == 1 and large[0].data_ptr() == leaf.data_ptr()
