"""Sequence guards: by hand, at their bounds, and composed with a loss."""

from __future__ import annotations

import math

import pytest
import torch

import offpolicy_corr as oc
from offpolicy_corr import guards
from support import Problem, gradient_through

IDS = torch.tensor([2, 0, 2, 0, 4, 2])


def ratios(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def test_geometric_mean() -> None:
    log_ratio = torch.tensor([0.02, -0.01, 0.03, 0.0]).double()
    one = torch.zeros(4, dtype=torch.int64)
    assert not guards.geometric_mean(log_ratio, one, None, 0.99, 1.01)  # exp(0.01) = 1.01005
    assert guards.geometric_mean(log_ratio, one, None, 0.99, 1.0101)
    at_bound = torch.full((4,), math.log(1.01), dtype=torch.float64)
    assert guards.geometric_mean(at_bound[:1], one[:1], None, 0.99, 1.01)
    mask = torch.tensor([0, 1, 0, 1])
    assert guards.geometric_mean(log_ratio, one, mask, 0.99, 1.01)


def test_product_is_far_stricter_on_long_sequences() -> None:
    log_ratio, ids = torch.full((300,), 0.005), torch.zeros(300, dtype=torch.int64)
    assert not guards.product(log_ratio, ids, None, 0.0, 3.0)
    assert guards.product(log_ratio, ids, None, 0.0, 4.5)
    assert guards.geometric_mean(log_ratio, ids, None, 0.99, 1.01)


def test_outlier_and_ids_with_gaps() -> None:
    log_ratio = ratios(1.0, 1e-5, 1.0, 1.0, 50.0, 101.0)
    assert guards.outlier(log_ratio, IDS, None, 1e-4, 100.0).tolist() == [False, True, False, True, True]
    mask = torch.tensor([1, 0, 1, 1, 1, 1])
    assert guards.outlier(log_ratio, IDS, mask, 1e-4, 100.0).tolist() == [True, True, False, True, True]


def test_off_policy_drops_negative_advantages_beyond_delta() -> None:
    log_ratio = -torch.tensor([0.05, 0.06, 0.05, 0.06, 0.05, 0.05])
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, -1.0])
    keep = guards.off_policy(log_ratio, advantages, IDS, None, delta=float(torch.tensor(0.05).double()))
    assert keep.tolist() == [False, True, True, True, True]  # equal to delta: kept
    assert guards.off_policy(log_ratio, -advantages, IDS, None, 0.0).tolist()[0]
    with pytest.raises(ValueError, match="delta must be"):
        guards.off_policy(log_ratio, advantages, IDS, None, -1.0)


def test_staleness() -> None:
    versions = torch.tensor([5, 3, 4, 7, 7, 6])
    record = oc.SamplerRecord(torch.zeros(6, dtype=torch.int64), weight_version=versions)
    assert guards.staleness(record, IDS, 7, 3).tolist() == [False, True, True, True, True]
    assert guards.staleness(record, IDS, 7, 4).all()
    for bad, token in ((torch.tensor([5, 3, -1, 7, 7, 6]), 2), (versions + 1, 3)):
        record = oc.SamplerRecord(torch.zeros(6, dtype=torch.int64), weight_version=bad)
        with pytest.raises(oc.RecordError, match="undeclared or ahead") as caught:
            guards.staleness(record, IDS, 7, 3)
        assert (caught.value.token, caught.value.sample, caught.value.field) == (
            token,
            int(IDS[token]),
            "weight_version",
        )
    named = oc.SamplerRecord(
        torch.zeros(6, dtype=torch.int64), weight_version=versions, version_names=("a",) * 9
    )
    with pytest.raises(oc.RecordError, match="named versions"):
        guards.staleness(named, IDS, 7, 3)
    tools = oc.SamplerRecord(
        torch.zeros(6, dtype=torch.int64), weight_version=torch.tensor([5, 3, -1, 7, 7, 6])
    )
    mask = torch.tensor([1, 1, 0, 1, 1, 1])
    assert guards.staleness(tools, IDS, 7, 3, loss_mask=mask).tolist() == [False, True, True, True, True]
    with pytest.raises(oc.RecordError, match="needs weight versions"):
        guards.staleness(oc.SamplerRecord(torch.zeros(6, dtype=torch.int64)), IDS, 7, 3)
    with pytest.raises(ValueError, match="max_lag"):
        guards.staleness(record, IDS, 9, -1)


@pytest.mark.parametrize("guard", [guards.geometric_mean, guards.product, guards.outlier])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_tokens_do_not_count_and_a_nan_ratio_drops_its_sequence(guard, garbage: float) -> None:  # type: ignore[no-untyped-def]
    log_ratio = torch.zeros(6)
    log_ratio[1] = garbage
    mask = torch.ones(6)
    assert guard(log_ratio, IDS, mask, 0.5, 2.0).tolist() == [False, True, True, True, True]
    mask[1] = 0
    assert guard(log_ratio, IDS, mask, 0.5, 2.0).all()
    spoiled_ids = IDS.clone()
    spoiled_ids[1] = -1
    assert guard(log_ratio, spoiled_ids, mask, 0.5, 2.0).all()


@pytest.mark.parametrize("guard", [guards.geometric_mean, guards.product, guards.outlier])
def test_a_sequence_without_a_trained_token_is_kept_whatever_the_band(guard) -> None:  # type: ignore[no-untyped-def]
    mask = (IDS != 4).float()
    assert guard(ratios(*[1.0] * 6), IDS, mask, 1.5, 2.0).tolist() == [False, True, False, True, True]


def test_bad_arguments() -> None:
    for low, high in ((2.0, 1.0), (-1.0, 1.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="bounds must satisfy"):
            guards.geometric_mean(torch.zeros(6), IDS, None, low, high)
    with pytest.raises(ValueError, match="bool, 0 or 1"):
        guards.geometric_mean(torch.zeros(6), IDS, torch.full((6,), 0.5), 0.5, 2.0)
    with pytest.raises(ValueError, match="lengths disagree"):
        guards.product(torch.zeros(5), IDS, None, 0.5, 2.0)
    with pytest.raises(ValueError, match="negative sequence id"):
        guards.product(torch.zeros(6), IDS - 1, None, 0.5, 2.0)
    assert guards.product(torch.zeros(0), IDS[:0], None, 0.5, 2.0).shape == (0,)


def test_a_guard_composes_with_a_centered_loss() -> None:
    problem = Problem(seed=5)
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    first = oc.policy_loss(problem.logits, problem.record(), problem.advantages)
    keep = guards.geometric_mean(first.diagnostics.log_ratio, ids, None, 0.7, 1.5)
    assert keep.any() and not keep.all()
    _, gradient = gradient_through(
        "logits", problem.logits, problem.record(), problem.advantages, sequence_ids=ids, sequence_keep=keep
    )
    assert ((gradient != 0).any(1) == keep[ids]).all()
