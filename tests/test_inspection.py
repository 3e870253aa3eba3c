"""Statistical faults: found where they are planted, in the group that has them, and nowhere else."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import offpolicy_corr as oc
from offpolicy_corr.records.inspection import RecordWarning, Thresholds, find_unwitnessed_zeros, inspect

COUNT = 600


def sampled(seed: int = 0, noise: float = 0.01) -> tuple[torch.Tensor, torch.Tensor]:
    """log q of tokens really drawn from random rows, and the log p of a policy ``noise`` nats away."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(COUNT, 50, generator=generator) * 2
    logq = logits.log_softmax(1)
    token = torch.multinomial(logq.exp(), 1, generator=generator)
    logp = (logits + noise * torch.randn(logits.shape, generator=generator)).log_softmax(1)
    return logq.gather(1, token).squeeze(1), logp.gather(1, token).squeeze(1)


def fleet(logq: torch.Tensor) -> oc.SamplerRecord:
    group = torch.arange(len(logq)) % 3
    return oc.SamplerRecord(torch.arange(len(logq)), logq, group=group, group_names=("a", "b", "c"))


def kinds(
    record: oc.SamplerRecord, logp: torch.Tensor | None = None, **options: object
) -> set[tuple[str, str]]:
    found = inspect(record, trainer_logprobs=logp, on_finding="ignore", **options)  # type: ignore[arg-type]
    return {(finding.kind, finding.group) for finding in found.findings}


def test_an_honest_fleet_is_silent() -> None:
    logq, logp = sampled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = inspect(fleet(logq), trainer_logprobs=logp)
    assert [s.group for s in report.summaries] == ["a", "b", "c"]
    assert all(abs(s.mean_ratio - 1) < 0.01 and s.abs_mismatch < 0.02 for s in report.summaries)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_record_shifted_by_one_is_found_without_looking_at_one_token(shift: int) -> None:
    logq, logp = sampled()
    record = oc.SamplerRecord(torch.arange(COUNT), logq.roll(shift))
    assert ("lag", "all") in kinds(record, logp)
    found = inspect(record, trainer_logprobs=logp, on_finding="ignore").findings
    assert [f.value for f in found if f.kind == "lag"] == [shift]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probs_rounded_to_half_precision_are_found(dtype: torch.dtype) -> None:
    logq, _ = sampled()
    group = torch.arange(COUNT) % 3
    rounded = torch.where(group == 1, logq.to(dtype).float(), logq)
    assert kinds(fleet(rounded)) == {("quantized", "b")}


def test_the_uniform_q_of_an_unloaded_engine_is_found() -> None:
    logq, _ = sampled()
    group = torch.arange(COUNT) % 3
    flat = -math.log(151_936) + 1e-3 * torch.randn(COUNT, generator=torch.Generator().manual_seed(1))
    assert kinds(fleet(torch.where(group == 2, flat, logq))) == {("uniform", "c")}


def test_one_group_far_off_is_named_and_the_others_are_not() -> None:
    logq, logp = sampled()
    group = torch.arange(COUNT) % 3
    noise = torch.randn(COUNT, generator=torch.Generator().manual_seed(2)) * 0.4
    found = kinds(fleet(logq), torch.where(group == 0, logp + noise, logp))
    assert ("outlier", "a") in found and ("mismatch", "a") in found
    assert {name for _, name in found} == {"a"}


def test_log_probs_of_another_temperature_are_found() -> None:
    logq, logp = sampled()
    assert ("mean_ratio", "all") in kinds(oc.SamplerRecord(torch.arange(COUNT), logq * 1.25), logp)


def test_policy_decides_what_a_finding_does() -> None:
    logq, logp = sampled()
    shifted = oc.SamplerRecord(torch.arange(COUNT), logq.roll(1))
    with pytest.warns(RecordWarning) as seen:
        inspect(shifted, trainer_logprobs=logp)
    assert any("shifted by one" in str(warning.message) for warning in seen)
    with pytest.raises(oc.RecordError, match="shifted by one") as caught:
        inspect(shifted, trainer_logprobs=logp, on_finding="raise")
    assert caught.value.field == "lag" and caught.value.value == "all" and caught.value.remedy
    with pytest.raises(ValueError, match="on_finding"):
        inspect(shifted, on_finding="mail")


def test_masked_tokens_are_not_judged_and_samples_are_not_joined() -> None:
    logq, logp = sampled()
    logq[::2], logp[::2] = torch.nan, torch.nan
    mask = torch.arange(COUNT) % 2 == 1
    assert kinds(oc.SamplerRecord(torch.arange(COUNT), logq), logp, loss_mask=mask) == set()
    alone = sampled()[0].roll(1)  # each token its own sample: no neighbors, no lag
    found = kinds(
        oc.SamplerRecord(torch.arange(COUNT), alone), sampled()[1], sequence_ids=torch.arange(COUNT)
    )
    assert ("lag", "all") not in found


def test_small_groups_are_not_judged() -> None:
    logq, logp = sampled()
    record = oc.SamplerRecord(torch.arange(20), logq[:20])
    assert kinds(record, logp[:20] - 1.0) == set()
    assert kinds(record, logp[:20] - 1.0, thresholds=Thresholds(min_tokens=10)) != set()


def test_the_report_prints_a_line_for_every_group_and_finding() -> None:
    logq, logp = sampled()
    report = inspect(fleet(logq.roll(3)), trainer_logprobs=logp, on_finding="ignore")
    lines = str(report).splitlines()
    assert len(lines) == 1 + 3 + len(report.findings) and report.findings
    assert lines[1].split()[:2] == ["a", "200"]


def test_samples_that_end_in_zeros_are_each_named() -> None:
    logq = torch.tensor([-1.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, -1.0])
    record, samples = fleet(logq), torch.tensor([7, 7, 7, 3, 3, 9, 9, 9, 5])
    found = find_unwitnessed_zeros(record, None, samples)
    assert [(finding.value, finding.group) for finding in found] == [(2.0, "c"), (3.0, "b")]
    assert found[0].message.startswith("sample 7 ends in 2 ") and "sample 9 ends in 3 " in found[1].message
    assert find_unwitnessed_zeros(record) == []
