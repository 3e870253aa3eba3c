"""What a call refuses or warns of before and after the loss: options, shapes, names, logits of other tokens."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import offpolicy_corr as oc
from support import ENTRANCES, Problem, gradient_through

IDS = torch.tensor([3, 0, 3, 1, 0, 0])  # neither sorted nor contiguous; 2 does not occur

REFUSED = [
    ({"reduction": "mean"}, "reduction must be one of"),
    ({"reduction": "sequence-mean"}, "needs sequence_ids"),
    ({"reduction": "sum", "denominator": 3.0}, "does not divide"),
    ({"reduction": "none", "denominator": "kept"}, "does not divide"),
    ({"denominator": 0.0}, "positive and finite"),
    ({"denominator": float("inf")}, "positive and finite"),
    ({"denominator": torch.tensor(-1.0)}, "positive and finite"),
    ({"denominator": torch.tensor([1.0])}, "0-dimensional"),
    ({"denominator": "all"}, "'kept' or a positive number"),
    ({"denominator": "kept", "reduction": "sequence-mean", "sequence_ids": IDS}, "counts tokens"),
    ({"kl_coef": 0.1}, "kl_coef needs ref_logprobs"),
    ({"kl_estimator": "k2"}, "no effect without kl_coef"),
    ({"kl_coef": float("nan"), "ref_logprobs": torch.zeros(6)}, "kl_coef must be finite"),
    ({"entropy_coef": float("inf")}, "entropy_coef must be finite"),
    ({"denominator": True}, "got a bool"),
    ({"ref_logprobs": torch.ones(6), "kl_coef": 0.1}, "not finite, or above 0"),
    ({"loss_mask": torch.ones(6, device="meta")}, "loss_mask is on meta"),
    ({"sequence_ids": torch.ones(6).bool()}, "must be integers"),
    ({"ref_logprobs": torch.zeros(6)}, "no effect without kl_coef"),
    ({"kl_estimator": "k4"}, "kl_estimator must be one of"),
    ({"ref_logprobs": torch.zeros(5), "kl_coef": 0.1}, r"ref_logprobs must be \[T\]"),
    ({"ref_logprobs": torch.full((6,), torch.nan), "kl_coef": 0.1}, "reference's log-prob is not finite"),
    ({"sequence_ids": IDS.double()}, "must be integers"),
    ({"sequence_ids": IDS[:3]}, r"sequence_ids must be \[T\]"),
    ({"sequence_ids": IDS - 1, "reduction": "sequence-mean"}, "sequence id is negative"),
    ({"sequence_keep": torch.ones(4, dtype=torch.bool)}, "needs sequence_ids"),
    ({"sequence_keep": torch.ones(4), "sequence_ids": IDS}, "must be bool"),
    ({"sequence_keep": torch.ones(3, dtype=torch.bool), "sequence_ids": IDS}, "no entry in sequence_keep"),
    ({"loss_mask": torch.ones(5)}, r"loss_mask must be \[T\]"),
    ({"backend": "cuda"}, "backend must be one of"),
]


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("options,words", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_contradicting_options_are_refused(entrance: str, options: dict[str, Any], words: str) -> None:
    problem = Problem(seed=1)
    with pytest.raises(ValueError, match=words):
        gradient_through(entrance, problem.logits, problem.record(), problem.advantages, **options)


def test_refusals_of_single_entrances() -> None:
    problem = Problem(seed=1)
    record, advantages, logits = problem.record(), problem.advantages, problem.logits
    with pytest.raises(ValueError, match=r"floating \[T, V\]"):
        oc.policy_loss(logits[None], record, advantages)
    with pytest.raises(oc.RecordError, match="lengths disagree"):
        oc.policy_loss(logits[:5], record, advantages)
    with pytest.raises(ValueError, match="vocab_size must lie"):
        oc.policy_loss(logits, record, advantages, vocab_size=12)
    with pytest.raises(oc.RecordError, match="advantage is not finite"):
        oc.policy_loss(logits, record, advantages * torch.nan)
    with pytest.raises(ValueError, match=r"advantages must be \[T\]"):
        oc.policy_loss(logits, record, advantages[:1])
    head = torch.eye(11, dtype=torch.float64)
    for bad, words in [
        ({"inplace": True}, "inplace has no effect"),
        ({"bias": torch.zeros(3)}, r"bias must be \[V\]"),
        ({"logit_softcap": 0.0}, "logit_softcap must be positive"),
    ]:
        with pytest.raises(ValueError, match=words):
            oc.policy_loss_from_hidden(logits, head, record, advantages, **bad)
    with pytest.raises(ValueError, match="do not fit"):
        oc.policy_loss_from_hidden(logits, head[:, :4], record, advantages)
    with pytest.raises(ValueError, match="cast one, or use autocast"):
        oc.policy_loss_from_hidden(logits, head.float(), record, advantages)
    logp = torch.full((6,), -1.0)
    candidate_logp = torch.full((24,), -1.0)
    for bad, words in [
        ({"entropy_coef": 0.1}, "needs entropy="),
        ({"inplace": True}, "no effect from log-probs"),
        ({"backend": "triton"}, "no kernel to run"),
        ({"entropy": torch.zeros(5)}, r"entropy must be \[T\]"),
    ]:
        with pytest.raises(ValueError, match=words):
            oc.policy_loss_from_logprobs(logp, candidate_logp, record, advantages, **bad)
    with pytest.raises(ValueError, match="a centered loss needs candidate_logprobs"):
        oc.policy_loss_from_logprobs(logp, None, record, advantages)
    with pytest.raises(ValueError, match=r"must be floating \[nnz\]"):
        oc.policy_loss_from_logprobs(logp, candidate_logp[:3], record, advantages)
    with pytest.raises(ValueError, match=r"floating \[nnz\]"):
        oc.policy_loss_from_logprobs(logp, candidate_logp.long(), record, advantages)
    with pytest.raises(oc.RecordError, match="do not sum to 1") as caught:
        mask = torch.tensor([False, False, True, True, True, True])
        oc.policy_loss_from_logprobs(
            logp, candidate_logp, record, advantages, loss_mask=mask, sequence_ids=IDS
        )
    assert (caught.value.token, caught.value.sample) == (2, 3)
    with pytest.raises(TypeError):
        oc.policy_loss(logits, record, advantages, temperature=1.0)


def test_what_cannot_be_the_trainers_log_probs_is_refused() -> None:
    problem = Problem(seed=1)
    record = problem.record()
    logp, candidate_logp, _ = oc.selected_logprobs(
        problem.logits, problem.tokens, problem.candidates, problem.temperature
    )
    over_v, _, _ = oc.selected_logprobs(problem.logits, problem.tokens, None, problem.temperature)
    heads = ~problem.complete[problem.candidates.rows]
    for token, candidates, words in [
        (logp + 5, candidate_logp, "above 0"),
        (logp, torch.where(heads, candidate_logp + 1.0, candidate_logp), "of a head sum to more than 1"),
        (torch.where(problem.complete, over_v, logp), candidate_logp, "differs from its entry"),
        (logp, candidate_logp * torch.nan, "not finite"),
    ]:
        with pytest.raises(ValueError, match=words):
            oc.policy_loss_from_logprobs(token, candidates, record, problem.advantages)


def test_a_correction_may_be_a_name_but_not_a_rule_or_a_class() -> None:
    problem = Problem(seed=1)
    for name in ("sc+mis", "icepop", "sc+cispo", "ppo"):
        named, spelled_out = (
            oc.policy_loss(problem.logits, problem.record(), problem.advantages, correction=correction).loss
            for correction in (name, oc.Correction.from_name(name))
        )
        assert torch.equal(named, spelled_out)
    with pytest.raises(ValueError, match="unknown correction 'sc-mis'"):
        oc.policy_loss(problem.logits, problem.record(), problem.advantages, correction="sc-mis")
    for wrong in (oc.MaskedIS(), oc.Correction):
        with pytest.raises(TypeError, match="or a name such as 'sc\\+mis'"):
            oc.policy_loss(problem.logits, problem.record(), problem.advantages, correction=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rule must have weight"):
        oc.Correction(oc.MaskedIS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"advantages must be a tensor"):
        oc.policy_loss(problem.logits, problem.record(), [1.0] * 6)  # type: ignore[arg-type]


def test_logits_shifted_by_one_token_are_warned_of_without_a_further_wait() -> None:
    """The commonest mistake: 95 % of ratios leave the band, and the loss trains on almost nothing."""
    problem = Problem(size=64, vocab=50, seed=3)
    logits = 4.0 * problem.logits
    logq = logits.log_softmax(1)
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(logq.exp(), 1, generator=drawn).squeeze(1)
    record = oc.SamplerRecord(tokens, logq[torch.arange(64), tokens])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right = oc.policy_loss(logits, record, problem.advantages, correction="mis")
        assert right.diagnostics.kept.all()
        oc.policy_loss(
            logits.roll(1, 0), record, problem.advantages, correction="mis", loss_mask=torch.arange(64) < 15
        )  # too few to judge
        oc.policy_loss(logits.roll(1, 0), record, problem.advantages, correction="mis", validate=False)
    with pytest.warns(
        oc.RecordWarning, match=r"of 64 trained tokens have a ratio .* shifted by one token"
    ) as seen:
        shifted = oc.policy_loss(logits.roll(1, 0), record, problem.advantages, correction="mis")
    assert len(seen) == 1 and seen[0].filename == __file__
    assert shifted.diagnostics.kept.double().mean() < 0.2


def test_shape_errors_say_how_to_get_the_right_shape() -> None:
    problem = Problem(size=6, seed=1)
    record, advantages, logits = problem.record(), problem.advantages, problem.logits
    with pytest.raises(
        ValueError, match=r"logits must be floating \[T, V\].*logits\.flatten\(0, 1\).*flatten_batch"
    ):
        oc.policy_loss(logits.view(2, 3, -1), record, advantages)
    with pytest.raises(ValueError, match=r"logits\.flatten\(0, 1\)"):
        oc.selected_logprobs(logits.view(2, 3, -1), record.tokens)
    with pytest.raises(ValueError, match=r"hidden must be floating \[T, D\].*hidden\.flatten\(0, 1\)"):
        oc.policy_loss_from_hidden(logits.view(2, 3, -1), logits, record, advantages)
    with pytest.raises(ValueError, match=r"logprobs must be floating \[T\].*flatten\(\)"):
        oc.policy_loss_from_logprobs(torch.zeros(2, 3), None, record, advantages)
    with pytest.raises(
        ValueError, match=r"advantages must be \[T\] = \(6,\), got \(2, 3\): use \.flatten\(\)"
    ):
        oc.policy_loss(logits, record, advantages.view(2, 3))
    with pytest.raises(ValueError, match=r"advantages must be .* got \(2,\): repeat a sequence's value"):
        oc.policy_loss(logits, record, advantages[:2])
