"""The loss per token beside its log-probs and entropy: one forward pass, any combination of them differentiated."""

from __future__ import annotations

import itertools

import pytest
import torch

import offpolicy_corr as oc
from support import RULES, Problem


@pytest.mark.parametrize("kind", ["head", "support", "mixed"])
def test_any_combination_has_the_gradient_of_its_parts(kind: str) -> None:
    problem = Problem(size=6, kind=kind, seed=2)
    record, mask = problem.record(), torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.bool)
    correction = oc.Correction()
    factors = torch.randn(3, 6, dtype=torch.float64)
    for used in itertools.product((False, True), repeat=3):
        if not any(used):
            continue
        together, apart = (problem.logits.clone().requires_grad_() for _ in range(2))
        out = oc.token_losses(together, record, problem.advantages, correction=correction, loss_mask=mask)
        values = [v for v, use in zip((out.loss, out.logprobs, out.entropy), used, strict=True) if use]
        sum((f * v).sum() for f, v in zip(factors[list(used)], values, strict=True)).backward()  # type: ignore[union-attr]
        loss = oc.policy_loss(
            apart, record, problem.advantages, correction=correction, loss_mask=mask, reduction="none"
        ).loss
        logp, _, entropy = oc.selected_logprobs(
            apart, record.tokens, record.candidates, record.temperature, loss_mask=mask
        )
        expected = [v for v, use in zip((loss, logp, entropy), used, strict=True) if use]
        for got, want in zip(values, expected, strict=True):
            torch.testing.assert_close(got, want)
        sum((f * v).sum() for f, v in zip(factors[list(used)], expected, strict=True)).backward()  # type: ignore[union-attr]
        torch.testing.assert_close(together.grad, apart.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_every_rule_on_both_backends(rule: oc.WeightRule, backend: str) -> None:
    problem = Problem(size=5, kind="mixed", seed=7)
    record, logits = problem.record(), problem.logits.float()
    factors = torch.randn(3, 5)
    exact, ours = problem.logits.clone().requires_grad_(), logits.clone().requires_grad_()
    want = oc.token_losses(exact, record, problem.advantages, correction=oc.Correction(rule))
    got = oc.token_losses(ours, record, problem.advantages, correction=oc.Correction(rule), backend=backend)
    for out, factor in ((want, factors.double()), (got, factors)):
        (factor[0] * out.loss + factor[1] * out.logprobs + factor[2] * out.entropy).sum().backward()
    assert exact.grad is not None and ours.grad is not None
    torch.testing.assert_close(got.loss.double(), want.loss, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=2e-5, atol=2e-5)


def test_masked_garbage_and_dropped_sequences() -> None:
    problem = Problem(size=6, kind="mixed", seed=3)
    mask = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.bool)
    logits = problem.logits.clone()
    logits[2] = torch.nan
    leaf = logits.requires_grad_()
    ids, keep = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([True, False])
    out = oc.token_losses(
        leaf, problem.record(), problem.advantages, loss_mask=mask, sequence_ids=ids, sequence_keep=keep
    )
    assert (out.loss[2:] == 0).all() and (out.loss[:2] != 0).all()
    assert out.logprobs[2] == 0 and out.entropy[2] == 0 and (out.logprobs[3:] < 0).all()
    out.loss.sum().backward()
    assert leaf.grad is not None and (leaf.grad[2:] == 0).all() and (leaf.grad[:2] != 0).any()


def test_a_bad_record_raises_before_anything_is_computed() -> None:
    problem = Problem(size=6, seed=3)
    record = problem.record()
    assert record.logprobs is not None
    record.logprobs[4] = torch.nan
    with pytest.raises(oc.RecordError) as caught:
        oc.token_losses(problem.logits, record, problem.advantages)
    assert caught.value.token == 4
