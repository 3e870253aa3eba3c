"""Statistical faults: found where they are planted, in the group that has them, and nowhere else."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import offpolicy_corr as oc
from offpolicy_corr.records.errors import RecordWarning
from offpolicy_corr.records.findings import Thresholds
from offpolicy_corr.records.inspection import find_unsupported_zeros, inspect

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
    found = find_unsupported_zeros(record, None, samples)
    assert [(finding.value, finding.group) for finding in found] == [(2.0, "c"), (3.0, "b")]
    assert found[0].message.startswith("sample 7 ends in 2 ") and "sample 9 ends in 3 " in found[1].message
    assert find_unsupported_zeros(record) == []


def batch(
    rows: int, length: int, seed: int, noise: float = 0.01, certain: float = 0.0
) -> tuple[torch.Tensor, ...]:
    """(log q, log p, sequence ids) of ``rows`` samples; a share ``certain`` of positions leaves nothing to choose."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.where(torch.rand(rows * length, generator=generator) < certain, 40.0, 2.0)
    logits = torch.randn(rows * length, 30, generator=generator) * scale[:, None]
    logq = logits.log_softmax(1)
    token = torch.multinomial(logq.exp(), 1, generator=generator)
    heavy = torch.distributions.StudentT(3.0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        logp = (logits + noise * heavy.sample(logits.shape)).log_softmax(1)
    own = [values.gather(1, token).squeeze(1) for values in (logq, logp)]
    return own[0], own[1], torch.arange(rows).repeat_interleave(length)


def test_four_wild_tokens_of_4096_are_found_and_the_first_is_named() -> None:
    logq, logp, ids = batch(64, 64, 0)
    logp[-4:], logq[-4:] = -0.01, -14.0
    record = oc.SamplerRecord(torch.arange(4096), logq)
    report = inspect(record, None, ids, logp, on_finding="ignore")
    wild = [finding for finding in report.findings if finding.kind == "wild_ratio"]
    assert len(wild) == 1 and wild[0].value == 4 and wild[0].sample == 63
    assert "4 of 4096 tokens have p/q above e^14.0" in wild[0].message
    one = logp.clone()
    one[:] = logq
    one[7], logq[7] = -0.01, -30.0  # a single one, if it is impossible enough
    assert ("wild_ratio", "all") in kinds(oc.SamplerRecord(torch.arange(4096), logq), one, sequence_ids=ids)


@pytest.mark.parametrize("shift", [1, -1, 2, 3, -3])
@pytest.mark.parametrize("certain", [0.0, 0.7])
def test_one_shifted_row_of_64_is_named_with_its_shift(shift: int, certain: float) -> None:
    logq, logp, ids = batch(64, 128, 1, certain=certain)
    logq[ids == 17] = logq[ids == 17].roll(shift)
    report = inspect(oc.SamplerRecord(torch.arange(len(ids)), logq), None, ids, logp, on_finding="ignore")
    lag = [finding for finding in report.findings if finding.kind == "lag"]
    assert [(finding.value, finding.sample) for finding in lag] == [(shift, 17)]
    steps = "one" if abs(shift) == 1 else f"{abs(shift)} tokens"
    assert "in sample 17 log q" in lag[0].message and f"shifted by {steps}" in lag[0].message


def test_half_the_rows_shifted_are_one_finding_that_counts_them() -> None:
    logq, logp, ids = batch(16, 128, 2, certain=0.7)
    for sample in range(8):
        logq[ids == sample] = logq[ids == sample].roll(1)
    with pytest.raises(
        oc.RecordError, match="in sample 0 and 7 more log q fits the previous token"
    ) as caught:
        inspect(oc.SamplerRecord(torch.arange(len(ids)), logq), None, ids, logp, on_finding="raise")
    assert caught.value.sample == 0 and caught.value.field == "lag"


@pytest.mark.parametrize("share", [1.0, 0.93, 0.6])
def test_a_grid_that_most_values_lie_on_is_found_and_certain_tokens_are_no_grid(share: float) -> None:
    logq, _, _ = batch(8, 128, 3)
    on_grid = torch.rand(len(logq), generator=torch.Generator().manual_seed(0)) < share
    rounded = torch.where(on_grid, logq.bfloat16().float(), logq)
    assert ("quantized", "all") in kinds(oc.SamplerRecord(torch.arange(len(logq)), rounded))
    certain = torch.where(on_grid, -(2.0**-22), logq)  # an ulp of a softmax near 1, exact in every format
    assert ("quantized", "all") not in kinds(oc.SamplerRecord(torch.arange(len(logq)), certain))


def test_one_sample_scored_by_other_weights_is_named() -> None:
    logq, logp, ids = batch(32, 64, 4)
    generator = torch.Generator().manual_seed(5)
    logp[ids == 9] -= 0.6 * torch.rand(64, generator=generator)
    report = inspect(oc.SamplerRecord(torch.arange(len(ids)), logq), None, ids, logp, on_finding="ignore")
    found = [finding for finding in report.findings if finding.kind == "outlying_sample"]
    assert [finding.sample for finding in found] == [9]


@pytest.mark.parametrize("certain", [0.0, 0.5])
def test_a_policy_far_from_an_honest_sampler_has_no_wild_ratios(certain: float) -> None:
    """Ratios up to e^4 and more are what E_q[p/q] = 1 allows among a thousand tokens of a policy half a nat away."""
    largest = 0.0
    for seed in range(50, 90):
        logq, logp, ids = batch(16, 64, seed, noise=0.7, certain=certain)
        found = kinds(oc.SamplerRecord(torch.arange(len(ids)), logq), logp, sequence_ids=ids)
        assert ("wild_ratio", "all") not in found, seed
        largest = max(largest, float((logp - logq).max()))
    assert largest > 3.0


def test_a_shifted_row_is_found_where_few_tokens_leave_a_choice() -> None:
    logq, logp, ids = batch(4, 2048, 6)
    generator = torch.Generator().manual_seed(6)
    certain = torch.rand(len(ids), generator=generator) < 0.985
    logq[certain] = -1e-4 * torch.rand(len(ids), generator=generator)[certain]
    logp[certain] = logq[certain]
    logq[ids == 2] = logq[ids == 2].roll(1)
    report = inspect(oc.SamplerRecord(torch.arange(len(ids)), logq), None, ids, logp, on_finding="ignore")
    assert [(f.value, f.sample) for f in report.findings if f.kind == "lag"] == [(1.0, 2)]


def test_wild_tokens_do_not_hide_a_shift() -> None:
    logq, logp, ids = batch(8, 128, 7)
    logq[ids == 5] = logq[ids == 5].roll(1)
    logq[5 * 128 + 20 : 5 * 128 + 25] = -60.0
    report = inspect(oc.SamplerRecord(torch.arange(len(ids)), logq), None, ids, logp, on_finding="ignore")
    assert [(f.value, f.sample) for f in report.findings if f.kind == "lag"] == [(1.0, 5)]


@pytest.mark.parametrize("noise", [0.01, 0.03])
@pytest.mark.parametrize("certain", [0.0, 0.7, 0.95])
def test_honest_batches_of_heavy_tailed_noise_stay_silent(noise: float, certain: float) -> None:
    for seed in range(10, 40):
        logq, logp, ids = batch(16, 64, seed, noise, certain)
        record = oc.SamplerRecord(torch.arange(len(ids)), logq)
        report = inspect(record, None, ids, logp, Thresholds(gate=1.0), on_finding="ignore")
        found = [finding for finding in report.findings if finding.kind != "unsupported_zeros"]
        assert found == [], (seed, found)
