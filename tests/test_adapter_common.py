"""What all adapters share: row layouts, ragged slices, reducers, errors counted by response token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from offpolicy_corr.integrations._common.collectives import _portable
from offpolicy_corr.integrations._common.errors import in_response, message_in_response
from offpolicy_corr.integrations._common.layout import RowLayout
from offpolicy_corr.integrations._common.ragged import heads_at, scatter_rows, supports_at
from offpolicy_corr.integrations._common.reducer import reducer_weights

import offpolicy_corr as oc

PACKED = RowLayout((5, 7), (3, 4), rank=0, size=1, local_rows=12)


def test_rows_predict_the_next_token() -> None:
    assert PACKED.row_tokens.rows.tolist() == [1, 2, 3, 7, 8, 9, 10]
    assert PACKED.row_tokens.sample.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert PACKED.row_tokens.position.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert PACKED.list_lengths == [3, 4]


@pytest.mark.parametrize("allgather", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_all_tokens_out(size: int, allgather: bool) -> None:
    rows = 8 if allgather else 12
    ranks = [replace(PACKED, rank=r, size=size, allgather=allgather, local_rows=rows) for r in range(size)]
    for part in ("row_tokens", "list_tokens"):
        found = torch.cat([getattr(layout, part).index(layout) for layout in ranks])
        assert sorted(found.tolist()) == list(range(7)), part


def test_a_response_needs_a_prompt_token() -> None:
    with pytest.raises(oc.RecordError, match="at least one prompt token") as caught:
        RowLayout((5, 3), (3, 3), 0, 1)
    assert caught.value.sample == 1


def test_chosen_rows_are_those_of_the_whole() -> None:
    ids = torch.tensor([[3, 1], [4, -1], [-1, -1], [7, 5]])
    logprobs = torch.tensor([[-0.5, -1.0], [-0.1, 9.0], [9.0, 9.0], [-0.6, -2.0]])
    index = torch.tensor([3, 1])
    found, whole = heads_at(ids, logprobs, index), oc.CandidateSet.from_topk(ids, logprobs).select(index)
    assert found.ids.tolist() == whole.ids.tolist() == [7, 5, 4]
    assert torch.equal(found.offsets, whole.offsets)
    offsets = torch.tensor([0, 2, 3, 3, 5])
    found = supports_at(torch.tensor([3, 1, 4, 7, 5]), offsets, None, index)
    assert (found.ids.tolist(), found.offsets.tolist()) == ([7, 5, 4], [0, 2, 3])
    placed = scatter_rows(found, torch.tensor([1, 3]), 5)
    assert placed.offsets.tolist() == [0, 0, 2, 2, 3, 3]
    assert placed.complete.tolist() == [False, True, False, True, False]


def test_a_linear_reducer_is_its_weights() -> None:
    weights = torch.tensor([0.5, 0.0, 0.25])
    found = reducer_weights(lambda x: (x * weights).sum(), 3, torch.float32, torch.device("cpu"))
    assert torch.equal(found, weights)


def test_errors_count_response_tokens() -> None:
    error = in_response(oc.RecordError("bad", token=8, field="logprobs"), PACKED.row_tokens)
    assert (error.sample, error.token, error.field) == (1, 1, "logprobs")
    prompt_row = oc.RecordError("bad", token=5)
    assert in_response(prompt_row, PACKED.row_tokens) is prompt_row
    message = message_in_response("the loss of sample 1, token 9 is not finite", PACKED.row_tokens)
    assert message == "the loss of sample 1, response token 2 is not finite"


def test_an_error_that_cannot_be_sent_says_the_same() -> None:
    class Local(ValueError):
        pass

    sent = _portable(Local("why"))
    assert isinstance(sent, RuntimeError)
    assert str(sent) == "Local: why"
    record = _portable(oc.RecordError("bad", sample=1, token=2, field="tokens"))
    assert isinstance(record, oc.RecordError)
