"""The fused loss against its PyTorch twin in fp64, rule by rule, kind by kind, and against the vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from offpolicy_corr.kernels import launch

import offpolicy_corr as oc
from offpolicy_corr import backend
from on_device import DEVICE, MARKS, assert_same, loss_and_gradient, moved
from support import RULES, Problem
from test_vectors import CASES, correction_of, record_of

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a row of tens of columns has whole tiles, a partial one, and several of candidates."""
    monkeypatch.setattr(launch, "SHORT", launch.Tiles(16, 4, 4))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_vector(case: dict[str, Any]) -> None:
    tolerance = 2e-5
    logits = torch.tensor([case["logits"]], device=DEVICE)
    out, gradient = loss_and_gradient(
        logits,
        record_of(case, torch.float32).to(DEVICE),
        torch.tensor([case["advantage"]], device=DEVICE),
        "triton",
        correction=correction_of(case),
    )
    expected = case["expected"]
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(gradient[0].cpu(), torch.tensor(expected["grad"]), **close)
    # the tail mass is a difference, good to a rounding of the whole: the gradient does not notice, the value of a
    # centered loss does where α, whose error is then ρ · rounding / tail, multiplies Σ p log p over the head
    slack = tolerance
    if case["center"] and not case["complete"]:
        tokens = out.diagnostics
        tail = max(1.0 - tokens.trainer_head_mass[0].item(), 1e-6)
        slack += 3e-7 * abs(case["advantage"]) * (tokens.tail_ratio * tokens.entropy)[0].item() / tail
    assert out.loss.item() == pytest.approx(expected["loss"], rel=tolerance, abs=slack)
    assert out.diagnostics.logprobs[0].item() == pytest.approx(
        expected["logprob"], rel=tolerance, abs=tolerance
    )
    assert out.diagnostics.weight[0].item() == pytest.approx(expected["weight"], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("center", [True, False], ids=["centered", "plain"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_every_rule_on_heads_and_supports(small_tiles: None, rule: oc.WeightRule, center: bool) -> None:
    problem = Problem(size=8, vocab=75, kind="mixed", seed=3, k=9)
    mask = torch.tensor([True, True, False, True, True, True, True, True])
    correction = oc.Correction(rule, center=center)
    assert_same(
        problem.logits.float(), problem.record(), problem.advantages, inplace=True,
        correction=correction, loss_mask=mask,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["head", "support", "mixed"])
@pytest.mark.parametrize(
    "options",
    [
        {"entropy_coef": 0.3},
        {"kl_coef": 0.2, "kl_estimator": "k1"},
        {"kl_coef": 0.2, "kl_estimator": "k2"},
        {"kl_coef": 0.2, "entropy_coef": -0.1},
        {"reduction": "none"},
        {"denominator": "kept"},
    ],
    ids=str,
)
def test_regularizers_and_reductions(small_tiles: None, kind: str, options: dict[str, Any]) -> None:
    problem = Problem(size=6, vocab=40, kind=kind, seed=11, k=6)
    if "kl_coef" in options:
        options = options | {"ref_logprobs": -3.0 * torch.rand(6)}
    assert_same(problem.logits.float(), problem.record(), problem.advantages, **options)


def test_a_dropped_sequence_and_tokens_of_other_integer_types() -> None:
    problem = Problem(size=6, vocab=40, kind="mixed", seed=12, k=6)
    record = problem.record()
    candidates = replace(problem.candidates, ids=problem.candidates.ids.to(torch.int32))
    record = replace(record, tokens=record.tokens.to(torch.int32), candidates=candidates)
    ids, keep = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([True, False, True])
    gradient = assert_same(
        problem.logits.float(), record, problem.advantages,
        reduction="sequence-mean", sequence_ids=ids, sequence_keep=keep,
    )  # fmt: skip
    assert (gradient[2:4] == 0).all()


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_a_dropped_row_is_silent_even_where_its_logits_are_not_numbers(entropy_coef: float) -> None:
    problem = Problem(size=4, vocab=40, kind="mixed", seed=12, k=6)
    logits = problem.logits.float()
    logits[2:] = torch.nan
    _, gradient = loss_and_gradient(
        logits.to(DEVICE), moved(problem.record()), problem.advantages.to(DEVICE), "triton", validate=False,
        sequence_ids=torch.tensor([0, 0, 1, 1], device=DEVICE),
        sequence_keep=torch.tensor([True, False], device=DEVICE), entropy_coef=entropy_coef,
    )  # fmt: skip
    assert gradient.isfinite().all() and (gradient[2:] == 0).all() and (gradient[:2] != 0).any()


def test_a_centered_row_without_candidates_has_no_loss() -> None:
    problem = Problem(size=2, vocab=40, kind="head", seed=12, k=6)
    candidates = replace(
        problem.candidates, ids=problem.candidates.ids[:6], logprobs=problem.candidates.logprobs[:6]
    )
    candidates = replace(candidates, offsets=torch.tensor([0, 6, 6]))
    record = moved(replace(problem.record(), candidates=candidates))
    out = oc.policy_loss(
        problem.logits.float().to(DEVICE), record, problem.advantages.to(DEVICE), backend="triton",
        validate=False, reduction="none",
    )  # fmt: skip
    assert out.loss[0].isfinite() and out.loss[1].isnan()


def test_no_candidates_at_all() -> None:
    problem = Problem(size=5, vocab=33, kind="head", seed=2)
    record = replace(problem.record(), candidates=None)
    for name in ("none", "is", "tis", "mis", "clamp", "ppo"):
        correction = oc.Correction.from_name(name)
        assert_same(
            problem.logits.float(), record, problem.advantages, correction=correction, entropy_coef=0.1
        )


def test_supports_of_ids_alone_are_replayed() -> None:
    problem = Problem(size=5, vocab=33, kind="support", seed=2)
    record = replace(problem.record(), candidates=replace(problem.candidates, logprobs=None))
    assert_same(problem.logits.float(), record, problem.advantages, correction=oc.Correction.from_name("tis"))


@pytest.mark.parametrize("high", [5.0, float("inf")])
@pytest.mark.parametrize("kind", [oc.MaskedIS, oc.ClampedIS])
def test_open_bounds(kind: type[oc.WeightRule], high: float) -> None:
    problem = Problem(size=5, vocab=33, kind="mixed", seed=2)
    correction = oc.Correction(kind(0.0, high))  # type: ignore[call-arg]
    assert_same(problem.logits.float(), problem.record(), problem.advantages, correction=correction)


def test_a_truncation_at_infinity_is_full_importance_sampling() -> None:
    problem = Problem(size=5, vocab=33, kind="mixed", seed=2)
    correction = oc.Correction(oc.TruncatedIS(float("inf")))
    assert_same(problem.logits.float(), problem.record(), problem.advantages, correction=correction)


def test_thousands_of_candidates_in_a_row() -> None:
    """4,096 candidates, many tiles of them, and rows with none beside it."""
    torch.manual_seed(0)
    logits = torch.randn(3, 5000)
    logq = (logits + 0.3 * torch.randn(3, 5000)).log_softmax(1)
    top = logq[1].topk(4096).indices
    offsets = torch.tensor([0, 0, 4096, 4096])
    candidates = oc.CandidateSet(top, logq[1, top], offsets, torch.zeros(3, dtype=torch.bool))
    record = oc.SamplerRecord(
        torch.tensor([7, 8, 9]), logq[torch.arange(3), torch.tensor([7, 8, 9])], candidates
    )
    assert_same(logits, record, torch.ones(3), correction=oc.Correction.from_name("mis"))
    assert_same(
        logits, record, torch.ones(3), correction=oc.Correction.from_name("sc+mis"),
        loss_mask=torch.tensor([False, True, False]),
    )  # fmt: skip


@pytest.mark.parametrize("rule", [oc.Unweighted(), oc.ClampedIS(0.5, 5.0), oc.MaskedIS(), oc.TruncatedIS()])
def test_five_digits_where_the_tail_scale_is_5e4(rule: oc.WeightRule) -> None:
    """p's tail is 1e-6 and q's 0.05; as a difference in fp32 the tail would be off by a tenth."""
    p = torch.tensor([0.7, 0.3 - 1e-6, 0.4e-6, 0.6e-6], dtype=torch.float64)
    q = torch.tensor([0.6, 0.35, 0.03, 0.02], dtype=torch.float64)
    candidates = oc.CandidateSet.from_topk(torch.tensor([[0, 1]]), q[:2].log()[None])
    record = oc.SamplerRecord(torch.tensor([0]), q[:1].log(), candidates)
    correction = oc.Correction(rule, tail_floor=1e-9)
    logits, record = p.log()[None].float().to(DEVICE), record.to(DEVICE)
    ones = torch.ones(1, device=DEVICE)
    _, ours = loss_and_gradient(logits, record, ones, "triton", correction=correction)
    _, exact = loss_and_gradient(logits.double(), record, ones, "torch", correction=correction)
    assert exact.abs().max() < 1
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["head", "support"])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def test_low_precision_costs_no_more_than_torch_pays_plus_a_little(
    kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Apple's rule: |ours − exact| ≤ |torch in this dtype − exact| + tol, element by element."""
    problem = Problem(size=6, vocab=301, k=20, kind=kind, seed=6, temperature=1.0)
    low, record = problem.logits.to(dtype).to(DEVICE), moved(problem.record())
    advantages = problem.advantages.to(DEVICE)
    options = {"correction": oc.Correction(oc.TruncatedIS(1.5)), "reduction": "sum"}
    out, ours = loss_and_gradient(low, record, advantages, "triton", **options)
    _, torchs = loss_and_gradient(low, record, advantages, "torch", **options)
    exact_out, exact = loss_and_gradient(low.double(), record, advantages, "torch", **options)
    assert ours.dtype == dtype
    assert ((ours - exact).abs() <= (torchs - exact).abs() + tolerance).all()
    torch.testing.assert_close(out.loss.double(), exact_out.loss, rtol=1e-5, atol=1e-5)


def test_a_row_alone_and_a_row_in_a_batch_are_bitwise_equal(small_tiles: None) -> None:
    problem = Problem(size=7, vocab=75, seed=4, k=7)
    record, logits = moved(problem.record()), problem.logits.float().to(DEVICE)
    advantages = problem.advantages.to(DEVICE)
    together_out, together = loss_and_gradient(logits, record, advantages, "triton", reduction="none")
    for row in range(7):
        index = torch.tensor([row], device=DEVICE)
        out, alone = loss_and_gradient(
            logits[index], record.select(index), advantages[index], "triton", reduction="none"
        )
        assert torch.equal(alone[0], together[row])
        assert torch.equal(out.loss[0], together_out.loss[row])


def test_the_loss_alone_needs_no_gradient_buffer() -> None:
    problem = Problem(size=4, vocab=50, seed=5)
    record, logits = moved(problem.record()), problem.logits.float().to(DEVICE)
    with torch.no_grad():
        out = oc.policy_loss(logits, record, problem.advantages.to(DEVICE), backend="triton")
    with_gradient, _ = loss_and_gradient(logits, record, problem.advantages.to(DEVICE), "triton")
    assert torch.equal(out.loss, with_gradient.loss.detach())


def test_the_upstream_factor_scales_the_gradient_once() -> None:
    problem = Problem(size=4, vocab=50, seed=5)
    record, advantages = moved(problem.record()), problem.advantages.to(DEVICE)
    leaf = problem.logits.float().to(DEVICE).requires_grad_()
    out = oc.policy_loss(leaf, record, advantages, backend="triton")
    (3.0 * out.loss).backward()
    _, once = loss_and_gradient(leaf, record, advantages, "triton")
    torch.testing.assert_close(leaf.grad, 3.0 * once)


def test_from_hidden_states_takes_the_kernels_too() -> None:
    problem = Problem(size=6, vocab=24, kind="mixed", seed=9, temperature=1.0)
    make = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(6, 5, generator=make), torch.randn(24, 5, generator=make)
    grads = {}
    for name, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [x.detach().to(DEVICE, dtype).requires_grad_() for x in (hidden, head)]
        out = oc.policy_loss_from_hidden(
            *leaves, moved(problem.record()), problem.advantages.to(DEVICE), backend=name, entropy_coef=0.1
        )
        out.loss.backward()
        grads[name] = [leaf.grad.double() for leaf in leaves]
    for ours, exact in zip(grads["triton"], grads["torch"], strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


class Mine:
    """A user's own rule."""

    def weight(self, log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(log_ratio)

    def weighted_prob(self, logp: torch.Tensor, logq: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return logq.exp()

    def tail_scale(self, rho: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return rho


def test_asking_for_what_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(size=4, vocab=50, seed=5)
    record, advantages = problem.record(), problem.advantages
    with pytest.raises(RuntimeError, match="Mine is not one of the fused weight rules"):
        oc.policy_loss(
            problem.logits.float(), record, advantages, correction=oc.Correction(Mine()), backend="triton"
        )
    with pytest.raises(RuntimeError, match="logits are float64"):
        oc.policy_loss(problem.logits, record, advantages, backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="logits are on cpu; set TRITON_INTERPRET=1"):
        oc.policy_loss(problem.logits.float(), record, advantages, backend="triton")
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="triton package is not installed"):
        oc.policy_loss(problem.logits.float(), record, advantages, backend="triton")
    assert backend.choose("auto", problem.logits.float()) == "torch"
