"""`selected_logprobs` against a dense log-softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import offpolicy_corr as oc
from support import Problem


def dense(problem: Problem, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same three tensors from log-softmax over allowed columns, differentiable by autograd."""
    heat = problem.temperature[:, None] if isinstance(problem.temperature, Tensor) else problem.temperature
    ids, _ = problem.candidates.to_padded()
    inside = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)
    allowed = inside | ~problem.complete[:, None]
    logp = (logits / heat).masked_fill(~allowed, -1e30).log_softmax(1)
    token = logp.gather(1, problem.tokens[:, None]).squeeze(1)
    return token, logp.gather(1, ids).reshape(-1), -(logp.exp() * logp).sum(1)


@pytest.mark.parametrize("kind", ["head", "support", "mixed"])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients(kind: str, masked: bool) -> None:
    problem = Problem(kind=kind, seed=9)
    mask = torch.tensor([True, False, True, True, False, True]) if masked else torch.ones(6, dtype=torch.bool)
    owned = mask[problem.candidates.rows]
    make = torch.Generator().manual_seed(1)
    upstream = [torch.randn(n, generator=make, dtype=torch.float64) for n in (6, 24, 6)]
    results = []
    for ours in (True, False):
        leaf = problem.logits.clone().requires_grad_()
        if ours:
            spoiled = torch.where(mask[:, None], leaf, torch.nan)
            values = oc.selected_logprobs(
                spoiled, problem.tokens, problem.candidates, problem.temperature, loss_mask=mask
            )
        else:
            values = tuple(
                torch.where(m, v, 0.0) for m, v in zip((mask, owned, mask), dense(problem, leaf), strict=True)
            )
        sum((u * v).sum() for u, v in zip(upstream, values, strict=True)).backward()
        results.append((*[v.detach() for v in values], leaf.grad))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("reduce", ["sum", "expanded", "strided", "one output"])
def test_upstream_gradients_of_any_layout(reduce: str) -> None:
    problem = Problem(seed=9)
    leaf = problem.logits.clone().requires_grad_()
    grads = []
    for values in (
        oc.selected_logprobs(leaf, problem.tokens, problem.candidates, problem.temperature),
        dense(problem, leaf),
    ):
        logp, candidates, entropy = values
        scalar = {
            "sum": logp.sum() + candidates.sum() + entropy.sum(),
            "expanded": (logp.expand(3, 6) * 2).sum(),
            "strided": logp[::2].sum() + candidates[1::3].sum(),
            "one output": entropy.sum(),
        }[reduce]
        grads.append(torch.autograd.grad(scalar, leaf)[0])
    torch.testing.assert_close(*grads, atol=1e-12, rtol=1e-10)


def test_without_candidates() -> None:
    problem = Problem(seed=9, kind="head", temperature=0.5)
    logp, candidates, entropy = oc.selected_logprobs(problem.logits, problem.tokens, temperature=0.5)
    expected = dense(problem, problem.logits)
    torch.testing.assert_close(logp, expected[0])
    torch.testing.assert_close(entropy, expected[2])
    assert candidates.shape == (0,)


def test_gradcheck() -> None:
    problem = Problem(size=4, vocab=7, seed=9)
    leaf = problem.logits.clone().requires_grad_()
    call = lambda z: oc.selected_logprobs(z, problem.tokens, problem.candidates, problem.temperature)
    assert torch.autograd.gradcheck(call, leaf)


def test_logits_written_to_before_the_backward_pass_are_noticed() -> None:
    problem = Problem(seed=9)
    inner = problem.logits.clone().requires_grad_() * 1.0
    logp, _, _ = oc.selected_logprobs(inner, problem.tokens, problem.candidates, problem.temperature)
    inner.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


def test_minus_infinity_is_a_log_prob() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    logp, _, entropy = oc.selected_logprobs(logits, torch.tensor([1]))
    assert logp.item() == -torch.inf
    assert entropy.item() == pytest.approx(0.6931472)


def test_bad_arguments() -> None:
    problem = Problem(seed=9)
    with pytest.raises(oc.RecordError, match="outside"):
        oc.selected_logprobs(problem.logits, problem.tokens + 11)
    with pytest.raises(oc.RecordError, match="absent from its complete set"):
        oc.selected_logprobs(
            problem.logits, (problem.tokens + 1) % 11, Problem(seed=9, kind="support", k=1).candidates
        )
    with pytest.raises(ValueError, match=r"tokens must be \[T\]"):
        oc.selected_logprobs(problem.logits, problem.tokens[:2])
    with pytest.raises(ValueError, match=r"floating \[T, V\]"):
        oc.selected_logprobs(problem.tokens, problem.tokens)
    with pytest.raises(oc.RecordError, match="temperature"):
        oc.selected_logprobs(problem.logits, problem.tokens, temperature=0.0)
