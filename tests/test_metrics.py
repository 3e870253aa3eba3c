"""`metrics.summarize`: by hand, per group, and where nothing can be said."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import offpolicy_corr as oc
from support import Problem


def summary(problem: Problem, record: oc.SamplerRecord, **options) -> dict[str, float]:  # type: ignore[no-untyped-def]
    mask = options.get("loss_mask")
    out = oc.policy_loss(problem.logits, record, problem.advantages, loss_mask=mask)
    return oc.metrics.summarize(out.diagnostics, record, **options)


def test_values_by_hand() -> None:
    log_ratio = torch.tensor([8.0, 1.0, 1.0, 1.0]).double().log()
    record = oc.SamplerRecord(torch.zeros(4, dtype=torch.int64), torch.full((4,), -3.0).double())
    logits = torch.zeros(4, 2).double()
    logits[:, 0] = (log_ratio - 3.0).exp().log() - torch.log1p(-(log_ratio - 3.0).exp())
    out = oc.policy_loss(logits, record, torch.ones(4), correction=oc.Correction.from_name("mis"))
    torch.testing.assert_close(out.diagnostics.log_ratio, log_ratio)
    values = oc.metrics.summarize(out.diagnostics, record)
    assert values["ess"] == pytest.approx(121 / 268)
    assert values["kl_k1"] == pytest.approx(-math.log(8) / 4)
    assert values["kl_k3"] == pytest.approx((7 - math.log(8)) / 4)
    assert (
        values["out_of_band"] == 0.25
        and values["kept"] == 0.75
        and values["mean_ratio"] == pytest.approx(11 / 4)
    )
    assert oc.metrics.summarize(out.diagnostics, record, band=(0.2, 8.0 + 1e-9))["out_of_band"] == 0.0
    assert math.isnan(values["sampler_head_mass"]) and math.isnan(values["certificate"])


def test_the_k3_estimate_is_the_divergence_in_expectation() -> None:
    p, q = torch.tensor([1 / 2, 1 / 3, 1 / 6]).double(), torch.tensor([1 / 6, 1 / 3, 1 / 2]).double()
    record = oc.SamplerRecord(torch.arange(3), q.log())
    out = oc.policy_loss(
        p.log().repeat(3, 1), record, torch.ones(3), correction=oc.Correction.from_name("none")
    )
    each = [oc.metrics.summarize(out.diagnostics, record, loss_mask=torch.arange(3) == y) for y in range(3)]
    for key in ("kl_k1", "kl_k3"):
        assert sum(float(q[y]) * each[y][key] for y in range(3)) == pytest.approx(0.3662041)


def test_groups_split_the_batch_and_point_at_the_one_that_is_off() -> None:
    problem = Problem(size=40, seed=1, noise=0.05, kind="head", temperature=1.0)
    far = Problem(size=40, seed=1, noise=3.0, kind="head", temperature=1.0)
    group = torch.tensor([0] * 40 + [2] * 40)
    record = oc.SamplerRecord.concat([problem.record(), far.record()])
    record = dataclasses.replace(record, group=group, group_names=("b200-nvfp4", "idle", "h100-fp8"))
    logits, advantages = torch.cat([problem.logits, far.logits]), torch.ones(80)
    out = oc.policy_loss(logits, record, advantages)
    values = oc.metrics.summarize(out.diagnostics, record, advantages=advantages)
    assert values["group/b200-nvfp4/token_share"] == values["group/h100-fp8/token_share"] == 0.5
    assert values["group/h100-fp8/out_of_band_share"] > 0.9
    assert values["group/h100-fp8/kl_k3"] > 10 * values["group/b200-nvfp4/kl_k3"]
    assert values["group/idle/tokens"] == 0 and math.isnan(values["group/idle/kl_k1"])
    alone = oc.metrics.summarize(out.diagnostics, record, loss_mask=group == 2, advantages=advantages)
    for key in ("kl_k1", "ess", "out_of_band", "kept", "tail_ratio_p99", "certificate"):
        assert values[f"group/h100-fp8/{key}"] == pytest.approx(alone[key])
    unnamed = oc.metrics.summarize(out.diagnostics, dataclasses.replace(record, group_names=()))
    assert {key.split("/")[1] for key in unnamed if key.startswith("group/")} == {"0", "2"}


def test_a_mean_of_tail_ratios_is_not_reported_but_quantiles_and_a_ratio_of_sums_are() -> None:
    q_tail = torch.tensor([1e-3, 0.02, 0.02, 0.02]).double()
    p_tail = torch.tensor([1e-6, 0.02, 0.02, 0.02]).double()
    logq = (1 - q_tail).log()
    candidates = oc.CandidateSet.from_topk(torch.zeros(4, 1, dtype=torch.int64), logq[:, None])
    record = oc.SamplerRecord(torch.zeros(4, dtype=torch.int64), logq, candidates)
    logits = torch.stack([torch.log1p(-p_tail), p_tail.log()], 1)
    out = oc.policy_loss(logits, record, torch.ones(4), correction=oc.Correction.from_name("sc"))
    values = oc.metrics.summarize(out.diagnostics, record)
    assert values["tail_ratio_p50"] == pytest.approx(1.0)
    assert values["tail_ratio_max"] == pytest.approx(1000.0)
    assert values["tail_ratio_of_sums"] == pytest.approx(0.061 / 0.060001)
    assert "tail_ratio" not in values and "tail_ratio_mean" not in values


def test_a_ratio_that_overflows_leaves_the_effective_sample_size_of_one_token() -> None:
    record = oc.SamplerRecord(torch.zeros(4, dtype=torch.int64), torch.tensor([-400.0, -0.7, -0.7, -0.7]))
    out = oc.policy_loss(torch.zeros(4, 2), record, torch.ones(4), correction=oc.Correction.from_name("mis"))
    values = oc.metrics.summarize(out.diagnostics, record)
    assert values["ess"] == pytest.approx(0.25) and values["out_of_band"] == 0.25
    with pytest.raises(ValueError, match=r"advantages must be \[T\]"):
        oc.metrics.summarize(out.diagnostics, record, advantages=torch.ones(3))


def test_a_small_trainer_tail_keeps_its_digits_in_the_ratio_of_sums() -> None:
    q, p_tail = torch.tensor([0.9999]), 1e-7
    candidates = oc.CandidateSet.from_topk(torch.zeros(1, 1, dtype=torch.int64), q.log()[None])
    record = oc.SamplerRecord(torch.zeros(1, dtype=torch.int64), q.log(), candidates)
    logits = torch.tensor([[0.0, math.log(p_tail)]])
    correction = oc.Correction(oc.Unweighted(), tail_floor=1e-9)
    out = oc.policy_loss(logits, record, torch.ones(1), correction=correction)
    assert oc.metrics.summarize(out.diagnostics, record)["tail_ratio_of_sums"] == pytest.approx(
        1000, rel=1e-3
    )


def test_masked_tokens_change_nothing() -> None:
    problem = Problem(seed=2)
    mask = torch.tensor([True, False, True, True, False, True])
    values = summary(problem, problem.record(), loss_mask=mask)
    index = mask.nonzero().squeeze(1)
    record = problem.record().select(index)
    out = oc.policy_loss(problem.logits[index], record, problem.advantages[index])
    alone = oc.metrics.summarize(out.diagnostics, record)
    assert values.keys() == alone.keys()
    for key, value in values.items():
        assert value == pytest.approx(alone[key], nan_ok=True), key


def test_nothing_trained_and_no_tokens() -> None:
    problem = Problem(seed=2)
    values = summary(problem, problem.record(), loss_mask=torch.zeros(6))
    assert values["tokens"] == 0 and all(math.isnan(v) for k, v in values.items() if k != "tokens")
    with pytest.raises(ValueError, match="bounds must satisfy"):
        summary(problem, problem.record(), band=(5.0, 0.2))


def test_every_value_is_a_python_float_and_certificates_follow_the_rule() -> None:
    problem = Problem(seed=2, kind="head")
    values = summary(problem, problem.record(), advantages=problem.advantages)
    assert all(type(value) is float for value in values.values())
    exact = summary(problem, problem.record(), correction=oc.Correction(oc.FullIS()))
    assert exact["certificate"] == 0 < values["certificate"]
