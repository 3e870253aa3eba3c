"""Options of the losses: reductions, denominators, dropped sequences, regularizers, in-place, repeated backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import offpolicy_corr as oc
from support import ENTRANCES, RULES, Problem, gradient_through

IDS = torch.tensor([3, 0, 3, 1, 0, 0])  # neither sorted nor contiguous; 2 does not occur
MASK = torch.tensor([True, True, True, False, True, False])


def token_losses(problem: Problem, **options: Any) -> Tensor:
    options = {"reduction": "none", "sequence_ids": IDS} | options
    return oc.policy_loss(problem.logits, problem.record(), problem.advantages, **options).loss


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_reductions_by_hand(entrance: str) -> None:
    problem = Problem(seed=3)
    each = token_losses(problem)
    options = {"loss_mask": MASK, "sequence_ids": IDS}
    expected = {
        "sum": each[MASK].sum(),
        "token-mean": each[MASK].mean(),
        "sequence-mean": (each[[0, 2]].mean() + each[[1, 4]].mean()) / 2,
        "none": torch.where(MASK, each, 0.0),
    }
    for reduction, value in expected.items():
        out, _ = gradient_through(
            entrance, problem.logits, problem.record(), problem.advantages, reduction=reduction, **options
        )
        torch.testing.assert_close(out.loss.detach(), value)
    for denominator in (8, 8.0, torch.tensor(8.0)):
        for reduction, total in (
            ("token-mean", expected["sum"]),
            ("sequence-mean", 2 * expected["sequence-mean"]),
        ):
            out, _ = gradient_through(
                entrance, problem.logits, problem.record(), problem.advantages,
                reduction=reduction, denominator=denominator, **options,
            )  # fmt: skip
            torch.testing.assert_close(out.loss.detach(), total / 8)


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_rejected_tokens_stay_in_the_denominator_unless_kept_is_asked_for(entrance: str) -> None:
    problem = Problem(seed=3, kind="head")
    correction = oc.Correction(oc.MaskedIS(0.7, 1.4))
    call = lambda **o: gradient_through(
        entrance, problem.logits, problem.record(), problem.advantages, correction=correction, **o
    )
    total, summed = call(reduction="sum")
    kept = int(total.diagnostics.kept.sum())
    assert 0 < kept < 6
    mean, by_all = call()
    ratio, by_kept = call(denominator="kept")
    torch.testing.assert_close(by_all, summed / 6)
    torch.testing.assert_close(by_kept, summed / kept)
    torch.testing.assert_close(ratio.loss * kept, mean.loss * 6)


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "none"])
def test_a_dropped_sequence_is_silent_and_stays_in_the_denominator(entrance: str, reduction: str) -> None:
    problem = Problem(seed=4)
    keep = torch.tensor([True, True, True, False])
    options: dict[str, Any] = {"sequence_ids": IDS, "reduction": reduction, "entropy_coef": 0.1}
    _, everything = gradient_through(
        entrance, problem.logits, problem.record(), problem.advantages, **options
    )
    out, gradient = gradient_through(
        entrance, problem.logits, problem.record(), problem.advantages, sequence_keep=keep, **options
    )
    dropped = IDS == 3
    assert (gradient[dropped] == 0).all()
    torch.testing.assert_close(gradient[~dropped], everything[~dropped])
    assert (out.diagnostics.weight[dropped] != 0).any()  # its diagnostics are still reported


@pytest.mark.parametrize("validate", [True, False])
def test_a_dropped_sequence_may_overflow(validate: bool) -> None:
    record = oc.SamplerRecord(torch.tensor([0, 0]), torch.tensor([-200.0, -0.7]))
    options: dict[str, Any] = {
        "correction": oc.Correction.from_name("is"),
        "sequence_ids": torch.tensor([0, 1]),
    }
    out, gradient = gradient_through(
        "logits", torch.zeros(2, 2), record, torch.ones(2), sequence_keep=torch.tensor([False, True]),
        validate=False, **options,
    )  # fmt: skip
    assert out.loss.isfinite() and gradient.isfinite().all() and (gradient[0] == 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("kind", ["head", "support"])
def test_regularizers_against_autograd(estimator: str, kind: str) -> None:
    problem = Problem(kind=kind, seed=7, temperature=1.0)
    reference = torch.linspace(-0.02, -0.2, 6, dtype=torch.float64)
    options: dict[str, Any] = {"correction": oc.Correction.from_name("mis"), "reduction": "sum"}
    _, plain = gradient_through("logits", problem.logits, problem.record(), problem.advantages, **options)
    options |= {"entropy_coef": 0.3, "kl_coef": 0.7, "kl_estimator": estimator, "ref_logprobs": reference}
    _, full = gradient_through("logits", problem.logits, problem.record(), problem.advantages, **options)

    leaf = problem.logits.clone().requires_grad_()
    ids, _ = problem.candidates.to_padded()
    allowed = torch.zeros_like(leaf, dtype=torch.bool).scatter_(1, ids, True) | (kind == "head")
    logp = leaf.masked_fill(~allowed, -1e30).log_softmax(1)
    entropy = -(logp.exp() * logp).sum(1)
    gap = logp.gather(1, problem.tokens[:, None]).squeeze(1) - reference
    k3 = (-gap).exp() - 1 + gap
    assert kind == "support" or 0 < int((k3 > 10).sum()) < 6, "the cap shows, and not everywhere"
    kl = {"k1": gap, "k2": gap**2 / 2, "k3": k3, "low_var_kl": k3.clamp(max=10)}[estimator]
    (0.7 * kl - 0.3 * entropy).sum().backward()
    torch.testing.assert_close(full - plain, leaf.grad)


@pytest.mark.parametrize("entrance", ["logits", "hidden"])
def test_the_upstream_factor_reaches_every_token(entrance: str) -> None:
    problem = Problem(seed=2)
    factor = torch.linspace(-1.0, 2.0, 6, dtype=torch.float64)
    leaf = problem.logits.clone().requires_grad_()
    head = torch.randn(11, 11, dtype=torch.float64, requires_grad=True)

    def loss(reduction: str, advantages: Tensor) -> Tensor:
        options: dict[str, Any] = {"reduction": reduction, "correction": oc.Correction(oc.TruncatedIS())}
        if entrance == "hidden":
            return oc.policy_loss_from_hidden(leaf, head, problem.record(), advantages, **options).loss
        return oc.policy_loss(leaf, problem.record(), advantages, **options).loss

    inputs = (leaf, head) if entrance == "hidden" else (leaf,)
    each = torch.autograd.grad((loss("none", problem.advantages) * factor).sum(), inputs)
    # the loss is linear in the advantages for a rule that does not look at their sign
    whole = torch.autograd.grad(loss("sum", problem.advantages * factor), inputs)
    tripled = torch.autograd.grad(3 * loss("sum", problem.advantages * factor), inputs)
    for a, b, c in zip(each, whole, tripled, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(c, 3 * b)


def test_in_place_writes_the_gradient_over_the_logits_and_nothing_else_does() -> None:
    problem = Problem(seed=2)
    for inplace in (False, True):
        leaf = problem.logits.clone().requires_grad_()
        inner = leaf * 1.0
        before = inner.detach().clone()
        oc.policy_loss(inner, problem.record(), problem.advantages, inplace=inplace).loss.backward()
        assert torch.equal(inner.detach(), leaf.grad if inplace else before)


def test_another_reader_of_overwritten_logits_raises() -> None:
    problem = Problem(seed=2)
    leaf = problem.logits.clone().requires_grad_()
    inner = leaf * 1.0
    square = inner.square().sum()  # its backward needs the logits
    out = oc.policy_loss(inner, problem.record(), problem.advantages, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (out.loss + square).backward()
    inner = leaf * 1.0
    out = oc.policy_loss(inner, problem.record(), problem.advantages, inplace=True)
    with torch.no_grad():
        inner.zero_()
    with pytest.raises(RuntimeError, match="overwritten between forward and backward"):
        out.loss.backward()


def test_backward_twice() -> None:
    problem = Problem(seed=2)
    leaf = problem.logits.clone().requires_grad_()
    out = oc.policy_loss(leaf, problem.record(), problem.advantages)
    (once,) = torch.autograd.grad(2 * out.loss, leaf, retain_graph=True)
    (again,) = torch.autograd.grad(out.loss, leaf, retain_graph=True)
    torch.testing.assert_close(once, 2 * again)
    torch.autograd.grad(out.loss, leaf)
    with pytest.raises(
        RuntimeError, match=r"returned by an earlier backward|backward through the graph a second"
    ):
        torch.autograd.grad(out.loss, leaf)
    out = oc.policy_loss(leaf, problem.record(), problem.advantages)
    (first,) = torch.autograd.grad(out.loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        first.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_nothing_is_written(mode) -> None:  # type: ignore[no-untyped-def]
    problem = Problem(seed=2)
    leaf = problem.logits.clone().requires_grad_()
    head = torch.eye(11, dtype=torch.float64, requires_grad=True)
    expected = oc.policy_loss(leaf, problem.record(), problem.advantages).loss.item()
    with mode():
        for reduction in ("token-mean", "none"):
            out = oc.policy_loss(
                leaf, problem.record(), problem.advantages, inplace=True, reduction=reduction
            )
            hidden = oc.policy_loss_from_hidden(
                leaf, head, problem.record(), problem.advantages, reduction=reduction
            )
            assert not out.loss.requires_grad and not hidden.loss.requires_grad
            assert out.loss.mean().item() == pytest.approx(expected)
    assert torch.equal(leaf.detach(), problem.logits)
    before = problem.logits.clone()
    oc.policy_loss(problem.logits, problem.record(), problem.advantages, inplace=True)
    assert torch.equal(problem.logits, before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_place_survives_checkpointing(reentrant: bool) -> None:
    problem = Problem(seed=2)
    leaf = problem.logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(oc.policy_loss(leaf, problem.record(), problem.advantages).loss, leaf)
    run = lambda z: oc.policy_loss(z * 1.0, problem.record(), problem.advantages, inplace=True).loss
    torch.utils.checkpoint.checkpoint(run, leaf * 1.0, use_reentrant=reentrant).backward()
    torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("entrance", ["logits", "hidden"])
def test_autocast_does_not_reach_the_arithmetic(entrance: str) -> None:
    problem = Problem(seed=2, dtype=torch.float32)
    expected = gradient_through("logits", problem.logits, problem.record(), problem.advantages)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, gradient = gradient_through(entrance, problem.logits, problem.record(), problem.advantages)
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if entrance == "hidden" else {"atol": 1e-7, "rtol": 1e-6}
    torch.testing.assert_close(gradient, expected[1], **tolerance)
    assert gradient.dtype == torch.float32 and out.diagnostics.logprobs.dtype == torch.float32


def test_gradients_survive_checkpointing() -> None:
    problem = Problem(seed=2)
    leaf = problem.logits.clone().requires_grad_()
    run = lambda z: oc.policy_loss(z * 1.0, problem.record(), problem.advantages).loss
    (expected,) = torch.autograd.grad(run(leaf), leaf)
    (ours,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(run, leaf, use_reentrant=False), leaf)
    torch.testing.assert_close(ours, expected)


def test_fp16_gradients_do_not_underflow_before_the_loss_scale_reaches_them() -> None:
    problem = Problem(size=64, vocab=301, k=20, kind="head", seed=6, temperature=1.0, noise=0.1)
    low = problem.logits.to(torch.float16)
    scale, denominator = 2.0**16, 1e7
    results = {}
    for dtype in (torch.float16, torch.float64):
        leaf = low.detach().to(dtype, copy=True).requires_grad_()
        out = oc.policy_loss(leaf, problem.record(), problem.advantages, denominator=denominator)
        (out.loss * scale).backward()
        results[dtype] = leaf.grad.double()
    # against the scale of a row: far smaller elements are below fp16's own range
    error = (results[torch.float16] - results[torch.float64]).abs()
    assert (error <= 2**-10 * results[torch.float64].abs() + 2**-24).all(), error.max()


def test_a_dropped_sequence_receives_nothing_even_from_logits_that_are_no_numbers() -> None:
    problem = Problem(seed=2)
    logits = problem.logits.clone()
    logits[0, 3] = torch.nan
    keep = torch.tensor([False, True])
    _, gradient = gradient_through(
        "logits", logits, problem.record(), problem.advantages, entropy_coef=0.1, validate=False,
        sequence_ids=(torch.arange(6) > 0).long(), sequence_keep=keep,
    )  # fmt: skip
    assert (gradient[0] == 0).all() and gradient.isfinite().all()


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("kind", ["head", "support"])
def test_half_precision_through_the_head(dtype: torch.dtype, tolerance: float, kind: str) -> None:
    """The weight's gradient is summed in fp32 over many chunks and rounds once, loss scale and all."""
    size, advantages = 256, torch.full((256,), 1.0)
    problem = Problem(size=size, vocab=40, k=8, kind=kind, seed=3, temperature=1.0, noise=0.1)
    make = torch.Generator().manual_seed(0)
    states = torch.randn(size, 8, generator=make).mul(4).to(dtype)
    weight = torch.randn(40, 8, generator=make).mul(0.3).to(dtype)
    record, results = problem.record(), []
    for wide in (torch.float64, dtype):
        leaves = [t.detach().to(wide, copy=True).requires_grad_() for t in (states, weight)]
        out = oc.policy_loss_from_hidden(
            *leaves, record, advantages, correction=oc.Correction.from_name("sc")
        )
        (out.loss * 2.0**10).backward()
        assert all(leaf.grad.dtype == wide for leaf in leaves)
        results.append([leaf.grad.double() for leaf in leaves])
    for exact, ours in zip(*results, strict=True):
        assert ((ours - exact).abs() <= tolerance * exact.abs().max()).all()


def test_fp16_weight_gradients_are_scaled_before_they_are_rounded() -> None:
    tokens = torch.zeros(20_000, dtype=torch.int64)
    states = torch.full((20_000, 1), 8.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(8, 1, dtype=torch.float16, requires_grad=True)
    options = {"correction": oc.Correction.from_name("none")}
    oc.policy_loss_from_hidden(
        states, weight, oc.SamplerRecord(tokens), torch.ones(20_000), **options
    ).loss.backward()
    torch.testing.assert_close(weight.grad[0].item(), -7.0)


def test_records_and_logits_are_left_as_they_were() -> None:
    problem = Problem(seed=1)
    record = problem.record()
    tensors = [problem.logits, record.tokens, record.logprobs, record.temperature, problem.advantages,
               problem.candidates.ids, problem.candidates.logprobs, problem.candidates.offsets]  # fmt: skip
    before = [t.clone() for t in tensors]
    for entrance, rule in itertools.product(("logits", "hidden", "logprobs"), RULES):
        gradient_through(entrance, problem.logits, record, problem.advantages, correction=oc.Correction(rule))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_int32_ids_and_fp32_records_beside_fp64_logits() -> None:
    problem = Problem(seed=1)
    record = problem.record()
    narrow = oc.SamplerRecord(
        record.tokens.int(), record.logprobs.float(),
        oc.CandidateSet(problem.candidates.ids.int(), problem.candidates.logprobs.float(),
                        problem.candidates.offsets, problem.complete),
        record.temperature,
    )  # fmt: skip
    for entrance in ENTRANCES:
        ours = gradient_through(entrance, problem.logits, narrow, problem.advantages.float())[1]
        full = gradient_through(entrance, problem.logits, record, problem.advantages)[1]
        torch.testing.assert_close(ours, full, atol=1e-6, rtol=1e-5)


def test_diagnostics_of_complete_and_head_rows() -> None:
    problem = Problem(seed=1, temperature=1.0)
    out = oc.policy_loss(problem.logits, problem.record(), problem.advantages)
    ids, _ = problem.candidates.to_padded()
    p_mass = problem.logits.softmax(1).gather(1, ids).sum(1)
    q_mass = problem.sampler.gather(1, ids).sum(1)
    rho = torch.where(problem.complete, 1.0, (1 - q_mass) / (1 - p_mass))
    torch.testing.assert_close(out.diagnostics.trainer_head_mass, p_mass)
    torch.testing.assert_close(out.diagnostics.sampler_head_mass, torch.where(problem.complete, 1.0, q_mass))
    torch.testing.assert_close(out.diagnostics.tail_ratio, rho)
    assert out.diagnostics.kept.dtype == torch.bool
    hidden = oc.policy_loss_from_hidden(
        problem.logits, torch.eye(11, dtype=torch.float64), problem.record(), problem.advantages
    )
    assert torch.equal(hidden.diagnostics.trainer_head_mass.isnan(), problem.complete)
