"""Partial rollouts: one sequence drawn by weights of several versions, and what of it is fresh."""

from __future__ import annotations

import pytest
import torch

import offpolicy_corr as oc

SPEC = oc.SamplerSpec(engine="vllm", logprobs="processed", group="a")


def part(tokens: list[int], version: int) -> oc.SamplerRecord:
    size = len(tokens)
    return oc.SamplerRecord(
        torch.tensor(tokens), torch.full((size,), -1.0), weight_version=torch.full((size,), version)
    )


def test_a_resumed_rollout_keeps_the_version_of_every_token_and_loses_its_stale_ones() -> None:
    calls = [
        oc.Turn(part([5, 6], 41), torch.tensor([1, 2]), SPEC, truncated=True),  # canceled
        oc.Turn(part([7], 42), torch.tensor([1, 2, 5, 6]), SPEC, truncated=True),  # resumed, canceled again
        oc.Turn(part([8, 9], 45), torch.tensor([1, 2, 5, 6, 7]), SPEC),
    ]
    whole = oc.assemble(calls)
    assert whole.record.weight_version is not None
    assert whole.record.weight_version.tolist() == [-1, -1, 41, 41, 42, 45, 45]
    fresh = oc.fresh_tokens(whole.record, current_version=45, max_lag=3, loss_mask=whole.loss_mask)
    assert fresh.tolist() == [False, False, False, False, True, True, True]
    assert not oc.guards.staleness(
        whole.record, torch.zeros(7, dtype=torch.int64), 45, 3, whole.loss_mask
    ).any()
    advantages = torch.ones(7)
    logits = torch.zeros(7, 12, requires_grad=True)
    oc.policy_loss(
        logits, whole.record, advantages, correction="is", loss_mask=whole.loss_mask & fresh
    ).loss.backward()
    assert logits.grad is not None and (logits.grad[:4] == 0).all() and (logits.grad[4:] != 0).any(1).all()


def test_versions_that_cannot_be_counted_are_refused_where_tokens_are_trained() -> None:
    record = part([5, 6, 7], 3)
    assert record.weight_version is not None
    for wrong, value in ((-1, -1), (9, 9)):
        record.weight_version[1] = wrong
        with pytest.raises(oc.RecordError) as caught:
            oc.fresh_tokens(record, 4, 1)
        assert (caught.value.token, caught.value.field, caught.value.value) == (1, "weight_version", value)
        mask = torch.tensor([1, 0, 1])
        assert oc.fresh_tokens(record, 4, 1, mask).tolist() == [True, False, True]
    with pytest.raises(oc.RecordError, match="needs weight versions"):
        oc.fresh_tokens(oc.SamplerRecord(torch.tensor([1])), 4, 1)
    with pytest.raises(oc.RecordError, match="named versions"):
        named = oc.SamplerRecord(torch.tensor([1]), weight_version=torch.tensor([0]), version_names=("a",))
        oc.fresh_tokens(named, 4, 1)
    with pytest.raises(ValueError, match="max_lag"):
        oc.fresh_tokens(record, 4, -1)
