"""Turns, retries and partial rollouts: what is trained, what is context, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from offpolicy_corr.integrations.sglang import read_turns

import offpolicy_corr as oc
from answers import good_sglang
from offpolicy_corr.records.assembly import Turn, assemble, pack
from offpolicy_corr.records.sampler_spec import SamplerSpec

FP8 = SamplerSpec(engine="vllm", logprobs="processed", temperature=1.0, group="h100-fp8", vocab_size=100)
FP4 = SamplerSpec(engine="vllm", logprobs="processed", temperature=0.7, group="b200-nvfp4", vocab_size=100)


def turn(
    prompt: list[int], drawn: list[int], spec: SamplerSpec = FP8, version: int = 3, **more: object
) -> Turn:
    count = len(drawn)
    record = oc.SamplerRecord(
        torch.tensor(drawn, dtype=torch.int64),
        torch.full((count,), -0.5),
        temperature=spec.temperature,
        weight_version=torch.full((count,), version),
    )
    return Turn(record, torch.tensor(prompt), spec, **more)  # type: ignore[arg-type]


def test_tool_and_template_tokens_are_context() -> None:
    whole = assemble([turn([1, 2], [10, 11]), turn([1, 2, 10, 11, 50, 51], [12], FP4, 4)])
    assert whole.record.tokens.tolist() == [1, 2, 10, 11, 50, 51, 12]
    assert whole.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert whole.turn.tolist() == [-1, -1, 0, 0, -1, -1, 1]
    assert whole.record.logprobs.isnan().tolist() == (~whole.loss_mask).tolist()
    names = whole.record.group_names
    groups = [names[g] if g >= 0 else None for g in whole.record.group.tolist()]
    assert groups == [None, None, "h100-fp8", "h100-fp8", None, None, "b200-nvfp4"]
    assert whole.record.weight_version.tolist() == [-1, -1, 3, 3, -1, -1, 4]
    assert whole.record.specs == (FP8, FP4) == pack([whole, whole]).record.specs
    assert whole.record.temperature[whole.loss_mask].tolist() == pytest.approx([1.0, 1.0, 0.7])


def test_a_partial_rollout_goes_on_under_another_sampler_without_context_between() -> None:
    first = turn([1], [10, 11], FP8, 3, truncated=True, finish_reason="abort")
    whole = assemble([first, turn([1, 10, 11], [12, 13], FP4, 4)])
    assert whole.loss_mask.tolist() == [False, True, True, True, True] and not whole.truncated
    assert whole.record.weight_version.tolist() == [-1, 3, 3, 4, 4]
    assert assemble([first]).truncated


def test_a_retried_answer_is_dropped_only_when_said() -> None:
    calls = [turn([1], [66, 67]), turn([1], [10])]
    with pytest.raises(oc.RecordError, match="kept=0") as caught:
        assemble(calls)
    assert (caught.value.token, caught.value.field) == (1, "turns[1].prompt")
    whole = assemble([replace(calls[0], kept=0), calls[1]])
    assert whole.record.tokens.tolist() == [1, 10] and whole.turn.tolist() == [-1, 1]


def test_an_answer_that_was_cut_keeps_its_beginning() -> None:
    calls = [turn([1], [10, 11, 99], kept=2), turn([1, 10, 11, 50], [12])]
    assert assemble(calls).record.tokens.tolist() == [1, 10, 11, 50, 12]
    with pytest.raises(oc.RecordError, match="outside the 3"):
        assemble([replace(calls[0], kept=4)])


@pytest.mark.parametrize(
    ("prompt", "token"),
    [([1, 2, 10, 12, 50], 3), ([1, 2, 1011, 50, 51], 2), ([1, 2, 10], 3), ([9, 2, 10, 11], 0)],
)
def test_a_prompt_that_does_not_continue_is_refused_at_its_first_id(prompt: list[int], token: int) -> None:
    with pytest.raises(oc.RecordError) as caught:
        assemble([turn([1, 2], [10, 11]), turn(prompt, [12])], sample=7)
    assert (caught.value.sample, caught.value.token) == (7, token)


def test_what_cannot_be_joined_is_refused() -> None:
    with pytest.raises(oc.RecordError, match="context ids are unknown"):
        assemble([replace(turn([1], [2]), prompt=None)])
    bare = turn([1, 10], [11])
    bare = replace(bare, record=replace(bare.record, logprobs=None))
    with pytest.raises(oc.RecordError, match="logprobs"):
        assemble([turn([1], [10]), bare])
    with pytest.raises(oc.RecordError, match="outside"):
        assemble([turn([1], [100])])
    nameless = SamplerSpec(engine="vllm", logprobs="processed")
    with pytest.raises(oc.RecordError, match="no name"):
        assemble([turn([1], [2], nameless)])
    assert assemble([turn([1], [2], nameless)], strict=False).record.group is None
    with pytest.raises(ValueError, match="at least one turn"):
        assemble([])


def test_readers_answers_can_be_assembled_with_missing_values_masked() -> None:
    spec = SamplerSpec(engine="sglang", logprobs="temperature", group="a", vocab_size=100)
    first = read_turns(good_sglang(), spec, prompt=[1, 2])
    second = good_sglang()
    second["meta_info"]["output_token_logprobs"][1][0] = None
    with pytest.warns(oc.RecordWarning):
        after = read_turns(second, spec, prompt=[1, 2, 5, 6, 7, 40], on_missing="mask")
    whole = assemble([*first, *after])
    assert whole.loss_mask.int().tolist() == [0, 0, 1, 1, 1, 0, 1, 0, 1] and whole.missing == 1
    assert whole.record.candidates.offsets.diff().tolist() == [0, 0, 2, 2, 2, 0, 2, 2, 2]
    batch = pack([whole, assemble(first)])
    assert batch.sequence_ids.bincount().tolist() == [9, 5] and batch.missing == 1
    logits = torch.randn(len(batch.loss_mask), 100, requires_grad=True)
    out = oc.policy_loss(
        logits, batch.record, torch.ones(14), loss_mask=batch.loss_mask,
        sequence_ids=batch.sequence_ids, reduction="sequence-mean",
    )  # fmt: skip
    out.loss.backward()
    assert torch.isfinite(out.loss) and (logits.grad[~batch.loss_mask] == 0).all()


def test_samplers_that_may_not_be_mixed_do_not_meet_in_a_batch() -> None:
    tokenizers = [replace(FP8, tokenizer_hash="x"), replace(FP4, tokenizer_hash="y")]
    with pytest.raises(oc.RecordError, match="tokenizer_hash"):
        pack([assemble([turn([1], [2], spec)]) for spec in tokenizers])
    with pytest.raises(oc.RecordError, match="no name"):
        pack([assemble([turn([1], [2], replace(FP8, group=None))], strict=False)])


def test_an_answer_is_truncated_where_it_was_kept_to_its_end() -> None:
    long, tool = turn([1], [10, 11], truncated=True), turn([1, 10, 11], [12, 13, 14])
    assert not assemble([long, replace(tool, kept=2)]).truncated
    assert assemble([long, replace(tool, kept=0)]).truncated
    assert assemble([replace(long, kept=2)]).truncated and not assemble([replace(long, kept=1)]).truncated


@pytest.mark.parametrize("prompt", [torch.tensor([1.7]), torch.tensor([[1]]), torch.tensor([True]), [1]])
def test_a_prompt_is_integer_ids(prompt: Any) -> None:
    with pytest.raises(oc.RecordError, match="no integer ids") as caught:
        assemble([replace(turn([1], [2]), prompt=prompt)])
    assert caught.value.field == "turns[0].prompt"


def test_samples_of_one_prompt_are_named_as_such() -> None:
    samples = [turn([1, 2], [5]), turn([1, 2], [6]), turn([1, 2], [7])]
    with pytest.raises(
        oc.RecordError, match="turns 0 and 1 have one prompt: they are samples of it"
    ) as caught:
        assemble(samples)
    assert "once per sample" in str(caught.value)
    batch = pack([assemble([sample], sample=i) for i, sample in enumerate(samples)])
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_template_that_drops_earlier_thinking_is_a_remedy_of_its_own() -> None:
    with pytest.raises(oc.RecordError, match=r"leaves out earlier thinking.*separate trajectories"):
        assemble([turn([1], [90, 91, 5]), turn([1, 5, 2], [6])])
