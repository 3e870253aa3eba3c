"""Records that do not fit their tokens are refused, by the key, the sample and the response token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from offpolicy_corr.integrations.miles import policy_loss
from offpolicy_corr.integrations.miles.candidates import read_candidates
from offpolicy_corr.integrations.miles.layout import row_layout

import miles_double as double
import offpolicy_corr as oc

MASKED_SUPPORT = {"rollout_top_p": 0.9, "rollout_top_k": 4}


def test_top_k_padding_is_no_candidate() -> None:  # miles PR 3317 clamps the id −1 to 0
    args = double.plain("sc+mis")
    row = [0.3, 0.2, 0.9, -0.5]
    logq = torch.tensor(row).log_softmax(0)
    order = logq.argsort(descending=True)
    full = {
        "rollout_topk_token_ids": [order[None, :2].int()],
        "rollout_topk_log_probs": [logq[order][None, :2]],
    }
    wide = {
        "rollout_topk_token_ids": [torch.cat([order[:2], torch.tensor([-1, -1])])[None].int()],
        "rollout_topk_log_probs": [torch.cat([logq[order][:2], torch.full((2,), -math.inf)])[None]],
    }
    token = int(order[0])
    first = double.one_sample([row], [token], [float(logq[token])], args, **full)
    second = double.one_sample([row], [token], [float(logq[token])], args, **wide)
    assert float(first[0]) == float(second[0])
    assert torch.equal(first[2], second[2])


def test_a_support_larger_than_its_log_probs_is_an_error() -> None:
    problem = double.make_problem(seed=3)
    args, state = double.plain("sc+mis", **MASKED_SUPPORT), double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state, "lengths")
    sample = next(i for i, offsets in enumerate(problem.support_offsets) if (np.diff(offsets) > 1).any())
    trained = (np.diff(problem.support_offsets[sample]) > 1) & problem.masks[sample].bool().numpy()
    token = int(trained.argmax())
    batch["rollout_topk_lengths"][sample][token] -= 1
    logits = double.local_logits(problem, problem.logits, args, state)
    with pytest.raises(oc.RecordError, match="for a support of") as caught:
        policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    assert (caught.value.sample, caught.value.token) == (sample, token)


def test_top_k_rows_of_other_ids_do_not_cover_a_support() -> None:
    problem = double.make_problem(seed=3)
    args, state = double.plain("sc+mis", **MASKED_SUPPORT), double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state, "dense")
    row = batch["rollout_topk_token_ids"][0][0]
    row[row >= 0] = (row[row >= 0] + 1) % problem.vocab
    logits = double.local_logits(problem, problem.logits, args, state)
    with pytest.raises(oc.RecordError, match="do not cover") as caught:
        policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    assert (caught.value.sample, caught.value.token) == (0, 0)


def test_an_added_token_beyond_the_tokenizer_s_vocabulary_is_explained() -> None:
    with pytest.raises(oc.RecordError, match=r"offpolicy_corr\.vocab_size"):
        double.one_sample([[1.0, 2.0, 0.0]], [2], [-0.3], double.plain("is", vocab_size=2))


def test_errors_count_tokens_within_the_response() -> None:
    problem = double.make_problem()
    args, state = double.plain("mis"), double.single(1, 2)
    double.install(state)
    batch = double.make_batch(problem, args, state, "none")
    listed = double.zigzag(problem, [torch.arange(r) for r in problem.responses], args, state)
    masks = double.zigzag(problem, problem.masks, args, state)
    sample = next(i for i, mask in enumerate(masks) if bool(mask.any()))
    at = int(masks[sample].nonzero()[-1])
    batch["rollout_log_probs"][sample][at] = 0.5
    logits = double.local_logits(problem, problem.logits, args, state)
    with pytest.raises(oc.RecordError) as caught:
        policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    assert (caught.value.sample, caught.value.token) == (sample, int(listed[sample][at]))


def test_broken_logits_are_named_by_their_response_token() -> None:
    problem = double.make_problem()
    args, state = double.plain("mis"), double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state, "none")
    logits = double.local_logits(problem, problem.logits, args, state).clone()
    position = int(problem.masks[1].nonzero()[-1])
    logits[0, problem.totals[0] + problem.prompts[1] - 1 + position] = math.nan
    with pytest.raises(ValueError, match=f"sample 1, response token {position} is not finite"):
        policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))


def test_candidates_of_masked_tokens_stay_behind() -> None:
    problem = double.make_problem(seed=2)
    args, state = double.plain("sc+mis", **MASKED_SUPPORT), double.single()
    batch = double.make_batch(problem, args, state, "supports")
    layout = row_layout(args, batch, double.local_logits(problem, problem.logits, args, state), 0, 1)
    mask = torch.cat(problem.masks).bool()
    found = read_candidates(batch, layout, layout.row_tokens, mask, "supports", True)
    assert found is not None
    counts = torch.cat([torch.from_numpy(offsets).diff() for offsets in problem.support_offsets])
    assert torch.equal(found.offsets.diff(), torch.where(mask, counts, 0))
    assert int(counts[~mask].sum()) > 0


@pytest.mark.parametrize("kind", ["heads", "supports"])
def test_a_rank_reads_the_rows_of_its_own_tokens_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are chosen before they become CSR: over all ranks together each trained row is converted once."""
    problem = double.make_problem(seed=2)
    more = MASKED_SUPPORT if kind == "supports" else {}
    args = double.plain("sc+mis", **more)
    converted = []
    from_rows = getattr(oc.CandidateSet, "from_topk" if kind == "heads" else "from_support")

    def counted(*given: Any) -> oc.CandidateSet:
        converted.append(len(found := from_rows(*given)))
        return found

    monkeypatch.setattr(oc.CandidateSet, "from_topk" if kind == "heads" else "from_support", counted)
    mask = torch.cat(problem.masks).bool()
    for rank in (0, 1):
        state = double.single(rank, 2)
        batch = double.make_batch(problem, args, state, kind)
        logits = double.local_logits(problem, problem.logits, args, state)
        layout = row_layout(args, batch, logits, rank, 2)
        found = read_candidates(batch, layout, layout.row_tokens, mask, kind, True)
        assert found is not None and len(found) == len(layout.row_tokens)
    assert sum(converted) == int(mask.sum())
