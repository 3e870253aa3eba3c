"""Faults that users of Miles and slime reported, each with its smallest input: the right value, not the wrong one.

The numbers are those of the issue trackers' reports as far as they give any; the issue is named in each test.
"""

from __future__ import annotations

import copy
import math
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from offpolicy_corr.integrations.miles import SettingsError, policy_loss, tis_function
from offpolicy_corr.integrations.miles.host import UnknownVersion
from offpolicy_corr.integrations.miles.step_tokens import count_step_tokens

import miles_double as double
import offpolicy_corr as oc

FAULTS = 24  # of the table that was gathered from both issue trackers
MASKED_SUPPORT = {"rollout_top_p": 0.9, "rollout_top_k": 4}


def test_every_fault_has_its_test() -> None:
    named = [re.match(r"test_(\d+)(?:_and_(\d+))?_", name) for name in globals()]
    assert {int(n) for found in named if found for n in found.groups() if n} == set(range(1, FAULTS + 1))


def hook(
    args: Any, train: list[float], rollout: list[float], masks: list[int], loss: list[float] | None = None
) -> Any:
    state = double.single()
    return tis_function(
        args,
        pg_loss=torch.tensor(loss or [1.0] * len(train), requires_grad=True),
        train_log_probs=[torch.tensor(train)],
        rollout_log_probs=[torch.tensor(rollout)],
        loss_masks=[torch.tensor(masks)],
        total_lengths=[len(train) + 1],
        response_lengths=[len(train)],
        parallel_state=state,
        max_seq_lens=None,
        added_by_a_later_version=None,
    )


def test_1_and_20_temperature() -> None:  # slime 557, 2085; miles 68
    _, metrics, _ = double.one_sample(
        [[1.0, 2.0, 0.0]], [1], [-0.14293], double.plain("is", rollout_temperature=0.5)
    )
    assert float(metrics["offpolicy_corr/ratio"]) == pytest.approx(1.0, abs=1e-4)
    _, wrong, _ = double.one_sample([[1.0, 2.0, 0.0]], [1], [-0.14293], double.plain("is"))
    assert float(wrong["offpolicy_corr/ratio"]) == pytest.approx(0.767, abs=1e-3)


def test_2_half_precision_log_probs_are_refused() -> None:  # slime 245
    half = [torch.tensor([-9.77], dtype=torch.bfloat16)]
    with pytest.raises(oc.RecordError, match="half-precision") as caught:
        double.one_sample([[1.0, 2.0, 0.0]], [1], [0.0], double.plain("is"), rollout_log_probs=half)
    assert caught.value.field == "rollout_log_probs"
    assert caught.value.sample == 0


def test_3_and_4_the_denominator_is_a_choice_not_an_accident() -> None:  # slime 657, miles 1927
    log_ratios, masks = [0.1, -1.5, 0.8, -10.0, 0.3], [1] * 5
    kept_mean = sum(math.exp(x) for x in (0.1, 0.3)) / 2
    for policy, want in (("kept", kept_mean), ("all", 2 * kept_mean / 5)):
        args = Namespace(
            offpolicy_corr={"correction": "mis", "low": 0.5, "high": 2.0, "denominator": policy}, use_tis=True
        )
        loss, same_masks, _ = hook(args, log_ratios, [0.0] * 5, masks)
        assert torch.equal(same_masks[0], torch.tensor(masks))
        # Megatron divides by the rollout's sum, torch-native by the mask's: with the mask unchanged they agree
        assert float(loss.detach().sum() / 5) == pytest.approx(want, rel=1e-6)
    assert kept_mean == pytest.approx(1.2275, abs=1e-4)


def test_5_per_token_sums_are_not_divided() -> None:  # slime 987, 990
    problem = double.make_problem(prompts=(2,), responses=(4,))
    problem.masks[0].fill_(1)
    problem.rollout[0] = torch.full((4,), -1.0)
    args = double.plain("none", calculate_per_token_loss=True, global_batch_size=8)
    state = double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state, "none")
    logits = double.local_logits(problem, problem.logits, args, state)
    scaled, count, log = double.loss_function(args, batch, 1, logits, state, problem)
    want, _, _ = double.expected(
        problem, args, "none", correction=oc.Correction(oc.Unweighted(), center=False)
    )
    assert float(scaled) == pytest.approx(float(want), rel=1e-6)
    assert int(count) == 4
    assert log["keys"][0] == "loss"


def test_6_the_loss_of_a_fully_masked_sample_is_nothing() -> (
    None
):  # miles 2796: the host still counts it as one token
    problem = double.make_problem(prompts=(2, 2), responses=(4, 3))
    problem.masks[0].fill_(1)
    problem.masks[1].zero_()
    problem.rollout[0] = torch.full((4,), -1.0)
    args, state = double.plain("none", calculate_per_token_loss=True), double.single()
    double.install(state)
    leaves = double.make_leaves(problem)
    batch = double.make_batch(problem, args, state, "none")
    logits = double.local_logits(problem, leaves, args, state)
    loss, _ = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    loss.backward()
    assert leaves[1].grad is not None
    assert bool((leaves[1].grad == 0).all())
    want, _, _ = double.expected(
        problem, args, "none", correction=oc.Correction(oc.Unweighted(), center=False)
    )
    assert float(loss.detach()) == pytest.approx(float(want), rel=1e-6)


def test_7_the_step_of_a_per_token_loss_does_not_grow_with_the_tokens(  # miles 3231
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of a torch-native trainer, which averages over ranks and drops the token count: 18 tokens, not 2/18."""
    args = double.plain("none", calculate_per_token_loss=True, train_backend="fsdp", global_batch_size=4)
    ranks = [double.make_problem(seed=s, prompts=(2, 3), responses=r) for s, r in enumerate(((4, 5), (6, 3)))]
    masks = [mask.fill_(1) for problem in ranks for mask in problem.masks]
    for problem in ranks:
        problem.rollout = [torch.full((r,), -1.0) for r in problem.responses]
    tokens = count_step_tokens([mask.tolist() for mask in masks], [[0, 1], [2, 3]], args.global_batch_size)
    assert [int(count[0]) for count in tokens] == [18] * 4
    state = replace(double.single(), intra_dp=double.Dimension(0, 2))
    double.install(state)
    if not double.MILES_SRC:
        double.install_trainer(monkeypatch, tmp_path)
    for rank, problem in enumerate(ranks):
        leaves = double.make_leaves(problem)
        batch = double.make_batch(problem, args, state, "none")
        logits = double.local_logits(problem, leaves, args, state)
        call = lambda batch, problem=problem, logits=logits: double.loss_function(
            args, batch, 1, logits, state, problem, megatron=False
        )
        with pytest.raises(oc.RecordError, match=r"offpolicy_corr_step_tokens.*transport"):
            call(batch)
        loss, _, log = call({**batch, "offpolicy_corr_step_tokens": tokens[2 * rank : 2 * rank + 2]})
        loss.backward()
        want, gradients, _ = double.expected(
            problem, args, "none", correction=oc.Correction.from_name("none")
        )
        assert float(loss.detach()) == pytest.approx(2 * float(want) / 18)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            torch.testing.assert_close(leaf.grad, 2 * gradient / 18)
        assert float(log["values"][1]) == pytest.approx(
            float(want), rel=1e-6
        )  # Miles divides this one itself


@pytest.mark.parametrize("garbage", [-91.0, -math.inf, math.nan, 0.0, 99.0])
def test_8_masked_garbage_reaches_nothing(garbage: float) -> None:  # miles 1363
    rows, tokens = [[0.0, -2.0, 1.0], [1.0, 0.5, 0.0]], [1, 0]
    loss, metrics, gradient = double.one_sample(
        rows, tokens, [garbage, -0.9], double.plain("is"), [0, 1], [math.nan, 1.0]
    )
    clean, _, reference = double.one_sample(rows, tokens, [-1.0, -0.9], double.plain("is"), [0, 1])
    assert float(loss) == float(clean)
    assert torch.equal(gradient, reference)
    assert all(bool(value.isfinite()) for value in metrics.values())
    args = Namespace(offpolicy_corr={"correction": "tis"}, use_tis=True)
    weighted, _, found = hook(args, [garbage, -1.0], [garbage, -0.9], [0, 1], [math.nan, 1.0])
    assert weighted.tolist() == [0.0, pytest.approx(math.exp(-0.1))]
    assert all(bool(value.isfinite().all()) for value in found.values())


@pytest.mark.parametrize("logq", [-91.0, -900.0])
def test_8_a_trained_token_far_outside_is_dropped_and_finite(logq: float) -> None:  # miles 1363
    loss, metrics, gradient = double.one_sample([[0.0, -2.0, 1.0]], [1], [logq], double.plain("mis"))
    assert float(loss) == 0.0
    assert bool((gradient == 0).all())
    assert all(bool(value.isfinite()) for value in metrics.values())


def test_8_an_infinite_weight_in_a_dropped_sequence_is_silent() -> None:  # miles 1363
    own = {"validate": False, "guards": {"outlier": {"low": 0.1, "high": 10.0}}}
    loss, _, gradient = double.one_sample([[0.0, -2.0, 1.0]], [1], [-900.0], double.plain("is", own=own))
    assert float(loss) == 0.0
    assert bool((gradient == 0).all())


def test_9_mismatch_is_measured_against_this_pass() -> None:  # miles 1151
    problem = [[math.log(0.3), math.log(0.7)]] * 2
    _, metrics, _ = double.one_sample(problem, [0, 1], [-1.1, -2.2], double.plain("is"))
    diff = (abs(math.log(0.3) + 1.1) + abs(math.log(0.7) + 2.2)) / 2
    assert float(metrics["train_rollout_logprob_abs_diff"]) == pytest.approx(diff, rel=1e-6)
    with pytest.raises(SettingsError, match="every ratio would be 1"):
        args = Namespace(offpolicy_corr={"correction": "mis"}, use_rollout_logprobs=True)
        hook(args, [-1.0, -2.0], [-1.1, -2.2], [1, 1])


@pytest.mark.parametrize(
    "key, short", [("loss_masks", [1]), ("advantages", [1.0]), ("rollout_log_probs", [-1.0])]
)
def test_10_lists_must_grow_with_the_response(key: str, short: list[float]) -> None:  # slime 1440
    with pytest.raises(oc.RecordError) as caught:
        double.one_sample(
            [[0.0, 1.0]] * 2, [0, 1], [-1.0, -1.0], double.plain("is"), **{key: [torch.tensor(short)]}
        )
    assert caught.value.field == key
    assert caught.value.sample == 0


def test_11_a_sample_without_log_probs_is_named() -> None:  # slime 1976
    problem = double.make_problem()
    args, state = double.plain("mis"), double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state, "none")
    batch["rollout_log_probs"][1] = None
    logits = double.local_logits(problem, problem.logits, args, state)
    with pytest.raises(oc.RecordError, match="rollout_log_probs") as caught:
        policy_loss(
            args,
            batch,
            logits,
            double.make_reducer(double.make_batch(problem, args, state, "none"), args, state, problem),
        )
    assert caught.value.sample == 1
    assert "use_rollout_logprobs" in str(caught.value)


def test_12_another_pipeline_stage_does_nothing() -> None:  # slime 846, miles 3125
    problem = double.make_problem()
    args = double.make_args()
    state = double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state)
    logits = double.local_logits(problem, problem.logits, args, state)
    _, real = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    double.install(double.single(last_stage=False))
    hidden = torch.randn(1, 4, 3, requires_grad=True)
    loss, metrics = policy_loss(args, {"rollout_log_probs": [torch.zeros(3)]}, hidden, lambda x: x.sum())
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert list(metrics) == list(real)
    assert bool((hidden.grad == 0).all())  # type: ignore[union-attr]


def test_14_tail_padding_changes_nothing() -> None:  # miles 542
    problem = double.make_problem()
    args, state = double.make_args(), double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state)
    logits = double.local_logits(problem, problem.logits, args, state)
    reducer = double.make_reducer(batch, args, state, problem)
    first = policy_loss(args, batch, logits, reducer)[0]
    longer = torch.cat([logits, torch.full((1, 40, problem.vocab), math.nan, dtype=logits.dtype)], 1)
    assert float(policy_loss(args, batch, longer, reducer)[0]) == float(first)
    with pytest.raises(ValueError, match="cannot hold"):
        policy_loss(args, batch, logits[:, : sum(problem.totals) - 1], reducer)


def test_15_padded_samples_are_cut_by_their_padded_length() -> None:  # miles 731: chunk 2 (bshd), not 1 (thd)
    from offpolicy_corr.integrations.miles.layout import row_layout

    args = Namespace(qkv_format="bshd", allgather_cp=False)
    batch = {"total_lengths": [4], "response_lengths": [3], "max_seq_lens": [8]}
    rows = [row_layout(args, batch, torch.zeros(1, 4, 2), rank, 2).row_tokens for rank in (0, 1)]
    assert rows[0].position.tolist() == [0, 1]
    assert rows[1].position.tolist() == [2]
    packed = row_layout(
        Namespace(qkv_format="thd", allgather_cp=False), batch, torch.zeros(1, 2, 2), 0, 2
    ).row_tokens
    assert packed.position.tolist() == [0]
    for allgather in (False, True):  # rows that no rank holds would be lost in silence
        with pytest.raises(ValueError, match="do not fit"):
            row_layout(
                Namespace(qkv_format="bshd", allgather_cp=allgather), batch, torch.zeros(1, 1, 2), 0, 2
            )


def test_17_a_support_without_its_token_is_not_repaired() -> None:  # sglang 36630, slime 2102
    p = [math.log(x) for x in (0.4, 0.2, 0.2, 0.2)]

    def loss_over(ids: list[int]) -> Any:
        support = {
            "rollout_sampling_mask_ids": [np.array(ids, np.int32)],
            "rollout_sampling_mask_offsets": [np.array([0, 2])],
        }
        return double.one_sample([p], [2], [-1.0986], double.plain("is", **MASKED_SUPPORT), **support)

    _, metrics, _ = loss_over([0, 2])
    assert float(metrics["offpolicy_corr/ratio"]) == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(oc.RecordError) as caught:
        loss_over([0, 1])
    assert (caught.value.sample, caught.value.token) == (0, 0)


def test_18_a_mask_missing_on_one_sample_is_an_error() -> None:  # slime 2167
    problem = double.make_problem()
    args, state = double.plain("sc+mis", **MASKED_SUPPORT), double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state, "supports")
    batch["rollout_sampling_mask_ids"][0] = None
    logits = double.local_logits(problem, problem.logits, args, state)
    with pytest.raises(oc.RecordError, match="rollout_sampling_mask_ids") as caught:
        policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    assert caught.value.sample == 0


def test_19_p_and_q_share_a_support() -> None:  # miles 3328
    rows = [[math.log(x) for x in (0.5, 0.3, 0.15, 0.05)]] * 2
    support = {
        "rollout_sampling_mask_ids": [np.array([0, 1, 0, 1], np.int32)],
        "rollout_sampling_mask_offsets": [np.array([0, 2, 4])],
    }
    q = [math.log(0.625), math.log(0.375)]
    _, metrics, _ = double.one_sample(rows, [0, 1], q, double.plain("is", **MASKED_SUPPORT), **support)
    assert float(metrics["offpolicy_corr/ratio"]) == pytest.approx(1.0, abs=1e-6)
    assert float(metrics["offpolicy_corr/support_mass"]) == pytest.approx(0.8, abs=1e-6)


def test_21_greedy_sampling_is_refused() -> None:  # miles 1190
    with pytest.raises(SettingsError, match="greedy"):
        double.one_sample([[1.0, 2.0]], [1], [-0.3], double.plain("is", rollout_temperature=0.0))


def test_22_weights_and_coefficients_are_constants() -> None:  # miles 1966
    # f = r at r = 1: the gradient of −r·log p is −(e_y − p), and twice that if r were differentiated
    row = [math.log(0.25), math.log(0.75)]
    _, _, gradient = double.one_sample([row], [0], [math.log(0.25)], double.plain("is"))
    torch.testing.assert_close(
        gradient[0], torch.tensor([-0.75, 0.75], dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "key", ["rollout_sampling_mask_ids", "rollout_sampling_mask_offsets", "rollout_sampling_mask_log_probs"]
)
def test_23_a_missing_mask_is_named_never_replaced(key: str) -> None:
    problem = double.make_problem()
    args, state = double.plain("sc+mis", **MASKED_SUPPORT), double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state, "supports")
    del batch[key]
    logits = double.local_logits(problem, problem.logits, args, state)
    with pytest.raises(oc.RecordError, match=f"(?s){key}.*v0.1.0.*transport") as caught:
        policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    assert caught.value.field == key


def test_23_heads_cannot_stand_in_for_supports() -> None:
    problem = double.make_problem()
    state = double.single()
    double.install(state)
    logits = double.local_logits(problem, problem.logits, double.make_args(), state)
    args = double.make_args(**MASKED_SUPPORT, offpolicy_corr={"candidates": "heads"})
    batch = double.make_batch(problem, args, state, "heads")
    with pytest.raises(SettingsError, match="over a support"):
        policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))


@pytest.mark.parametrize("form", ["thd", "bshd"])
def test_16_a_response_within_one_chunk_reaches_every_rank_s_graph(form: str) -> None:  # slime 695
    """Context parallelism over two ranks, and all rows of the response on the first: both must run backward."""
    problem = double.make_problem(seed=31, prompts=(27,), responses=(2,))
    args = double.make_args(qkv_format=form)
    found = []
    for rank in (0, 1):
        state = double.single(rank, 2)
        double.install(state)
        leaves = double.make_leaves(problem)
        batch = double.make_batch(problem, args, state)
        logits = double.local_logits(problem, leaves, args, state)
        loss, _ = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
        assert loss.requires_grad
        loss.backward()
        found.append(float(leaves[0].grad.abs().sum()))
    assert found[0] > 0 and found[1] == 0.0


def test_24_inputs_are_bit_identical_after_the_call() -> None:  # slime 2114
    problem = double.make_problem(seed=1)
    args, state = double.make_args(), double.single()
    double.install(state)
    leaves = double.make_leaves(problem)
    batch = double.make_batch(problem, args, state)
    before, logits = copy.deepcopy(batch), double.local_logits(problem, leaves, args, state)
    kept = logits.detach().clone()
    loss, _ = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    loss.backward()
    assert torch.equal(logits.detach(), kept)
    assert batch.keys() == before.keys()
    for key, value in before.items():
        if isinstance(value, list):
            for mine, old in zip(batch[key], value, strict=True):
                assert np.array_equal(
                    np.asarray(mine), np.asarray(old), equal_nan=np.asarray(old).dtype.kind == "f"
                ), key


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"guards": {"geometric_mean": {"low": 0.5, "high": 2.0}, "behind_newest_sampler": {"max_lag": 1}}},
        {"correction": "mis", "denominator": "kept"},
    ],
    ids=["plain", "guards", "kept"],
)
def test_13_no_samples_at_all_still_has_a_graph(own: dict[str, Any]) -> None:  # miles 683
    double.install(double.single())
    logits = torch.full((1, 8, 5), 6e4, dtype=torch.float16, requires_grad=True)
    batch = {
        key: []
        for key in ("unconcat_tokens", "total_lengths", "response_lengths", "loss_masks", "advantages")
    }
    batch |= {"rollout_log_probs": [], "rollout_topk_token_ids": [], "rollout_topk_log_probs": []}
    batch["offpolicy_corr_lag"] = []
    args = double.make_args(offpolicy_corr=own)
    loss, metrics = policy_loss(args, batch, logits, lambda x: sum([]))  # type: ignore[arg-type, return-value]
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert loss.dtype == torch.float32
    assert bool((logits.grad == 0).all())  # type: ignore[union-attr]
    assert all(float(value) == 0.0 for value in metrics.values())


def test_an_unknown_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if double.MILES_SRC:
        pytest.skip("the real host is known")
    import sys

    monkeypatch.setitem(sys.modules, "miles.backends.training_utils.parallel", SimpleNamespace())
    with pytest.raises(UnknownVersion, match="unknown version"):
        policy_loss(double.make_args(), {}, torch.zeros(1, 1, 2), lambda x: x.sum())
