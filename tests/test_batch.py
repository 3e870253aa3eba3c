"""From a model's logits and samplers' records to a loss: every layout gives the loss of the tokens taken one by one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import offpolicy_corr as oc
from offpolicy_corr.records.assembly import Trajectory, Turn, assemble

VOCAB, PAD = 13, 12
PROMPTS = [[1, 2, 3], [4], [5, 6]]
RESPONSES = [[7, 8], [9, 10, 11], [2]]
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0])
SPEC = oc.SamplerSpec(engine="vllm", logprobs="processed", temperature=1.0, group="a", vocab_size=VOCAB)


def record(tokens: list[int], seed: int = 0, temperature: float | Tensor = 1.0) -> oc.SamplerRecord:
    """Heads of three candidates; log-probs, group and version differ from token to token."""
    make = torch.Generator().manual_seed(100 * seed + len(tokens))
    logq = torch.randn(len(tokens), VOCAB, generator=make).log_softmax(1)
    head = logq.topk(3, 1)
    drawn = torch.tensor(tokens, dtype=torch.int64)
    return oc.SamplerRecord(
        drawn,
        logq.gather(1, drawn[:, None]).squeeze(1),
        oc.CandidateSet.from_topk(head.indices, head.values),
        temperature,
        group=torch.zeros(len(tokens), dtype=torch.int64),
        group_names=(f"group-{seed}",),
        weight_version=torch.full((len(tokens),), seed),
    )


RECORDS = [record(response, seed) for seed, response in enumerate(RESPONSES)]


def model(input_ids: Tensor, starts: Tensor | None = None) -> Tensor:
    """Logits that depend on the ids so far in the sequence, by a running sum: right only if nothing is shifted."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    seen = torch.nn.functional.one_hot(input_ids, VOCAB).double().cumsum(1)
    return ((seen / (1 + seen.sum(2, keepdim=True))) @ table * 3).requires_grad_()


def padded(side: str) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask; "both" pads prompts left and responses right, as TRL and verl do."""
    rows, width = [], 7
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        missing = width - len(prompt) - len(response)
        left = {"left": missing, "right": 0, "both": 4 - len(prompt)}[side]
        rows.append([PAD] * left + prompt + response + [PAD] * (missing - left))
    ids = torch.tensor(rows)
    return ids, (ids != PAD).long()


def by_hand(logits: Tensor, ids: Tensor, **options: Any) -> tuple[oc.PolicyLoss, Tensor]:
    """The loss of the response tokens alone: logits picked one by one, nothing masked."""
    rows, advantages = [], []
    for sample, response in enumerate(RESPONSES):
        start = next(
            c for c in range(ids.shape[1]) if ids[sample, c : c + len(response)].tolist() == response
            and ids[sample, c - 1] == PROMPTS[sample][-1]
        )  # fmt: skip
        rows += [logits[sample, start + i - 1] for i in range(len(response))]
        advantages += [ADVANTAGES[sample]] * len(response)
    sequence_ids = torch.tensor([0, 0, 1, 1, 1, 2])
    joined = oc.SamplerRecord.concat(options.pop("records", RECORDS))
    out = oc.policy_loss(
        torch.stack(rows), joined, torch.stack(advantages), sequence_ids=sequence_ids, **options
    )
    (gradient,) = torch.autograd.grad(out.loss, logits)
    return out, gradient


@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "sum"])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_every_padding_gives_the_loss_of_the_tokens_taken_one_by_one(side: str, reduction: str) -> None:
    ids, attended = padded(side)
    logits = model(ids)
    batch = oc.flatten_batch(logits, ids, RECORDS, ADVANTAGES, attention_mask=attended)
    out = oc.policy_loss(**vars(batch), reduction=reduction)
    (gradient,) = torch.autograd.grad(out.loss, logits, retain_graph=True)
    expected, expected_gradient = by_hand(logits, ids, reduction=reduction)
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(gradient, expected_gradient)
    assert int(batch.loss_mask.sum()) == 6
    own = out.diagnostics.logprobs[batch.loss_mask]
    torch.testing.assert_close(own, expected.diagnostics.logprobs)


def test_logits_are_a_view_and_nothing_else_is_as_large() -> None:
    ids, attended = padded("left")
    logits = model(ids)
    batch = oc.flatten_batch(logits, ids, RECORDS, ADVANTAGES, attention_mask=attended)
    assert batch.logits.data_ptr() == logits.data_ptr() and batch.logits.shape == (21, VOCAB)
    assert set(vars(batch)) == {"logits", "record", "advantages", "loss_mask", "sequence_ids"}


def test_the_gradient_can_be_written_over_the_models_logits() -> None:
    ids, attended = padded("right")
    gradients = []
    for inplace in (False, True):
        leaf = model(ids)
        logits = leaf * 1.0
        batch = oc.flatten_batch(logits, ids, RECORDS, ADVANTAGES, attention_mask=attended)
        oc.policy_loss(**vars(batch), inplace=inplace).loss.backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_everything_a_record_holds_comes_to_its_row() -> None:
    ids, attended = padded("right")
    records = [
        record(RESPONSES[0], 0, 0.5), record(RESPONSES[1], 1, torch.tensor([1.0, 2.0, 3.0])), record(RESPONSES[2], 2)
    ]  # fmt: skip
    batch = oc.flatten_batch(model(ids), ids, records, ADVANTAGES, attention_mask=attended)
    placed, joined = batch.record.select(batch.loss_mask), oc.SamplerRecord.concat(records)
    assert placed.tokens.tolist() == joined.tokens.tolist() == [7, 8, 9, 10, 11, 2]
    for name in ("logprobs", "temperature", "group", "weight_version"):
        assert torch.equal(getattr(placed, name), getattr(joined, name)), name
    for name in ("ids", "logprobs", "offsets", "complete"):
        assert torch.equal(getattr(placed.candidates, name), getattr(joined.candidates, name)), name
    assert placed.group_names == ("group-0", "group-1", "group-2")
    outside = ~batch.loss_mask
    assert batch.record.logprobs[outside].isnan().all() and (batch.record.group[outside] == -1).all()
    assert (batch.record.weight_version[outside] == -1).all()
    assert (batch.record.candidates.offsets.diff()[outside] == 0).all()
    keys = oc.metrics.summarize(
        oc.policy_loss(**vars(batch)).diagnostics, batch.record, loss_mask=batch.loss_mask
    )
    assert keys["group/group-1/tokens"] == 3 and keys["tokens"] == 6


def test_complete_supports_come_to_their_rows_too() -> None:
    support = oc.CandidateSet.from_support(
        torch.tensor([7, 3, 8]), torch.tensor([0, 2, 3]), torch.tensor([-0.2, math.log(1 - math.exp(-0.2)), 0.0])
    )  # fmt: skip
    sampled = oc.SamplerRecord(torch.tensor([7, 8]), torch.tensor([-0.2, 0.0]), support)
    ids = torch.tensor([[1, 2, 7, 8]])
    batch = oc.flatten_batch(model(ids), ids, [sampled], torch.ones(1))
    assert batch.record.candidates.complete.tolist() == [False, True, True, False]
    assert oc.policy_loss(**vars(batch)).loss.isfinite()


@pytest.mark.parametrize("kind", ["cu_seqlens", "position_ids"])
def test_packed_sequences_do_not_run_into_each_other(kind: str) -> None:
    pieces = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    ids = torch.tensor([[i for piece in pieces for i in piece]])
    bounds = torch.tensor([0, 5, 9, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(len(piece)) for piece in pieces])[None]
    where = {"cu_seqlens": bounds} if kind == "cu_seqlens" else {"position_ids": positions}
    logits = torch.cat([model(torch.tensor([piece])) for piece in pieces], 1).detach().requires_grad_()
    batch = oc.flatten_batch(logits, ids, RECORDS, ADVANTAGES, **where)
    assert batch.loss_mask.nonzero().squeeze(1).tolist() == [2, 3, 5, 6, 7, 10]
    assert batch.record.tokens[batch.loss_mask].tolist() == [7, 8, 9, 10, 11, 2]
    assert batch.sequence_ids[batch.loss_mask].tolist() == [0, 0, 1, 1, 1, 2]
    out = oc.policy_loss(**vars(batch), reduction="sequence-mean")
    alone = [
        oc.policy_loss(**vars(oc.flatten_batch(model(torch.tensor([p])), torch.tensor([p]), [r], a[None]))).loss
        for p, r, a in zip(pieces, RECORDS, ADVANTAGES, strict=True)
    ]  # fmt: skip
    torch.testing.assert_close(out.loss, torch.stack(alone).mean())
    padded_end = oc.flatten_batch(
        torch.cat([logits, logits[:, :2]], 1), torch.nn.functional.pad(ids, (0, 2)), RECORDS, ADVANTAGES,
        cu_seqlens=bounds,
    )  # fmt: skip
    assert padded_end.sequence_ids[-2:].tolist() == [-1, -1]
    torch.testing.assert_close(oc.policy_loss(**vars(padded_end), reduction="sequence-mean").loss, out.loss)


def test_advantages_per_token_stand_beside_their_token() -> None:
    ids, attended = padded("left")
    logits = model(ids)
    per_token = torch.full(ids.shape, math.nan)  # what is not trained is not looked at
    per_token[0, 5:], per_token[2, 6] = torch.tensor([1.0, 2.0]), 6.0
    per_token[1, 4:] = torch.tensor([3.0, 4.0, 5.0])
    batch = oc.flatten_batch(logits, ids, RECORDS, per_token, attention_mask=attended)
    assert batch.advantages[batch.loss_mask].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert oc.policy_loss(**vars(batch)).loss.isfinite()


def test_a_loss_mask_takes_tokens_out_and_their_garbage_with_them() -> None:
    ids, attended = padded("right")
    masked = torch.zeros(ids.shape)
    masked[0, 3], masked[1, 1], masked[1, 3] = 1, 1, 1
    holed = RECORDS[1].logprobs.clone()
    holed[1] = math.nan
    damaged = [
        replace(RECORDS[0], tokens=torch.tensor([7, -1])),
        replace(RECORDS[1], logprobs=holed),
        RECORDS[2],
    ]
    logits = model(ids)
    batch = oc.flatten_batch(logits, ids, damaged, ADVANTAGES, attention_mask=attended, loss_mask=masked)
    assert batch.loss_mask.nonzero().squeeze(1).tolist() == [2, 7, 9]
    assert batch.record.tokens[batch.loss_mask].tolist() == [7, 9, 11]
    assert oc.policy_loss(**vars(batch), correction="mis").loss.isfinite()


def test_a_response_mask_places_records_between_tool_tokens() -> None:
    ids = torch.tensor([[1, 2, 7, 8, 5, 5, 9]])
    drawn = torch.tensor([[0, 0, 1, 1, 0, 0, 1]])
    batch = oc.flatten_batch(model(ids), ids, [record([7, 8, 9])], torch.ones(1), response_mask=drawn)
    assert batch.loss_mask.nonzero().squeeze(1).tolist() == [1, 2, 5]
    assert batch.record.tokens[batch.loss_mask].tolist() == [7, 8, 9]


def test_a_trajectory_covers_its_whole_sequence_and_brings_its_mask() -> None:
    calls = [
        Turn(replace(record([7, 8]), group=None, group_names=()), torch.tensor([1, 2]), SPEC),
        Turn(replace(record([9]), group=None, group_names=()), torch.tensor([1, 2, 7, 8, 5, 5]), SPEC),
    ]
    whole = assemble(calls)
    assert isinstance(whole, Trajectory)
    ids = torch.tensor([[1, 2, 7, 8, 5, 5, 9, PAD]])
    given = {"attention_mask": ids != PAD}
    batch = oc.flatten_batch(model(ids), ids, [whole], torch.ones(1), **given)
    assert batch.loss_mask.nonzero().squeeze(1).tolist() == [1, 2, 5]
    assert batch.record.tokens[batch.loss_mask].tolist() == [7, 8, 9] and batch.record.specs == (SPEC,)
    assert oc.policy_loss(**vars(batch)).loss.isfinite()
    with pytest.raises(oc.RecordError, match="which no record covers") as caught:  # column 4 is a tool's
        oc.flatten_batch(model(ids), ids, [whole], torch.ones(1), loss_mask=ids >= 5, **given)
    assert (caught.value.sample, caught.value.field) == (0, "loss_mask") and "column 4" in str(caught.value)


def test_logits_of_the_last_positions_are_enough() -> None:
    ids, _ = padded("left")
    attended = ids != PAD
    logits = model(ids)
    whole = oc.policy_loss(
        **vars(oc.flatten_batch(logits, ids, RECORDS, ADVANTAGES, attention_mask=attended))
    )
    last = logits[:, -4:]
    batch = oc.flatten_batch(last, ids, RECORDS, ADVANTAGES, attention_mask=attended, logits_to_keep=4)
    torch.testing.assert_close(oc.policy_loss(**vars(batch)).loss, whole.loss)
    with pytest.raises(oc.RecordError, match="no logits predict the trained token in column 4") as caught:
        oc.flatten_batch(logits[:, -3:], ids, RECORDS, ADVANTAGES, attention_mask=attended, logits_to_keep=3)
    assert (caught.value.sample, caught.value.token) == (1, 0) and "one position more" in caught.value.remedy
    with pytest.raises(ValueError, match="if the model was called with logits_to_keep, pass it on"):
        oc.flatten_batch(last, ids, RECORDS, ADVANTAGES, attention_mask=attended)
    with pytest.raises(ValueError, match="must lie in"):
        oc.flatten_batch(last, ids, RECORDS, ADVANTAGES, logits_to_keep=8)


def test_hidden_states_go_the_same_way() -> None:
    ids, attended = padded("right")
    hidden = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    lm_head = torch.randn(VOCAB, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    given = {"attention_mask": attended}
    batch = oc.flatten_batch(hidden, ids, RECORDS, ADVANTAGES, **given)
    inputs = vars(batch)
    out = oc.policy_loss_from_hidden(inputs.pop("logits"), lm_head, **inputs)
    dense = oc.flatten_batch(hidden @ lm_head.T, ids, RECORDS, ADVANTAGES, **given)
    torch.testing.assert_close(out.loss, oc.policy_loss(**vars(dense)).loss)


def test_an_empty_response_trains_nothing() -> None:
    ids = torch.tensor([[1, 2, 7], [3, 4, PAD]])
    batch = oc.flatten_batch(
        model(ids), ids, [record([7]), record([])], torch.ones(2), attention_mask=ids != PAD
    )
    assert batch.loss_mask.tolist() == [False, True, False, False, False, False]


# what does not fit


def call(**changed: Any) -> oc.FlatBatch:
    ids, attended = padded("right")
    given: dict[str, Any] = {
        "logits": model(ids), "input_ids": ids, "records": RECORDS, "advantages": ADVANTAGES,
        "attention_mask": attended,
    }  # fmt: skip
    return oc.flatten_batch(**(given | changed))


def test_a_token_that_differs_is_named_by_sample_and_token() -> None:
    wrong = [RECORDS[0], replace(RECORDS[1], tokens=torch.tensor([9, 3, 11])), RECORDS[2]]
    with pytest.raises(oc.RecordError, match="not the one in input_ids, 10") as caught:
        call(records=wrong)
    error = caught.value
    assert (error.sample, error.token, error.field, error.value) == (1, 1, "tokens", 3)
    assert "engine's own token ids" in error.remedy


def test_padding_that_is_not_said_is_found_by_the_tokens() -> None:
    with pytest.raises(oc.RecordError, match="pass attention_mask for padding") as caught:
        call(attention_mask=None)
    assert (caught.value.sample, caught.value.token) == (0, 0)


def test_shifted_logits_are_refused() -> None:
    ids, _ = padded("right")
    with pytest.raises(
        ValueError, match="pass the model's logits whole, the shift by one token is made here"
    ):
        call(logits=model(ids)[:, :-1])
    with pytest.raises(ValueError, match=r"policy_loss takes \[T, V\] as it is"):
        call(logits=model(ids).flatten(0, 1))
    with pytest.raises(TypeError, match=r"pass model\(input_ids\)\.logits"):
        call(logits=[1])
    with pytest.raises(ValueError, match=r"integer \[B, L\]"):
        call(input_ids=ids[0])


def test_the_first_token_and_one_after_padding_have_no_logits() -> None:
    ids = torch.tensor([[7, 8, 9]])
    with pytest.raises(oc.RecordError, match="no logits predict the trained token in column 0") as caught:
        oc.flatten_batch(model(ids), ids, [record([7, 8, 9])], torch.ones(1))
    assert (caught.value.sample, caught.value.token) == (0, 0)
    oc.flatten_batch(model(ids), ids, [record([7, 8, 9])], torch.ones(1), loss_mask=torch.tensor([[0, 1, 1]]))
    hole = {"attention_mask": torch.tensor([[1, 0, 1]])}
    with pytest.raises(oc.RecordError, match="no logits predict the trained token in column 2"):
        oc.flatten_batch(model(ids), ids, [record([9])], torch.ones(1), **hole)
    packed = [record([8]), record([9])]
    with pytest.raises(oc.RecordError, match="column 2") as caught:  # the first token of the second sequence
        oc.flatten_batch(model(ids), ids, packed, torch.ones(2), cu_seqlens=torch.tensor([0, 2, 3]))
    assert caught.value.sample == 1


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"records": RECORDS[0]}, TypeError, "got a single one"),
        ({"records": RECORDS[:2]}, ValueError, "2 records for 3 sequences"),
        ({"records": [*RECORDS[:2], {"meta_info": {}}]}, TypeError, r"records\[2\] must be a SamplerRecord"),
        ({"records": [record([7] * 9), *RECORDS[1:]]}, oc.RecordError, "has 9 tokens and its sequence has 5"),
        (
            {"records": [replace(RECORDS[0], logprobs=None), *RECORDS[1:]]}, oc.RecordError,
            "Record the same fields of every sample",
        ),
        ({"advantages": torch.ones(2)}, ValueError, r"advantages must be \[3\], one per sequence, or \(3, 7\)"),
        ({"advantages": [1.0, 1.0, 1.0]}, TypeError, "advantages must be a floating tensor"),
        ({"advantages": torch.ones(3, dtype=torch.int64)}, TypeError, "advantages must be a floating tensor"),
        ({"attention_mask": torch.ones(3)}, ValueError, "attention_mask must have the shape of input_ids"),
        ({"attention_mask": torch.full((3, 7), 2)}, ValueError, "attention_mask must be bool, 0 or 1"),
        ({"loss_mask": torch.full((3, 7), 0.5)}, ValueError, "loss_mask must be bool, 0 or 1"),
        ({"loss_mask": torch.ones(3, 7)}, oc.RecordError, "trains the token in column 0, which no record covers"),
        ({"response_mask": torch.ones(3, 7)}, ValueError, "response_mask is set on padding, in column 5"),
        (
            {"response_mask": padded("right")[1]}, oc.RecordError,
            "the record has 2 tokens and response_mask marks 5",
        ),
        ({"cu_seqlens": torch.tensor([0, 7])}, ValueError, "give one of attention_mask"),
        ({"cu_seqlens": torch.tensor([0, 7]), "attention_mask": None}, ValueError, "lie in one row"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changed)


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        ({"cu_seqlens": torch.tensor([1, 3])}, "must start at 0"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "end by 3"),
        ({"cu_seqlens": torch.tensor([0, 2, 1])}, "never fall"),
        ({"cu_seqlens": torch.tensor([0.0, 3.0])}, r"integer \[S \+ 1\]"),
        ({"position_ids": torch.tensor([[1, 2, 3]])}, "must start at 0"),
        ({"position_ids": torch.tensor([0, 1, 2])}, "must be integer"),
        ({"position_ids": torch.tensor([[0, 1, 2]]), "cu_seqlens": torch.tensor([0, 3])}, "give one of"),
    ],
)
def test_packing_that_contradicts_itself_is_refused(packing: dict[str, Any], message: str) -> None:
    ids = torch.tensor([[1, 2, 7]])
    with pytest.raises(ValueError, match=message):
        oc.flatten_batch(model(ids), ids, [record([7])], torch.ones(1), **packing)


# advantages of a group


def test_group_advantages_are_centered_and_scaled_within_each_prompt() -> None:
    rewards, prompts = torch.tensor([1.0, 0.0, 0.0, 5.0, 1.0]), torch.tensor([7, 9, 7, 3, 9])
    assert oc.group_advantages(rewards, prompts).tolist() == pytest.approx([1, -1, -1, 0, 1])
    assert oc.group_advantages(rewards, prompts, normalize=False).tolist() == [0.5, -0.5, -0.5, 0, 0.5]
    unequal = oc.group_advantages(
        torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 1, 0, 1]), normalize=False
    )
    assert unequal.tolist() == [0.0, -0.5, 0.0, 0.5]
    with pytest.raises(ValueError, match="must both be"):
        oc.group_advantages(rewards, prompts[:2])


def test_rewards_that_no_advantage_can_be_made_of_are_refused() -> None:
    prompts = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="the reward of sample 1 is nan"):
        oc.group_advantages(torch.tensor([1.0, math.nan]), prompts)
    with pytest.raises(ValueError, match="rewards must be floating"):  # 0.5 would become 0 in integers
        oc.group_advantages(torch.tensor([1, 0]), prompts)
    with pytest.raises(ValueError, match="prompt_ids int32 or int64"):
        oc.group_advantages(torch.tensor([1.0, 0.0]), prompts.double())
