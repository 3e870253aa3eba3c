"""Rows on which a careless formula loses its digits, or its finiteness."""

from __future__ import annotations

import pytest
import torch

import offpolicy_corr as oc
from support import ENTRANCES, RULES, Problem, gradient_through


def tiny_trainer_tail(dtype: torch.dtype) -> tuple[torch.Tensor, oc.SamplerRecord]:
    """p's tail is 1e-6, q's is 0.05: ρ = 5e4, coefficients of −3.5e4, a true gradient below 1."""
    p = torch.tensor([0.7, 0.3 - 1e-6, 0.4e-6, 0.6e-6], dtype=torch.float64)
    q = torch.tensor([0.6, 0.35, 0.03, 0.02], dtype=torch.float64)
    candidates = oc.CandidateSet.from_topk(torch.tensor([[0, 1]]), q[:2].log()[None])
    record = oc.SamplerRecord(torch.tensor([0]), q[:1].log(), candidates)
    return p.log()[None].to(dtype), record


@pytest.mark.parametrize("entrance", ["logits", "inplace", "hidden"])
@pytest.mark.parametrize("rule", [oc.Unweighted(), oc.ClampedIS(0.5, 5.0), oc.MaskedIS(), oc.TruncatedIS()])
def test_fp32_keeps_five_digits_at_a_tail_scale_of_5e4(entrance: str, rule: oc.WeightRule) -> None:
    correction = oc.Correction(rule, tail_floor=1e-9)
    rounded, record = tiny_trainer_tail(torch.float32)
    exact_out, exact = gradient_through(
        entrance, rounded.double(), record, torch.ones(1), correction=correction
    )
    _, ours = gradient_through(entrance, rounded, record, torch.ones(1), correction=correction)
    assert 4.9e4 < float(exact_out.diagnostics.tail_ratio) < 5.1e4
    assert exact.abs().max() < 1
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=0)


def test_from_logprobs_the_same_row_is_exact_in_fp64() -> None:
    logits, record = tiny_trainer_tail(torch.float64)
    correction = oc.Correction(oc.Unweighted(), tail_floor=1e-9)
    _, exact = gradient_through("logits", logits, record, torch.ones(1), correction=correction)
    _, ours = gradient_through("logprobs", logits, record, torch.ones(1), correction=correction)
    torch.testing.assert_close(ours, exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_support_whose_mass_underflows_is_renormalized_over_its_own_logits(entrance: str) -> None:
    logits = torch.tensor([[0.0, -200.0, -201.0]])
    logq = torch.tensor([0.6, 0.4]).log()
    candidates = oc.CandidateSet.from_support(torch.tensor([1, 2]), torch.tensor([0, 2]), logq)
    record = oc.SamplerRecord(torch.tensor([1]), logq[:1], candidates)
    out, gradient = gradient_through(
        entrance, logits, record, torch.ones(1), correction=oc.Correction.from_name("is")
    )
    assert out.diagnostics.logprobs.item() == pytest.approx(-0.3132617)
    ratio = 0.7310586 / 0.6
    torch.testing.assert_close(gradient[0], ratio * torch.tensor([0.0, -0.2689414, 0.2689414]))


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_singleton_support_teaches_nothing_and_is_counted(entrance: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.1, -1.0]])
    ids, offsets = torch.tensor([1, 0, 1, 2]), torch.tensor([0, 1, 4])
    logq = torch.tensor([0.0, *torch.tensor([0.5, 0.3, 0.2]).log().tolist()])
    record = oc.SamplerRecord(
        torch.tensor([1, 0]), torch.tensor([0.0, logq[1]]), oc.CandidateSet.from_support(ids, offsets, logq)
    )
    out, gradient = gradient_through(entrance, logits, record, torch.ones(2))
    assert (gradient[0] == 0).all() and out.diagnostics.log_ratio[0] == 0 and out.diagnostics.kept[0]
    _, alone = gradient_through(entrance, logits[1:], record.select(torch.tensor([1])), torch.ones(1))
    torch.testing.assert_close(gradient[1:], alone / 2)


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("rule", [oc.TruncatedIS(), oc.MaskedIS(), oc.ClampedIS(0.0, 5.0)])
def test_an_impossible_candidate_with_coefficient_zero_is_silent(entrance: str, rule: oc.WeightRule) -> None:
    p, q = torch.tensor([0.6, 0.4, 0.0]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
    record = oc.SamplerRecord(
        torch.tensor([0]), q[:1], oc.CandidateSet.from_topk(torch.arange(3)[None], q[None])
    )
    out, gradient = gradient_through(
        entrance, p[None], record, torch.ones(1), correction=oc.Correction(rule), entropy_coef=0.1
    )
    assert out.loss.isfinite() and gradient.isfinite().all()
    assert gradient[0, 2] == 0


def test_a_reference_example_with_a_padded_column_at_minus_infinity() -> None:
    p, q = torch.tensor([[0.6, 0.4, 0.0]]).log(), torch.tensor([0.5, 0.5, 0.0]).log()
    record = oc.SamplerRecord(
        torch.tensor([0]), q[:1], oc.CandidateSet.from_topk(torch.arange(3)[None], q[None])
    )
    out, gradient = gradient_through(
        "logits", p, record, torch.ones(1), correction=oc.Correction.from_name("sc")
    )
    assert out.loss.item() == pytest.approx(0.47028, abs=1e-5)
    torch.testing.assert_close(gradient[0], torch.tensor([-0.5, 0.5, 0.0]))


@pytest.mark.parametrize("entrance", ["logits", "inplace"])
@pytest.mark.parametrize(
    "row,words",
    [
        ([torch.nan, 0.0, 0.0], "hold NaN"),
        ([torch.inf, 0.0, 0.0], "hold NaN or \\+inf"),
        ([-torch.inf] * 3, "none of them is finite"),
        ([-torch.inf, 0.0, 0.0], "sampled token's logit is −inf"),
        ([0.0, -torch.inf, 0.0], "candidate's logit is −inf"),
    ],
)
def test_unusable_logits_are_named(entrance: str, row: list[float], words: str) -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3], row])
    q = torch.tensor([0.5, 0.3, 0.2]).log()
    record = oc.SamplerRecord(
        torch.tensor([0, 0]),
        q[:1].repeat(2),
        oc.CandidateSet.from_topk(torch.arange(3).repeat(2, 1), q.repeat(2, 1)),
    )
    options = {"correction": oc.Correction.from_name("sc"), "sequence_ids": torch.tensor([3, 9])}
    with pytest.raises(ValueError, match=f"sample 9, token 1.*{words}"):
        gradient_through(entrance, logits, record, torch.ones(2), **options)
    clean, expected = gradient_through(
        entrance,
        logits[:1],
        record.select(torch.tensor([0])),
        torch.ones(1),
        reduction="none",
        **{"correction": options["correction"]},
    )
    out, gradient = gradient_through(
        entrance, logits, record, torch.ones(2), reduction="none", validate=False, **options
    )
    assert not out.loss[1].isfinite()
    assert torch.equal(out.loss[:1], clean.loss) and torch.equal(gradient[:1], expected)


def test_an_unusable_hidden_state_is_named() -> None:
    q = torch.tensor([0.5, 0.3, 0.2]).log()
    for complete in (False, True):
        candidates = oc.CandidateSet(
            torch.arange(3).repeat(2), q.repeat(2), torch.tensor([0, 3, 6]), torch.full((2,), complete)
        )
        record = oc.SamplerRecord(torch.tensor([0, 0]), q[:1].repeat(2), candidates)
        hidden = torch.tensor([[0.1, 0.2, 0.3], [0.1, torch.nan, 0.3]])
        with pytest.raises(ValueError, match=r"token 1 is not finite: its logits hold NaN"):
            oc.policy_loss_from_hidden(hidden, torch.eye(3), record, torch.ones(2))


def test_validation_off_gives_no_finite_loss_to_a_centered_token_without_a_head() -> None:
    candidates = oc.CandidateSet.from_topk(torch.tensor([[0], [-1]]), torch.tensor([[-0.7], [0.0]]))
    record = oc.SamplerRecord(torch.tensor([0, 1]), torch.tensor([-0.7, -1.0]), candidates)
    for name in ("sc", "sc+mis", "sc+tis", "sc+clamp"):
        for entrance in ENTRANCES:
            out, _ = gradient_through(
                entrance, torch.zeros(2, 3), record, torch.ones(2),
                correction=oc.Correction.from_name(name), reduction="none", validate=False,
            )  # fmt: skip
            assert out.loss.isnan().tolist() == [False, True], (name, entrance)


@pytest.mark.parametrize("weight", ["mis", "sc+mis"])
def test_a_nan_row_is_never_swallowed_by_a_weight_of_zero(weight: str) -> None:
    q = torch.tensor([0.5, 0.3, 0.2]).log()
    record = oc.SamplerRecord(
        torch.tensor([0]), q[:1], oc.CandidateSet.from_topk(torch.arange(3)[None], q[None])
    )
    out = oc.policy_loss(
        torch.tensor([[0.0, torch.nan, 0.0]]), record, torch.ones(1), correction=oc.Correction.from_name(weight),
        validate=False,
    )  # fmt: skip
    assert out.loss.isnan()


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "sum", "none"])
def test_no_tokens_and_no_trained_tokens_give_zero_with_a_graph(entrance: str, reduction: str) -> None:
    problem = Problem(seed=1)
    options = {"reduction": reduction, "sequence_ids": torch.zeros(6, dtype=torch.int64)}
    nothing = torch.zeros(6, dtype=torch.bool)
    out, gradient = gradient_through(
        entrance, problem.logits, problem.record(), problem.advantages, loss_mask=nothing, **options
    )
    assert out.loss.requires_grad and (out.loss == 0).all() and (gradient == 0).all()
    none = torch.arange(0)
    out, gradient = gradient_through(
        entrance, problem.logits[:0], problem.record().select(none), problem.advantages[:0],
        **options | {"sequence_ids": none},
    )  # fmt: skip
    assert out.loss.requires_grad and gradient.shape == (0, 11)
    assert out.loss.numel() == (0 if reduction == "none" else 1)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_head_that_covers_the_vocabulary_and_sums_above_one_by_rounding(rule: oc.WeightRule) -> None:
    problem = Problem(kind="head", seed=5, k=11, temperature=1.0, dtype=torch.float32)
    logq = problem.candidates.logprobs.float() + 1e-6
    candidates = oc.CandidateSet(problem.candidates.ids, logq, problem.candidates.offsets, problem.complete)
    assert (candidates.mass() > 1).all()
    record = oc.SamplerRecord(problem.tokens, problem.record().logprobs.float(), candidates)
    out, gradient = gradient_through(
        "logits", problem.logits, record, problem.advantages, correction=oc.Correction(rule)
    )
    assert gradient.isfinite().all() and (out.diagnostics.tail_ratio > 0).all()


def test_other_overflows_are_not_blamed_on_the_vocabulary() -> None:
    record = oc.SamplerRecord(torch.tensor([0]), torch.tensor([-0.7]))
    with pytest.raises(ValueError, match="leaves the range of its dtype"):
        oc.policy_loss(
            torch.zeros(1, 2), record, torch.ones(1) * 3e38, correction=oc.Correction(oc.FullIS(), center=False),
            kl_coef=3e38, ref_logprobs=torch.tensor([-90.0]),
        )  # fmt: skip


def test_no_advantage_no_overflow() -> None:
    record = oc.SamplerRecord(torch.tensor([0]), torch.tensor([-200.0]))
    with pytest.raises(ValueError, match="importance weight is inf"):
        oc.policy_loss(torch.zeros(1, 2), record, torch.ones(1), correction=oc.Correction.from_name("is"))
    out = oc.policy_loss(torch.zeros(1, 2), record, torch.zeros(1), correction=oc.Correction.from_name("is"))
    assert out.loss == 0


def test_a_ratio_beyond_the_range_of_exp_is_masked_without_overflow() -> None:
    logits = torch.tensor([[0.0, -300.0]])
    record = oc.SamplerRecord(torch.tensor([0]), torch.tensor([-250.0]))
    out = oc.policy_loss(logits, record, torch.ones(1), correction=oc.Correction.from_name("mis"))
    assert out.loss == 0 and out.diagnostics.log_ratio.item() == pytest.approx(250.0)
    with pytest.raises(ValueError, match="importance weight is inf"):
        oc.policy_loss(logits, record, torch.ones(1), correction=oc.Correction.from_name("is"))
