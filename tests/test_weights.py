"""Weight rules: values at and around their bounds, and the three forms of one function held together."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import offpolicy_corr as oc
from support import RULES, Problem, gradient_through

RATIOS = [0.2, 0.49999, 0.5, 1.0, 2.0, 5.0, 5.00001]


@pytest.mark.parametrize(
    "rule,expected",
    [
        (oc.Unweighted(), [1.0] * 7),
        (oc.FullIS(), RATIOS),
        (oc.TruncatedIS(2.0), [0.2, 0.49999, 0.5, 1.0, 2.0, 2.0, 2.0]),
        (oc.MaskedIS(0.5, 5.0), [0.0, 0.0, 0.5, 1.0, 2.0, 5.0, 0.0]),
        (oc.MaskedIS(0.2, 5.0), [0.2, 0.49999, 0.5, 1.0, 2.0, 5.0, 0.0]),
        (oc.ClampedIS(0.8, 1.2), [0.8, 0.8, 0.8, 1.0, 1.2, 1.2, 1.2]),
        (oc.MaskedIS(0.0, math.inf), RATIOS),
        (oc.TruncatedIS(math.inf), RATIOS),
    ],
    ids=repr,
)
def test_values(rule: oc.WeightRule, expected: list[float]) -> None:
    log_ratio = torch.tensor([math.log(r) for r in RATIOS], dtype=torch.float64)
    weight = rule.weight(log_ratio, torch.ones(7))
    torch.testing.assert_close(weight, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_band_includes_its_rounded_bounds(dtype: torch.dtype) -> None:
    bounds = torch.tensor([math.log(0.5), math.log(5.0)], dtype=dtype)
    beyond = torch.stack(
        [
            bounds[0].nextafter(torch.tensor(-9.0, dtype=dtype)),
            bounds[1].nextafter(torch.tensor(9.0, dtype=dtype)),
        ]
    )
    rule = oc.MaskedIS(0.5, 5.0)
    assert (rule.weight(bounds, torch.ones(2)) > 0).all()
    assert (rule.weight(beyond, torch.ones(2)) == 0).all()


def test_ppo_looks_at_the_sign_of_the_advantage() -> None:
    log_ratio = torch.tensor([3.0, 1.0, 1 / 3]).log()
    rule = oc.PPOClip(0.2, 0.2)
    assert (rule.weight(log_ratio, torch.ones(3)) > 0).tolist() == [False, True, True]
    assert (rule.weight(log_ratio, -torch.ones(3)) > 0).tolist() == [True, True, False]
    assert (rule.weight(log_ratio, torch.zeros(3)) > 0).tolist() == [False, True, True]


logs = st.floats(-30.0, 0.0)
signs = st.sampled_from([1.0, -1.0])


@given(rule=st.sampled_from(RULES), logp=logs, logq=logs, sign=signs)
def test_weighted_prob_is_q_times_f(rule: oc.WeightRule, logp: float, logq: float, sign: float) -> None:
    p, q, a = (torch.tensor([x], dtype=torch.float64) for x in (logp, logq, sign))
    torch.testing.assert_close(
        rule.weighted_prob(p, q, a), q.exp() * rule.weight(p - q, a), rtol=1e-12, atol=0
    )


@given(rule=st.sampled_from(RULES), log_rho=st.floats(-10.0, 10.0), sign=signs)
def test_tail_scale_is_rho_times_f_of_its_inverse(rule: oc.WeightRule, log_rho: float, sign: float) -> None:
    rho, a = torch.tensor([log_rho], dtype=torch.float64).exp(), torch.tensor([sign], dtype=torch.float64)
    torch.testing.assert_close(rule.tail_scale(rho, a), rho * rule.weight(-rho.log(), a), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "rule",
    [*RULES, oc.ClampedIS(0.0, math.inf), oc.MaskedIS(0.0, math.inf), oc.TruncatedIS(math.inf)],
    ids=repr,
)
@pytest.mark.parametrize(
    "logp,logq", [(-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf), (0.0, -1e4), (-1e4, 0.0)]
)
def test_weighted_prob_is_finite_whatever_is_impossible(
    rule: oc.WeightRule, logp: float, logq: float
) -> None:
    value = rule.weighted_prob(torch.tensor([logp]), torch.tensor([logq]), torch.ones(1))
    assert value.isfinite().all() and 0 <= value.item() <= 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: oc.TruncatedIS(0.0),
        lambda: oc.TruncatedIS(-1.0),
        lambda: oc.TruncatedIS(math.nan),
        lambda: oc.MaskedIS(2.0, 1.0),
        lambda: oc.MaskedIS(-0.1, 1.0),
        lambda: oc.MaskedIS(math.nan, 1.0),
        lambda: oc.MaskedIS(math.inf, math.inf),
        lambda: oc.ClampedIS(2.0, 1.0),
        lambda: oc.PPOClip(1.1, 0.2),
        lambda: oc.PPOClip(0.2, -0.1),
        lambda: oc.Correction(tail_floor=0.0),
        lambda: oc.Correction(tail_floor=1.0),
    ],
)
def test_bounds_out_of_order_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="must"):
        make()


def test_names() -> None:
    assert oc.Correction.from_name("sc+mis") == oc.Correction()
    assert (
        oc.Correction.from_name("sc") == oc.Correction.from_name("sc+none") == oc.Correction(oc.Unweighted())
    )
    assert oc.Correction.from_name("mis", low=0.2) == oc.Correction(oc.MaskedIS(0.2, 5.0), center=False)
    assert oc.Correction.from_name("sc+tis", cap=3.0).rule == oc.TruncatedIS(3.0)
    assert oc.Correction.from_name("ppo", high=0.3).rule == oc.PPOClip(0.2, 0.3)
    assert oc.Correction.from_name("clamp", low=0.8, high=1.2).rule == oc.ClampedIS(0.8, 1.2)
    assert oc.Correction.from_name("sc+mis", tail_floor=1e-4).tail_floor == 1e-4
    assert oc.Correction.from_name("sc+icepop") == oc.Correction.from_name("sc+mis")
    assert oc.Correction.from_name("cispo", cap=1.2) == oc.Correction(oc.TruncatedIS(1.2), center=False)


@pytest.mark.parametrize(
    "name,overrides,words",
    [
        ("icepops", {}, "unknown correction 'icepops'"),
        ("sc+", {}, "unknown correction"),
        ("mis+sc", {}, "unknown correction"),
        ("none", {"cap": 2.0}, "has no setting cap"),
        ("tis", {"low": 0.5}, "TruncatedIS has cap"),
    ],
)
def test_names_refuse_what_they_do_not_know(name: str, overrides: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        oc.Correction.from_name(name, **overrides)


class SquareRoot:
    """f(r) = √r, a rule of a user's own."""

    def weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        return (0.5 * log_ratio).exp()

    def weighted_prob(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        return (0.5 * (logp + logq)).exp()

    def tail_scale(self, rho: Tensor, advantages: Tensor) -> Tensor:
        return rho.sqrt()


def test_a_rule_of_ones_own_runs_in_pytorch_and_is_refused_by_triton() -> None:
    problem = Problem(seed=3)
    correction = oc.Correction(SquareRoot())
    out, gradient = gradient_through(
        "logits", problem.logits, problem.record(), problem.advantages, correction=correction
    )
    torch.testing.assert_close(out.diagnostics.weight, (0.5 * out.diagnostics.log_ratio).exp())
    torch.testing.assert_close(gradient.sum(1), torch.zeros(6, dtype=torch.float64), atol=1e-12, rtol=0)
    with pytest.raises(RuntimeError, match="SquareRoot is not one of the fused"):
        oc.policy_loss(
            problem.logits, problem.record(), problem.advantages, correction=correction, backend="triton"
        )
    with pytest.raises(TypeError, match="SquareRoot has no drift_bound"):
        problem.candidates.certificate(SquareRoot())
    with pytest.raises(TypeError, match="rule must have weight"):
        oc.Correction("mis")  # type: ignore[arg-type]


def test_every_named_rule_goes_through_every_property_and_has_a_kernel_branch() -> None:
    from offpolicy_corr.kernels.weights import FusedRule

    from offpolicy_corr.correction import RULES as NAMED

    assert {type(rule) for rule in RULES} == set(NAMED.values())
    assert len({FusedRule.of(rule()).kind for rule in NAMED.values()}) == len(set(NAMED.values()))
