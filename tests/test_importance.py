"""Weights alone, as a framework that keeps its own loss takes them."""

from __future__ import annotations

import math

import pytest
import torch

import offpolicy_corr as oc
from support import Problem

LOGQ = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -1.0, -1.0]])
LOGP = torch.tensor([[-1.0, -2.5, -0.5], [-3.0, -1.5, -1.0]])


def test_values_by_hand() -> None:
    logp, logq = torch.tensor([-1.0, -2.0, -1.5]), torch.tensor([-1.0, -1.0, -2.5])
    assert oc.importance_weights(logp, logq).tolist() == pytest.approx(
        [1.0, 0.0, math.e]
    )  # e^-1 is below 0.5
    assert oc.importance_weights(logp, logq, "tis").tolist() == pytest.approx([1.0, math.exp(-1), 2.0])
    assert oc.importance_weights(logp, logq, "is").tolist() == pytest.approx([1.0, math.exp(-1), math.e])
    advantages = torch.tensor([1.0, -1.0, 1.0])
    assert oc.importance_weights(logp, logq, "ppo", advantages=advantages).tolist() == pytest.approx(
        [1.0, 0, 0]
    )


@pytest.mark.parametrize("name", ["none", "mis", "tis", "clamp", "is"])
def test_they_are_the_weights_of_the_loss_whose_gradient_follows(name: str) -> None:
    problem = Problem(size=6, kind="head", seed=4)
    record = problem.record()
    leaf = problem.logits.clone().requires_grad_()
    out = oc.policy_loss(leaf, record, problem.advantages, correction=name)
    out.loss.backward()
    own = problem.logits.clone().requires_grad_()
    logp, _, _ = oc.selected_logprobs(own, record.tokens, temperature=record.temperature)
    assert record.logprobs is not None
    weights = oc.importance_weights(logp, record.logprobs, name)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, out.diagnostics.weight)
    (-(weights * problem.advantages * logp).sum() / 6).backward()
    torch.testing.assert_close(own.grad, leaf.grad)


def test_masked_tokens_get_0_whatever_stands_there() -> None:
    garbage = [math.nan, math.inf, -math.inf, -9999.0, 0.0]
    logp = torch.tensor([-1.0, *garbage])
    logq = torch.tensor([-1.0, *reversed(garbage)])
    mask = torch.tensor([1, 0, 0, 0, 0, 0])
    assert oc.importance_weights(logp, logq, "is", mask).tolist() == [1.0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf, 0.1, -9999.0])
def test_a_bad_log_prob_is_named_by_row_and_column(bad: float) -> None:
    wrong = LOGQ.clone()
    wrong[1, 2] = bad
    with pytest.raises(oc.RecordError) as caught:
        oc.importance_weights(LOGP, wrong)
    assert (caught.value.sample, caught.value.token, caught.value.field) == (1, 2, "sampler_logprobs")
    with pytest.raises(oc.RecordError, match="field logprobs"):
        oc.importance_weights(wrong, LOGQ)
    oc.importance_weights(LOGP, wrong, validate=False)


def test_what_has_no_effect_or_no_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot center"):
        oc.importance_weights(LOGP, LOGQ, "sc+mis")
    with pytest.raises(ValueError, match="pass advantages="):
        oc.importance_weights(LOGP, LOGQ, "ppo")
    with pytest.raises(ValueError, match=r"must have the shape of logprobs, \(2, 3\), got \(3,\)"):
        oc.importance_weights(LOGP, LOGQ[0])
    with pytest.raises(ValueError, match="loss_mask must be bool, 0 or 1"):
        oc.importance_weights(LOGP, LOGQ, loss_mask=torch.full((2, 3), 2))
