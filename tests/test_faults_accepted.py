"""Reported inputs that look like faults and are none, or that must be handled and not refused; numbered alike."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from offpolicy_corr.integrations import sglang, vllm

import answers
import offpolicy_corr as oc
from answers import HEAD, PLAIN, SLIME, SUPPORT, log
from faults import generate, record, support, turns
from offpolicy_corr.records.assembly import assemble
from offpolicy_corr.records.errors import RecordWarning
from offpolicy_corr.records.inspection import find_unsupported_zeros, inspect
from offpolicy_corr.records.record import missing_tokens
from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.records.weight_versions import versions_from_spans

MINUS_MAX = -3.4028234663852886e38
CUT_SUPPORT = answers.sglang_support(
    [17], [[17, 5]], [log([0.5, 0.43])], output_token_sampling_mask_truncated=True
)


def test_17_flat_duplicate_counts_once() -> None:
    rows = [[(7, -0.3, 1), (7, -0.3, 1), (3, -2.0, 2), (9, -3.0, 3)]]
    read = vllm.read_output(answers.vllm_flat([7], rows), PLAIN, top_logprobs=3)
    assert sorted(read.candidates.ids.tolist()) == [3, 7, 9]
    assert read.candidates.mass()[0] == pytest.approx(math.exp(-0.3) + math.exp(-2) + math.exp(-3), rel=1e-6)


@pytest.mark.parametrize("sampled_first", [True, False])
def test_18_value_is_looked_up_by_id(sampled_first: bool) -> None:
    row = {382: (-4.2, 4), 13: (-0.7, 1)} if sampled_first else {13: (-0.7, 1), 382: (-4.2, 4)}
    assert vllm.read_output(answers.vllm_dicts([382], [row]), SamplerSpec(
        engine="vllm", logprobs="processed")).logprobs.tolist() == pytest.approx([-4.2])  # fmt: skip


def test_19_tail_token_of_a_head_is_fine() -> None:
    read = generate(answers.sglang([88], [-6.0], [[[-0.5, 3, None], [-2.0, 9, None]]]))
    assert read.candidates.ids.tolist() == [3, 9] and not read.candidates.complete.any()


def test_20_slime_keeps_the_sampled_token_when_asked() -> None:
    response = answers.slime([88, 9, 5], [3, 9, 9, 3, 7], [0, 2, 4, 5])
    read = generate(response, SLIME, force_keep_sampled=True)
    assert read.candidates.ids.tolist() == [3, 9, 88, 9, 3, 7, 5]
    assert read.candidates.offsets.tolist() == [0, 3, 5, 7]


def test_23_cut_support_is_a_head() -> None:
    read = generate(CUT_SUPPORT, SUPPORT)
    assert not read.candidates.complete.any() and read.candidates.mass()[0] == pytest.approx(0.93, rel=1e-6)


def test_24_engines_filter_in_different_order_and_both_supports_stand() -> None:
    p = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    sequential = SamplerSpec(engine="vllm", logprobs="processed", top_p=0.7, top_k=2)
    ours = vllm.read_output(answers.vllm_dicts([0], [{0: (0.0, 1), 1: (-math.inf, 2)}]), sequential)
    joint = SamplerSpec(engine="sglang", logprobs="support", top_p=0.7, top_k=2)
    both = log((p[:2] / p[:2].sum()).tolist())
    theirs = generate(answers.sglang_support([0], [[0, 1]], [both]), joint)
    assert ours.candidates.ids.tolist() == [0] and theirs.candidates.ids.tolist() == [0, 1]
    assert ours.candidates.complete.all() and theirs.candidates.complete.all()


HEADS = [
    [[-0.1, 1, None], [-3.0, 9, None]],
    [[-0.7, 2, None], [-0.8, 9, None]],
    [[-0.2, 3, None], [-2.0, 9, None]],
]
DISGUISES: dict[str, Any] = {
    "null": (None, None), "NaN": (math.nan, None), "-9999": (-9999.0, None), "-99999": (-99999.0, None),
    "clamp": (MINUS_MAX, None), "-inf": (-math.inf, None), "0.0": (0.0, HEADS), "0.0 in the tail": (
        0.0, [HEADS[0], [[-0.5, 7, None], [-2.0, 9, None]], HEADS[2]]),
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "sum"])
@pytest.mark.parametrize("name", DISGUISES)
def test_27_28_29_31_every_disguise_raises_or_leaves_loss_and_denominator(name: str, reduction: str) -> None:
    value, heads = DISGUISES[name]
    response = answers.sglang([1, 2, 3], [-0.1, value, -0.2], heads)
    with pytest.raises(oc.RecordError, match="missing") as caught:
        generate(response)
    assert (caught.value.token, caught.value.field) == (1, "output_token_logprobs")
    with pytest.warns(RecordWarning, match="1 of 3 tokens"):
        read = generate(response, on_missing="mask")
    missing = missing_tokens(read)
    assert missing.tolist() == [False, True, False]
    logits, keep = torch.randn(3, 100), torch.tensor([0, 2])
    options: dict[str, Any] = {"correction": oc.Correction(center=heads is not None), "reduction": reduction}
    with pytest.raises(oc.RecordError):  # forgotten: refused, not trained
        oc.policy_loss(logits, read, torch.ones(3), sequence_ids=torch.tensor([0, 0, 1]), **options)
    loss = oc.policy_loss(
        logits, read, torch.ones(3), loss_mask=~missing, sequence_ids=torch.tensor([0, 0, 1]), **options
    ).loss
    rest = oc.policy_loss(
        logits[keep], read.select(keep), torch.ones(2), sequence_ids=torch.tensor([0, 1]), **options
    ).loss
    assert loss.item() == pytest.approx(rest.item(), rel=1e-6)
    assert oc.global_denominator(~missing) == 2


def test_31_a_masked_run_of_zeros_is_counted() -> None:
    response = answers.sglang([1, 2, 3, 4, 5], [0.0, -0.2, 0.0, 0.0, None])
    with pytest.warns(RecordWarning, match="3 of 5 tokens"):
        read = generate(response, on_missing="mask")
    assert missing_tokens(read).tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("read", ["chat", "generate"])
def test_31_a_zero_that_vllm_rows_contradict_is_missing(read: str) -> None:
    rows = [[(5, -0.5, 1), (9, -2.0, 2)], [(7, -0.3, 1), (6, -2.2, 2)]]
    response = answers.vllm_generate([5, 7], rows)
    content = response["choices"][0]["logprobs"]["content"]
    content[1]["logprob"] = 0.0
    if read == "chat":
        for entry in [*content, *(top for one in content for top in one["top_logprobs"])]:
            entry["token"] = f"token_id:{entry.pop('token_id')}"
    with pytest.raises(oc.RecordError, match=r"missing: 0\.0"):
        vllm.read_json(response, PLAIN)
    with pytest.warns(RecordWarning, match="1 of 2 tokens"):
        assert missing_tokens(vllm.read_json(response, PLAIN, on_missing="mask")).tolist() == [False, True]


@pytest.mark.parametrize("filler", [[MINUS_MAX, 6, None], [-9999.0, 6, None], [-99999.0, 0, None]])
def test_29_filler_within_a_head_is_dropped(filler: list[Any]) -> None:
    read = generate(answers.sglang([5], [-0.1], [[[-0.1, 5, None], filler, filler]]))
    assert read.candidates.ids.tolist() == [5]


def test_31_zeros_at_the_end_without_witness_warn() -> None:
    with pytest.warns(RecordWarning, match=r"2 log-probs of exactly 0\.0"):
        generate(answers.sglang([1, 2, 3, 4], [-0.1, -0.2, 0.0, 0.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        witnessed = [[[-0.1, 1, None]], [[-0.2, 2, None]], [[0.0, 3, None]], [[0.0, 4, None]]]
        generate(answers.sglang([1, 2, 3, 4], [-0.1, -0.2, 0.0, 0.0], witnessed))
        generate(answers.good_support(), SUPPORT)
    with warnings.catch_warnings(), pytest.raises(RecordWarning):
        warnings.simplefilter("error", RecordWarning)
        generate(answers.sglang([1, 2, 3, 4], [-0.1, -0.2, 0.0, 0.0]))


def test_42_small_masses_do_not_underflow() -> None:
    head = [[[float(np.float32(np.log1p(-1.5e-8))), 5, None], [-18.0, 6, None]]]
    read = generate(answers.sglang([6], [-18.0], head))
    assert read.candidates.logprobs.exp()[1] == pytest.approx(1.523e-8, rel=1e-3)


def test_43_ratio_beyond_float32_stays_finite() -> None:
    logits = torch.zeros(2, 8, requires_grad=True)
    ours = record([1, 2], [-91.0, -91.0])
    mask = torch.tensor([True, False])
    out = oc.policy_loss(logits, ours, torch.ones(2), correction=oc.Correction(center=False), loss_mask=mask)
    out.loss.backward()
    assert torch.isfinite(out.loss) and torch.isfinite(logits.grad).all() and (logits.grad[1] == 0).all()


@pytest.mark.parametrize("garbage", [0.0, 1.0, math.nan, math.inf, -9999.0])
def test_54_55_masked_tokens_reach_nothing(garbage: float) -> None:
    mask = torch.tensor([True, False, True])
    logits = torch.randn(3, 8)
    ours = record([1, 2, 3], [-0.4, garbage, -0.3]).validate(loss_mask=mask)
    options: dict[str, Any] = {"correction": oc.Correction(center=False)}
    out = oc.policy_loss(logits, ours, torch.ones(3), loss_mask=mask, **options)
    kept = torch.tensor([0, 2])
    alone = oc.policy_loss(logits[kept], ours.select(kept), torch.ones(2), **options)
    assert out.loss == alone.loss
    both = [oc.metrics.summarize(o.diagnostics, r, loss_mask=m) for o, r, m in
            ((out, ours, mask), (alone, ours.select(kept), None))]  # fmt: skip
    assert both[0] == pytest.approx(both[1], nan_ok=True)


def test_56_empty_support_of_a_masked_token_is_fine() -> None:
    rows = support([[5, 1], []], [log([0.5, 0.5]), []])
    record([5, 6], [math.log(0.5), 0.0], candidates=rows).validate(loss_mask=torch.tensor([1, 0]))


def test_57_truncated_answer_is_flagged_and_gets_no_end_token() -> None:
    turn = sglang.read_turns(answers.sglang([5, 6], [-0.1, -0.2], finish_reason={"type": "length"}), HEAD)[0]
    assert turn.truncated and turn.record.tokens.tolist() == [5, 6]
    assert not sglang.read_turns(answers.sglang([5, 6], [-0.1, -0.2]), HEAD)[0].truncated


def test_59_partial_rollouts_keep_temperature_per_token() -> None:
    hot = SamplerSpec(engine="vllm", logprobs="processed", temperature=1.0, group="a")
    cold = SamplerSpec(engine="vllm", logprobs="processed", temperature=0.7, group="a")
    whole = assemble(turns(([1], [2, 3], hot), ([1, 2, 3], [4], cold)))
    assert whole.record.temperature.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.7])
    assert whole.loss_mask.tolist() == [False, True, True, True]


def test_60_66_one_version_or_group_far_off_is_named() -> None:
    generator = torch.Generator().manual_seed(0)
    logq = -torch.rand(1200, generator=generator) * 3
    group = torch.arange(1200) % 2
    version = torch.where(torch.arange(1200) < 600, 7, 8)
    noise = torch.randn(1200, generator=generator)
    ours = oc.SamplerRecord(torch.arange(1200), logq, group=group, group_names=("h100", "a100"))
    found = inspect(
        ours, trainer_logprobs=logq + noise * torch.where(group == 1, 0.5, 0.0125), on_finding="ignore"
    )
    assert [f.group for f in found.findings if f.kind == "outlier"] == ["a100"]
    stamped = oc.SamplerRecord(
        torch.arange(1200), logq, group=group, group_names=("h100", "a100"), weight_version=version
    )
    late = (group == 0) & (version == 8)
    found = inspect(
        stamped, trainer_logprobs=logq + noise * torch.where(late, 0.5, 0.0125), on_finding="ignore"
    )
    assert [(f.group, f.version) for f in found.findings if f.kind == "outlier"] == [("h100", "8")]


def test_63_default_version_is_carried_as_undeclared() -> None:
    versions, names = versions_from_spans([("default", 0, 2), ("12", 2, 3)], 3)
    assert versions.tolist() == [-1, -1, 12] and names is None


def test_69_explicit_prompt_ids_take_groups_of_any_size() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 4.0, 2.0, 0.0, 2.0, 1.0, 1.0, 1.0])
    prompts = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    advantages = oc.group_advantages(rewards, prompts, normalize=False)
    assert advantages.tolist() == pytest.approx([0.5, -0.5, 0.5, -0.5, 2, 0, -2, 0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_71_constant_rewards_give_no_advantage(dtype: torch.dtype) -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 1e8 + 0.1, 1e8 + 0.1], dtype=dtype)
    advantages = oc.group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1]))
    assert advantages.tolist() == [0.0] * 5


def test_zero_run_is_found_per_sample() -> None:
    ours = record([1, 2, 3, 4, 5, 6], [-0.1, 0.0, 0.0, -0.2, 0.0, 0.0])
    samples = torch.tensor([0, 0, 0, 1, 1, 1])
    found = find_unsupported_zeros(ours, None, samples)
    assert [(f.value) for f in found] == [2.0, 2.0]
    assert not find_unsupported_zeros(ours, torch.tensor([1, 1, 0, 1, 1, 0]), samples)
