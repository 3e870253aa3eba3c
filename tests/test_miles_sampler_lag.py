"""How far behind the newest sampler each trained token of a Miles batch was drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offpolicy_corr.integrations.miles import Settings, transport
from offpolicy_corr.integrations.miles.sampler_lag import sampler_lags

import offpolicy_corr as oc

GUARD = {"guards": {"behind_newest_sampler": {"max_lag": 2}}}


def sample_of(versions: Any, mask: list[int] | None, **more: Any) -> Any:
    response = 1 if mask is None else len(mask)
    return SimpleNamespace(
        tokens=[0] * (2 + response),
        response_length=response,
        loss_mask=mask,
        weight_versions=versions,
        **more,
    )


def lags(*samples: Any) -> list[list[int]]:
    return [lag.tolist() for lag in sampler_lags(samples)]


def test_spans_give_every_token_its_own_version() -> None:
    spans = [{"version": "5", "abs_start": 2, "abs_end": 4}, {"version": "6", "abs_start": 5, "abs_end": 6}]
    samples = [
        sample_of(["6"], [1, 1, 0, 1]),
        sample_of([SimpleNamespace(spans=spans)], [1, 1, 0, 1]),
        sample_of(["default"], [1]),
        sample_of([], [1]),
        sample_of(["4"], None),
    ]
    assert lags(*samples) == [[0, 0, -1, 0], [1, 1, -1, 0], [-1], [-1], [2]]


def test_of_several_calls_without_spans_the_oldest_stands_for_all_tokens() -> None:
    """Holes in the mask are no borders of calls: read as its runs, 2 of these 6 tokens had a wrong version."""
    truth = [{"version": "5", "abs_start": 2, "abs_end": 6}, {"version": "6", "abs_start": 6, "abs_end": 8}]
    mask = [1, 1, 0, 1, 1, 1]  # the hole lies inside the first call, which drew four tokens
    assert lags(sample_of([SimpleNamespace(spans=truth)], mask)) == [[1, 1, -1, 1, 0, 0]]
    assert lags(sample_of(["5", "6"], mask)) == [[1, 1, -1, 1, 1, 1]], "never newer than the truth"


def test_a_sample_that_was_resumed_under_newer_weights_has_the_lag_of_its_oldest_call() -> None:
    assert lags(sample_of(["5", "6"], [1, 1, 1]), sample_of(["7"], [1])) == [[2, 2, 2], [0]]


def test_what_nobody_trains_on_declares_nothing() -> None:
    removed = sample_of(["99"], [1, 1], remove_sample=True)
    named = sample_of(["step-12"], [1, 1], remove_sample=True)
    masked = sample_of(["1", "step-12"], [0, 0])
    tool = {"version": "step-12", "abs_start": 3, "abs_end": 4}
    partly = sample_of([[{"version": "3", "abs_start": 2, "abs_end": 3}, tool]], [1, 0])
    assert lags(removed, named, masked, partly, sample_of(["3"], [1])) == [[-1, -1]] * 3 + [[0, -1], [0]]


def test_an_opaque_version_of_a_trained_token_is_refused() -> None:
    with pytest.raises(oc.RecordError, match="no number") as caught:
        sampler_lags([sample_of(["3"], [1]), sample_of(["step-3"], [1])])
    assert caught.value.sample == 1


@pytest.mark.parametrize(
    "sample",
    [
        sample_of(["5", "6"], [0, 0, 0], remove_sample=True),
        sample_of(["5", "6"], [1, 1, 1]),
        sample_of(["step-12"], [1, 1]),
    ],
    ids=["a removed sample of two turns", "a resumed sample", "an opaque version"],
)
def test_without_the_guard_weight_versions_are_not_looked_at(sample: Any) -> None:
    assert transport.extra_keys(Settings.of({}), [sample]) == {}
    if sample.weight_versions != ["step-12"]:
        assert "offpolicy_corr_lag" in transport.extra_keys(Settings.of(GUARD), [sample])


def test_all_samples_at_version_3_lag_behind_what_miles_published() -> None:
    """Without the published version the newest in the batch is all there is: lag 0, however old."""
    samples = [sample_of(["3"], [1, 1]), sample_of(["3"], [1])]
    assert lags(*samples) == [[0, 0], [0]]
    transport.declare_newest_version([[samples[0]], [samples[1]]], 20)
    assert lags(*samples) == [[17, 17], [17]]
    transport.declare_newest_version(samples, None)
    assert lags(*samples) == [[17, 17], [17]], "before the first update Miles knows no version"


def test_a_batch_newer_than_what_was_declared_counts_from_its_newest() -> None:
    samples = [sample_of(["7"], [1]), sample_of(["5"], [1])]
    transport.declare_newest_version(samples, 6)
    assert lags(*samples) == [[0], [2]]


def test_an_attached_record_s_versions_are_exact() -> None:
    sample = sample_of(["5", "6"], [1, 1, 1])
    record = oc.SamplerRecord(
        torch.zeros(3, dtype=torch.int64), torch.full((3,), -1.0), weight_version=torch.tensor([5, 6, 6])
    )
    transport.attach(sample, record)
    assert lags(sample) == [[1, 0, 0]]
    transport.attach(sample, oc.SamplerRecord(record.tokens, record.logprobs))
    assert lags(sample) == [[1, 1, 1]], "an earlier attempt's versions are cleared"
