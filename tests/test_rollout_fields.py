"""Framework field names: there and back, and what they cannot hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import offpolicy_corr as oc
from offpolicy_corr.records.rollout_fields import from_fields, to_fields

HALF = float(np.float32(math.log(0.5)))


def heads() -> oc.SamplerRecord:
    ids, logprobs = (
        torch.tensor([[5, 9], [6, 8], [3, 4]]),
        torch.tensor([[-0.5, -2.0], [-0.2, -2.5], [-0.7, -1.0]]),
    )
    return oc.SamplerRecord(
        torch.tensor([5, 6, 7]), torch.tensor([-0.5, -0.2, -3.0]), oc.CandidateSet.from_topk(ids, logprobs)
    )


def supports(logprobs: bool = True) -> oc.SamplerRecord:
    values = torch.tensor([HALF, HALF, 0.0, HALF, HALF]) if logprobs else None
    candidates = oc.CandidateSet.from_support(
        torch.tensor([5, 9, 6, 7, 3]), torch.tensor([0, 2, 3, 5]), values
    )
    return oc.SamplerRecord(torch.tensor([9, 6, 3]), torch.tensor([HALF, 0.0, HALF]), candidates)


@pytest.mark.parametrize(
    ("record", "support"),
    [
        (heads(), "top_p"),
        (supports(), "top_p"),
        (supports(False), "top_p"),
        (supports(False), "sampling_mask"),
    ],
)
def test_fields_come_back_as_the_record(record: oc.SamplerRecord, support: str) -> None:
    back = from_fields(record.tokens, to_fields(record, support=support))
    assert torch.equal(back.logprobs, record.logprobs)
    assert torch.equal(back.candidates.ids.long(), record.candidates.ids)
    assert torch.equal(back.candidates.offsets, record.candidates.offsets)
    assert torch.equal(back.candidates.complete, record.candidates.complete)
    both = (back.candidates.logprobs, record.candidates.logprobs)
    assert both == (None, None) or torch.equal(*both)


def test_names_and_dtypes_are_the_frameworks() -> None:
    fields = to_fields(heads())
    assert {name: (value.dtype.name, value.shape) for name, value in fields.items()} == {
        "rollout_log_probs": ("float32", (3,)),
        "rollout_topk_token_ids": ("int32", (3, 2)),
        "rollout_topk_log_probs": ("float32", (3, 2)),
    }
    fields = to_fields(supports())
    assert fields["rollout_top_p_token_offsets"].tolist() == [0, 2, 3, 5]
    assert set(to_fields(supports(False), support="sampling_mask")) == {
        "rollout_log_probs",
        "rollout_sampling_mask_ids",
        "rollout_sampling_mask_offsets",
    }


def test_masked_tokens_get_the_dummies_that_frameworks_expect() -> None:
    mask = torch.tensor([1, 0, 1])
    head = to_fields(heads(), mask)
    assert head["rollout_log_probs"].tolist() == pytest.approx([-0.5, 0.0, -3.0])
    assert head["rollout_topk_token_ids"][1].tolist() == [0, 1]
    assert head["rollout_topk_log_probs"][1].tolist() == pytest.approx([HALF, HALF])
    support = to_fields(supports(), mask)
    assert support["rollout_top_p_token_offsets"].tolist() == [0, 2, 2, 4]
    back = from_fields([9, 6, 3], support, loss_mask=mask)
    assert back.candidates.offsets.tolist() == [0, 2, 2, 4]


@pytest.mark.parametrize("record", [heads(), supports(), supports(False)])
def test_a_sample_of_which_nothing_is_trained_has_the_same_fields(record: oc.SamplerRecord) -> None:
    nothing = torch.zeros(3, dtype=torch.bool)
    fields = to_fields(record, nothing)
    assert set(fields) == set(to_fields(record))
    assert from_fields(record.tokens, fields, loss_mask=nothing).logprobs.tolist() == [0, 0, 0]


def test_empty_heads_and_empty_answers_come_back() -> None:
    for count in (0, 2):
        record = oc.SamplerRecord(torch.ones(count).long(), torch.zeros(count), oc.CandidateSet.empty(count))
        back = from_fields(record.tokens, to_fields(record))
        assert len(back) == count and len(back.candidates) == count and not len(back.candidates.ids)


def test_lists_and_tensors_are_read_too() -> None:
    fields = {name: value.tolist() for name, value in to_fields(heads()).items()}
    with pytest.raises(oc.RecordError, match="float32"):
        from_fields([5, 6, 7], fields | {"rollout_topk_log_probs": torch.zeros(3, 2, dtype=torch.bfloat16)})
    assert from_fields([5, 6, 7], fields).candidates.ids.tolist() == [5, 9, 6, 8, 3, 4]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rollout_log_probs": [-0.5, -0.2]}, "rollout_log_probs"),
        ({"rollout_log_probs": [-0.5, None, -3.0]}, "rollout_log_probs"),
        ({"rollout_topk_log_probs": None}, "rollout_topk_log_probs"),
        ({"rollout_topk_log_probs": [[-0.5], [-0.2], [-0.7]]}, "rollout_topk_log_probs"),
        ({"rollout_topk_token_ids": [[5, 9], [6, 8]]}, "rollout_topk_log_probs"),
        ({"rollout_topk_token_ids": [[5, 9], [6], [3, 4]]}, "rollout_topk_token_ids"),
        ({"rollout_topk_token_ids": [[5.0, 9.0], [6.0, 8.0], [3.0, 4.0]]}, "rollout_topk_token_ids"),
        ({"rollout_topk_token_ids": [[5, 5], [6, 8], [3, 4]]}, "candidates.ids"),
        (
            {"rollout_top_p_token_ids": [5], "rollout_top_p_token_offsets": [0, 1, 1, 1]},
            "rollout_top_p_token_ids",
        ),
    ],
)
def test_damaged_fields_are_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(oc.RecordError) as caught:
        from_fields([5, 6, 7], to_fields(heads()) | change)
    assert caught.value.field == field and caught.value.remedy


@pytest.mark.parametrize("offsets", [[0, 2, 3], [1, 2, 3, 5], [0, 3, 2, 5], [0, 2, 3, 4], [0, 2, 3, 6]])
def test_damaged_offsets_are_refused(offsets: list[int]) -> None:
    fields = to_fields(supports()) | {"rollout_top_p_token_offsets": np.array(offsets, np.int32)}
    with pytest.raises(oc.RecordError, match="offsets"):
        from_fields([9, 6, 3], fields)


def test_a_support_of_one_id_leaves_no_choice() -> None:
    fields = to_fields(supports(False)) | {"rollout_log_probs": [HALF, -0.7, HALF]}
    with pytest.raises(oc.RecordError, match="only id of a complete set") as caught:
        from_fields([9, 6, 3], fields)
    assert caught.value.token == 1
    assert len(from_fields([9, 6, 3], fields, loss_mask=torch.tensor([1, 0, 1]))) == 3


def test_what_the_fields_cannot_hold() -> None:
    trimmed = heads()
    ragged = oc.SamplerRecord(trimmed.tokens, trimmed.logprobs, trimmed.candidates.trim(0.6))
    with pytest.raises(oc.RecordError, match="differ in size"):
        to_fields(ragged)
    with pytest.raises(oc.RecordError, match="heads and complete sets"):
        to_fields(oc.SamplerRecord.concat([heads(), supports()]))
