"""The transport extension on a double of Miles' conversion and iterator, or on Miles itself with ``MILES_SRC``."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from offpolicy_corr.integrations.miles import policy_loss, transport
from offpolicy_corr.integrations.miles.host import UnknownVersion

import miles_double as double
import offpolicy_corr as oc
from miles_conversion import (
    CONVERSION,
    conversion,
    conversion_host,
    converter_args,
    samples_of,
)
from offpolicy_corr.records.assembly import Turn, assemble

__all__ = ["conversion_host"]  # a fixture
pytestmark = pytest.mark.usefixtures("conversion_host")


def test_candidates_groups_and_lags_reach_the_loss() -> None:
    problem = double.make_problem()
    own = {"groups": ["b200", "h100"], "guards": {"behind_newest_sampler": {"max_lag": 1}}}
    args = converter_args(**own)
    data = transport.convert_samples(args, samples_of(problem))
    data["total_lengths"] = problem.totals
    shard = conversion()._package_shards(args, data, [[2, 0, 1]])[0]
    transport.extend_trainer(args)
    shard["total_lengths"] = [problem.totals[i] for i in (2, 0, 1)]
    shard["advantages"] = [problem.advantages[i] for i in (2, 0, 1)]
    iterator = transport.first_module(*transport._ITERATOR).DataIterator(shard, micro_batch_size=3)
    keys = ["tokens", "total_lengths", "response_lengths", "loss_masks"]
    keys += ["rollout_log_probs", "advantages", "max_seq_lens"]
    batch = iterator.get_next(keys)
    assert np.array_equal(batch["rollout_topk_token_ids"][0], problem.head_ids[2])
    assert [int(group[0]) for group in batch["offpolicy_corr_group"]] == [0, 0, 1]
    assert [int(lag[0]) for lag in batch["offpolicy_corr_lag"]] == [2, 0, 1]

    reordered = double.make_problem()
    for name, values in vars(reordered).items():
        if isinstance(values, list):
            setattr(reordered, name, [values[i] for i in (2, 0, 1)])
    state = double.single()
    double.install(state)
    batch["unconcat_tokens"] = [torch.as_tensor(t) for t in batch.pop("tokens")]
    batch["rollout_log_probs"] = [torch.as_tensor(v) for v in batch["rollout_log_probs"]]
    batch["loss_masks"] = [torch.as_tensor(m, dtype=torch.int32) for m in batch["loss_masks"]]
    leaves = double.make_leaves(reordered)
    logits = double.local_logits(reordered, leaves, args, state)
    loss, metrics = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, reordered))
    reordered.advantages[0].zero_()  # two versions behind: dropped whole
    want, _, _ = double.expected(reordered, args)
    torch.testing.assert_close(loss.detach(), want, rtol=1e-9, atol=1e-9)
    assert float(metrics["offpolicy_corr/sequence_kept"]) == pytest.approx(2.0)


def test_it_is_reversible_and_idempotent() -> None:
    shards, iterator = conversion()._package_shards, transport.first_module(*transport._ITERATOR).DataIterator
    before = iterator.get_next
    for _ in range(2):
        transport.extend_rollout()
        transport.extend_trainer()
    assert conversion()._package_shards is not shards
    assert iterator.get_next is not before
    transport.remove()
    assert conversion()._package_shards is shards
    assert iterator.get_next is before


def test_passes_that_only_score_are_left_alone() -> None:
    transport.extend_trainer()
    iterator = transport.first_module(*transport._ITERATOR).DataIterator(
        {"tokens": [1], "rollout_topk_token_ids": [2]}, micro_batch_size=1
    )
    assert iterator.get_next(["tokens"]) == {"tokens": [1]}


@pytest.mark.parametrize(
    "function",
    [
        lambda args, data, partitions, world: [],
        lambda args, data, partitions: [],
        lambda args, data, partitions: [dict(data) for _ in partitions],
        lambda args, data, partitions: 1 / 0,
    ],
)
def test_another_packing_is_refused(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion(), "_package_shards", function)
    with pytest.raises(UnknownVersion):
        transport.extend_rollout()
    assert conversion()._package_shards is function


def test_a_version_without_the_conversion_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, CONVERSION, None)  # as before v0.1.0, where it was part of a class
    with pytest.raises(UnknownVersion, match="known are v0"):
        transport.convert_samples(converter_args(), samples_of(double.make_problem()))


def test_another_iterator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = transport.first_module(*transport._ITERATOR).DataIterator
    for function in (lambda self, names: {}, lambda self, keys: {}, lambda self, keys: 1 / 0):
        monkeypatch.setattr(iterator, "get_next", function)
        with pytest.raises(UnknownVersion):
            transport.extend_trainer()


def test_stale_or_partial_arrays_are_refused() -> None:
    samples = samples_of(double.make_problem())
    samples[1].rollout_topk_token_ids = samples[1].rollout_topk_token_ids[:-1]
    with pytest.raises(oc.RecordError, match="retry") as caught:
        transport.convert_samples(converter_args(), samples)
    assert (caught.value.sample, caught.value.field) == (1, "rollout_topk_token_ids")
    samples = samples_of(double.make_problem())
    samples[2].rollout_topk_log_probs = None
    with pytest.raises(oc.RecordError, match="this one has not") as caught:
        transport.convert_samples(converter_args(), samples)
    assert caught.value.sample == 2


@pytest.mark.parametrize("kind", ["heads", "supports"])
def test_a_reader_s_record_reaches_the_loss(kind: str) -> None:
    problem = double.make_problem()
    samples = samples_of(problem)
    heads = kind == "heads"
    for i, sample in enumerate(samples):
        prefix = "head" if heads else "support"
        ids, logprobs = (
            torch.from_numpy(getattr(problem, f"{prefix}_{name}")[i]) for name in ("ids", "logprobs")
        )
        rollout = (problem.rollout if heads else problem.support_rollout)[i]
        offsets = torch.from_numpy(problem.support_offsets[i])
        support = oc.CandidateSet.from_support
        found = oc.CandidateSet.from_topk(ids, logprobs) if heads else support(ids, offsets, logprobs)
        record = oc.SamplerRecord(problem.tokens[i][problem.prompts[i] :], rollout, found)
        transport.attach(sample, record, "h100")
    filters = {} if heads else {"rollout_top_p": 0.9, "rollout_top_k": 6}
    args, state = double.make_args(offpolicy_corr={"groups": ["b200", "h100"]}, **filters), double.single()
    data = transport.extra_keys(transport.Settings.of(args.offpolicy_corr), samples)
    assert ("rollout_topk_token_ids" in data) == heads
    double.install(state)
    batch = {**double.make_batch(problem, args, state, "none"), **data}
    batch["rollout_log_probs"] = [torch.tensor(sample.rollout_log_probs) for sample in samples]
    logits = double.local_logits(problem, problem.logits, args, state)
    loss, metrics = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    want, _, _ = double.expected(problem, args, kind)
    torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-9)
    assert float(metrics["offpolicy_corr/group/h100/tokens"]) == pytest.approx(3.0)


@pytest.mark.parametrize("kind", ["heads", "supports"])
def test_turns_with_tool_tokens_between_reach_the_loss(kind: str) -> None:
    """Two turns drawn by two groups; what nobody sampled has no candidates, no group, no q, and is not trained."""
    problem = double.make_problem(seed=14, prompts=(2,), responses=(5,), vocab=11)
    problem.tokens[0][:] = torch.tensor([1, 2, 3, 4, 9, 9, 5])
    problem.masks[0] = mask = torch.tensor([1, 1, 0, 0, 1], dtype=torch.int32)
    q = torch.tensor([0.4, 0.3, 0.2]).log().expand(5, 3)
    ids = (problem.tokens[0][2:, None] + torch.tensor([0, 1, 2])) % 11
    complete = q.log_softmax(-1) if kind == "supports" else q
    heads = oc.CandidateSet.from_topk(ids, complete)
    if kind == "supports":
        heads = oc.CandidateSet.from_support(ids.flatten(), torch.arange(0, 16, 3), complete.flatten())
    whole = oc.SamplerRecord(problem.tokens[0][2:], complete[:, 0], heads)
    semantics = {"logprobs": "support", "top_k": 3} if kind == "supports" else {"logprobs": "temperature"}
    turns = [
        Turn(
            whole.select(torch.arange(start, stop)),
            problem.tokens[0][: 2 + start],
            oc.SamplerSpec(engine="sglang", temperature=1.0, group=group, **semantics),
        )
        for start, stop, group in ((0, 2, "h100"), (4, 5, "b200"))
    ]
    trajectory = assemble(turns)
    sample = samples_of(problem)[0]
    transport.attach(sample, trajectory.record.select(torch.arange(2, 7)), loss_mask=trajectory.loss_mask[2:])
    assert sample.loss_mask == mask.tolist()
    assert sample.rollout_log_probs[2:4] == [0.0, 0.0]
    filters = {"rollout_top_p": 0.9, "rollout_top_k": 3} if kind == "supports" else {}
    args, state = double.make_args(offpolicy_corr={"groups": ["b200", "h100"]}, **filters), double.single()
    data = transport.extra_keys(transport.Settings.of(args.offpolicy_corr), [sample])
    assert data["offpolicy_corr_group"][0].tolist() == [1, 1, -1, -1, 0]
    double.install(state)
    batch = {**double.make_batch(problem, args, state, "none"), **data}
    batch["rollout_log_probs"] = [torch.tensor(sample.rollout_log_probs)]
    leaves = double.make_leaves(problem)
    logits = double.local_logits(problem, leaves, args, state)
    loss, metrics = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    want = oc.policy_loss(
        problem.logits[0][1:6], whole, problem.advantages[0].double(), loss_mask=mask.bool()
    ).loss
    torch.testing.assert_close(loss.detach(), want, rtol=1e-9, atol=1e-9)
    assert float(metrics["offpolicy_corr/group/h100/tokens"]) == pytest.approx(2 / 3)


def test_a_token_drawn_at_another_temperature_is_refused() -> None:
    samples = samples_of(double.make_problem())
    for sample, drawn_at in zip(samples, (1.0, torch.tensor([1.0] * 8 + [0.7]), 1.0), strict=True):
        record = oc.SamplerRecord(
            torch.tensor(sample.tokens[-sample.response_length :]),
            torch.full((sample.response_length,), -1.0),
            temperature=drawn_at,
        )
        transport.attach(sample, record)
    with pytest.raises(oc.RecordError, match="another temperature") as caught:
        transport.convert_samples(converter_args(), samples)
    assert (caught.value.sample, caught.value.token) == (1, 8)


def test_the_step_s_tokens_travel_for_torch_native_trainers_alone() -> None:
    problem = double.make_problem()
    for backend, found in (("fsdp", True), ("megatron", False)):
        args = converter_args()
        vars(args).update(calculate_per_token_loss=True, global_batch_size=2, train_backend=backend)
        data = transport.convert_samples(args, samples_of(problem))
        data["total_lengths"] = problem.totals
        shards = conversion()._package_shards(args, data, [[0], [1]])
        assert all(("offpolicy_corr_step_tokens" in shard) == found for shard in shards)
        if found:
            want = sum(int(mask.sum()) for mask in problem.masks[:2])
            assert [int(shard["offpolicy_corr_step_tokens"][0][0]) for shard in shards] == [want, want]


def test_attaching_clears_an_earlier_attempt() -> None:
    problem = double.make_problem()
    sample = samples_of(problem)[0]
    record = oc.SamplerRecord(problem.tokens[0][problem.prompts[0] :], problem.rollout[0])
    transport.attach(sample, record)
    assert sample.rollout_topk_token_ids is None
    with pytest.raises(oc.RecordError, match="lengths disagree"):
        transport.attach(sample, record.select(torch.arange(2)))
    with pytest.raises(oc.RecordError, match="tokens disagree") as caught:
        transport.attach(sample, record.select(torch.arange(len(record)).flip(0)))
    assert caught.value.token is not None


def test_a_record_left_over_from_before_a_retry_is_refused() -> None:
    """Of the right length, and none of the new tokens stands in an old head: nothing else would tell."""
    samples = samples_of(double.make_problem())
    for sample in samples:
        sample.rollout_topk_token_ids = sample.rollout_topk_log_probs = None
        tokens = torch.tensor(sample.tokens[-sample.response_length :])
        head = oc.CandidateSet.from_topk(tokens[:, None], torch.full((len(tokens), 1), -1.0))
        transport.attach(sample, oc.SamplerRecord(tokens, torch.full((len(tokens),), -1.0), head))
    transport.convert_samples(converter_args(), samples)
    samples[1].tokens = [(t + 1) % 23 for t in samples[1].tokens]  # sampled again, the record stayed
    with pytest.raises(oc.RecordError, match="of other tokens") as caught:
        transport.convert_samples(converter_args(), samples)
    assert caught.value.sample == 1


@pytest.mark.parametrize("kind", ["heads", "supports"])
def test_a_removed_sample_needs_no_record(kind: str) -> None:
    """Removed, or aborted and masked: without arrays, with old ones, from no known group, at another temperature."""
    problem = double.make_problem(seed=3)
    for sample in (0, 2):
        problem.masks[sample].zero_()
    samples = samples_of(problem)
    for i, sample in enumerate(samples):
        sample.rollout_topk_token_ids = sample.rollout_topk_log_probs = None
        if kind == "supports":
            sample.rollout_sampling_mask_ids = problem.support_ids[i]
            sample.rollout_sampling_mask_offsets = problem.support_offsets[i]
            sample.rollout_sampling_mask_log_probs = problem.support_logprobs[i]
        else:
            sample.rollout_topk_token_ids, sample.rollout_topk_log_probs = (
                problem.head_ids[i],
                problem.head_logprobs[i],
            )
        if i == 0:
            for key in transport.CANDIDATE_KEYS:
                setattr(sample, key, None)
            sample.metadata = {}
            sample.offpolicy_corr_temperature = np.full(sample.response_length, 0.3)
        if i == 2:
            for key in transport.CANDIDATE_KEYS:
                value = getattr(sample, key, None)
                setattr(sample, key, None if value is None else value[:-1])
            sample.offpolicy_corr_tokens = np.zeros(1)
    samples[0].loss_mask, samples[0].remove_sample = [1] * problem.responses[0], True
    args = converter_args(groups=["b200", "h100"])
    filters = {"rollout_top_p": 0.9, "rollout_top_k": 6} if kind == "supports" else {}
    vars(args).update(filters)
    data = transport.convert_samples(args, samples)
    state = double.single()
    double.install(state)
    batch = {
        **double.make_batch(problem, args, state, kind),
        **{k: data[k] for k in transport.KEYS if k in data},
    }
    logits = double.local_logits(problem, problem.logits, args, state)
    loss, _ = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    want, _, _ = double.expected(problem, args, kind)
    torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-9)


def test_unknown_groups_are_refused() -> None:
    samples = samples_of(double.make_problem())
    with pytest.raises(oc.RecordError, match="an unknown group") as caught:
        transport.convert_samples(converter_args(groups=["b200"]), samples)
    assert (caught.value.sample, caught.value.value) == (1, "h100")
    samples[0].metadata = {}
    with pytest.raises(oc.RecordError, match="without sampler group"):
        transport.convert_samples(converter_args(groups=["b200", "h100"]), samples)


def test_options_that_withhold_metadata_are_refused() -> None:
    args = converter_args()
    args.use_dynamic_global_batch_size = True
    with pytest.raises(ValueError, match="use_dynamic_global_batch_size"):
        transport.convert_samples(args, samples_of(double.make_problem()))
