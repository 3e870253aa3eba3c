"""The facts that make the corrections what they are (design: one row's mathematics), as properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import offpolicy_corr as oc
from support import ENTRANCES, RULES, Problem, gradient_through

rules = st.sampled_from(RULES)
kinds = st.sampled_from(["head", "support", "mixed"])
seeds = st.integers(0, 2**31)
entrances = st.sampled_from(ENTRANCES)
signs = st.sampled_from([1.0, -1.0])


def expected_gradient(
    problem: Problem, weights: Tensor, entrance: str, advantage: float, correction: oc.Correction
) -> Tensor:
    """Σ_y weights(y) · gradient(y) at every position, ``[T, V]``; a model's tail ratio is that of its own q̂."""
    size, vocab = problem.logits.shape
    total = torch.zeros_like(problem.logits)
    advantages = torch.full((size,), advantage, dtype=torch.float64)
    for y in range(vocab):
        drawn = weights[:, y] > 0
        if not drawn.any():
            continue
        tokens = torch.full((size,), y)
        record = problem.record(tokens)
        logq = weights[:, y].log().masked_fill(~drawn, 0.0)
        record = oc.SamplerRecord(record.tokens, logq, record.candidates, record.temperature)
        _, gradient = gradient_through(
            entrance,
            problem.logits,
            record,
            advantages,
            correction=correction,
            loss_mask=drawn,
            reduction="sum",
            validate=False,  # a modeled tail may be likelier than the head, which no sampler records
        )
        total += weights[:, y, None] * gradient
    return total


@settings(max_examples=40)
@given(rule=rules, kind=kinds, seed=seeds, sign=signs, entrance=entrances, k=st.integers(1, 7))
def test_a_constant_reward_moves_nothing_under_the_modeled_sampler(
    rule: oc.WeightRule, kind: str, seed: int, sign: float, entrance: str, k: int
) -> None:
    problem = Problem(size=4, vocab=7, kind=kind, seed=seed, k=k)
    sampler = problem.modeled_sampler()
    assume((sampler.sum(1) - 1).abs().max() < 1e-12)  # a floor that binds takes mass out of the model's tail
    drift = expected_gradient(problem, sampler, entrance, sign, oc.Correction(rule))
    torch.testing.assert_close(drift, torch.zeros_like(drift), atol=1e-9, rtol=0)


def test_without_centering_a_constant_reward_does_move_the_policy() -> None:
    problem = Problem(size=4, vocab=7, kind="support", seed=1)
    for rule in (oc.Unweighted(), oc.MaskedIS(0.8, 1.2)):
        correction = oc.Correction(rule, center=False)
        drift = expected_gradient(problem, problem.sampler, "logits", 1.0, correction)
        assert drift.abs().max() > 1e-2, rule


@settings(max_examples=30)
@given(rule=rules, seed=seeds, sign=signs, k=st.integers(1, 6))
def test_the_certificate_bounds_the_drift_under_the_true_sampler(
    rule: oc.WeightRule, seed: int, sign: float, k: int
) -> None:
    problem = Problem(size=4, vocab=7, kind="head", seed=seed, k=k)
    drift = expected_gradient(problem, problem.sampler, "logits", sign, oc.Correction(rule))
    assert isinstance(problem.temperature, Tensor)
    drift = drift * problem.temperature[:, None]  # the certificate speaks of logits after temperature
    if isinstance(rule, oc.FullIS):
        torch.testing.assert_close(drift, torch.zeros_like(drift), atol=1e-9, rtol=0)
    certificate = problem.candidates.certificate(rule, torch.full((4,), sign))
    assert (drift.abs().sum(1) <= certificate + 1e-9).all()
    ids, _ = problem.candidates.to_padded()
    p = (problem.logits / problem.temperature[:, None]).softmax(1)
    tail = 1 - p.gather(1, ids).sum(1)
    sharper = problem.candidates.certificate(rule, torch.full((4,), sign), tail)
    assert (drift.abs().sum(1) <= sharper + 1e-9).all()
    assert (sharper <= certificate + 1e-12).all()


@settings(max_examples=40)
@given(rule=rules, kind=kinds, seed=seeds, center=st.booleans(), entrance=entrances)
def test_gradients_sum_to_zero_over_the_vocabulary(
    rule: oc.WeightRule, kind: str, seed: int, center: bool, entrance: str
) -> None:
    problem = Problem(kind=kind, seed=seed)
    _, gradient = gradient_through(
        entrance,
        problem.logits,
        problem.record(),
        problem.advantages,
        correction=oc.Correction(rule, center=center),
        entropy_coef=0.3,
        kl_coef=0.2,
        ref_logprobs=torch.full((6,), -1.0),
    )
    torch.testing.assert_close(gradient.sum(1), torch.zeros(6, dtype=torch.float64), atol=1e-10, rtol=0)


@settings(max_examples=30)
@given(rule=rules, kind=kinds, seed=seeds, center=st.booleans())
def test_all_entrances_agree(rule: oc.WeightRule, kind: str, seed: int, center: bool) -> None:
    problem = Problem(kind=kind, seed=seed)
    options = {
        "correction": oc.Correction(rule, center=center),
        "entropy_coef": 0.1,
        "kl_coef": 0.2,
        "kl_estimator": ["k1", "k2", "k3"][seed % 3],
        "ref_logprobs": torch.linspace(-2.0, -0.1, 6),
        "sequence_ids": torch.tensor([4, 0, 4, 0, 0, 2]),
        "reduction": ["token-mean", "sequence-mean", "sum", "none"][seed % 4],
    }
    first, gradient = gradient_through(
        "logits", problem.logits, problem.record(), problem.advantages, **options
    )
    for entrance in ENTRANCES[1:]:
        other, theirs = gradient_through(
            entrance, problem.logits, problem.record(), problem.advantages, **options
        )
        torch.testing.assert_close(theirs, gradient, atol=1e-10, rtol=1e-8)
        torch.testing.assert_close(other.loss, first.loss, atol=1e-10, rtol=1e-8)
        for name in ("logprobs", "log_ratio", "weight", "kept", "entropy", "centering_term", "tail_ratio"):
            torch.testing.assert_close(
                getattr(other.diagnostics, name),
                getattr(first.diagnostics, name),
                equal_nan=True,
                atol=1e-10,
                rtol=1e-8,
            )


def in_band_problem(rule: oc.WeightRule) -> tuple[Problem, oc.SamplerRecord]:
    """Exact supports whose every ratio lies inside [0.5, 2]."""
    problem = Problem(kind="support", seed=3, noise=0.05)
    return problem, problem.record()


@pytest.mark.parametrize("rule", [oc.MaskedIS(0.5, 2.0), oc.TruncatedIS(2.0), oc.FullIS()])
def test_centering_changes_nothing_where_no_ratio_is_masked_or_truncated(rule: oc.WeightRule) -> None:
    problem, record = in_band_problem(rule)
    for entrance in ENTRANCES:
        gradients = [
            gradient_through(entrance, problem.logits, record, problem.advantages, correction=correction)[1]
            for correction in (oc.Correction(rule), oc.Correction(rule, center=False))
        ]
        torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-9)


@settings(max_examples=20)
@given(seed=seeds)
def test_plain_centering_on_an_exact_support_pulls_towards_q_without_the_trainer(seed: int) -> None:
    problem = Problem(kind="support", seed=seed, temperature=1.0)
    _, gradient = gradient_through(
        "logits", problem.logits, problem.record(), problem.advantages,
        correction=oc.Correction.from_name("sc"), reduction="sum",
    )  # fmt: skip
    one_hot = torch.nn.functional.one_hot(problem.tokens, 11)
    torch.testing.assert_close(gradient, problem.advantages[:, None] * (problem.sampler - one_hot))


def test_a_masked_out_token_still_contributes_its_centering_and_stays_in_the_denominator() -> None:
    logits = torch.tensor([[0.5, 1 / 3, 1 / 6]]).double().log().repeat(2, 1)
    q = torch.tensor([1 / 6, 1 / 3, 0.5]).double()
    candidates = oc.CandidateSet.from_topk(torch.arange(3).repeat(2, 1), q.log().repeat(2, 1))
    tokens = torch.tensor([2, 1])  # ratios 1/3 (outside [0.5, 5]) and 1
    record = oc.SamplerRecord(tokens, q.log()[tokens], candidates)
    out, gradient = gradient_through("logits", logits, record, torch.ones(2))
    assert out.diagnostics.kept.tolist() == [False, True]
    expected = torch.tensor([[1 / 12, 1 / 18, -5 / 36], [7 / 12, -11 / 18, 1 / 36]]).double() / 2
    torch.testing.assert_close(gradient, expected)


def test_the_scalar_loss_moves_with_the_tail_scale_and_the_gradient_does_not() -> None:
    # a head that covers the vocabulary but records 0.999 of its mass: the floor of the trainer's tail decides ρ
    problem = Problem(kind="head", seed=5, k=11, temperature=1.0)
    short = oc.CandidateSet.from_topk(
        problem.candidates.ids.view(6, 11), problem.candidates.logprobs.view(6, 11) - 1e-3
    )
    full = problem.record()
    record = oc.SamplerRecord(full.tokens, full.logprobs - 1e-3, short)
    results = [
        gradient_through(
            "logits",
            problem.logits,
            record,
            torch.ones(6),
            correction=oc.Correction(oc.Unweighted(), tail_floor=floor),
        )
        for floor in (1e-6, 1e-3)
    ]
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-9, rtol=1e-7)
    assert abs((results[0][0].loss - results[1][0].loss).item()) > 100


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("kind", ["head", "support"])
def test_gradcheck(rule: oc.WeightRule, kind: str) -> None:
    """Finite differences of the loss whose constants are frozen at the point: what sg[·] means."""
    problem = Problem(size=3, vocab=6, kind=kind, seed=11, k=3, temperature=0.7)
    record = problem.record()
    frozen = oc.policy_loss(problem.logits, record, problem.advantages[:3], correction=oc.Correction(rule))
    weight = frozen.diagnostics.weight

    def loss(logits: Tensor) -> Tensor:
        logp, candidate_logp, entropy = oc.selected_logprobs(logits, record.tokens, record.candidates, 0.7)
        q = problem.candidates.logprobs.exp()
        rows = problem.candidates.rows
        base = oc.selected_logprobs(problem.logits, record.tokens, record.candidates, 0.7)[1]
        advantages = problem.advantages[:3]
        weighted = rule.weighted_prob(base, problem.candidates.logprobs, advantages[rows])
        tail_ratio = frozen.diagnostics.tail_ratio
        alpha = rule.tail_scale(tail_ratio, advantages).masked_fill(problem.complete, 0.0)
        coefficient = weighted - alpha[rows] * base.exp()
        assert q.shape == coefficient.shape
        centering = torch.zeros_like(logp).index_add(0, rows, coefficient * candidate_logp)
        return (-advantages * (weight * logp - centering) - 0.1 * entropy).mean()

    leaf = problem.logits.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, leaf, atol=1e-7)
    out = oc.policy_loss(
        leaf, record, problem.advantages[:3], correction=oc.Correction(rule), entropy_coef=0.1
    )
    (ours,) = torch.autograd.grad(out.loss, leaf)
    (theirs,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(ours, theirs)


def test_gradcheck_of_policy_loss_where_its_constants_do_not_depend_on_the_logits() -> None:
    # f ≡ 1 on exact supports: w = 1 and c = q, so finite differences see the same function
    problem = Problem(size=3, vocab=6, kind="support", seed=2, k=3)
    leaf = problem.logits.clone().requires_grad_()
    for reduction in ("sum", "none"):
        options = {"correction": oc.Correction.from_name("sc"), "entropy_coef": 0.2, "reduction": reduction}
        options |= {"kl_coef": 0.3, "ref_logprobs": torch.tensor([-1.0, -0.5, -2.0])}
        call = lambda z, o=options: oc.policy_loss(z, problem.record(), problem.advantages[:3], **o).loss
        assert torch.autograd.gradcheck(call, leaf, atol=1e-7)
        hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        head = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
        bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
        from_hidden = lambda h, w, b, o=options: (
            oc.policy_loss_from_hidden(
                h, w, problem.record(), problem.advantages[:3], bias=b, logit_softcap=3.0, **o
            ).loss
        )
        assert torch.autograd.gradcheck(from_hidden, (hidden, head, bias), atol=1e-7)
