"""The kernels inside `torch.compile`, under gradient checkpointing, and as registered operators."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import offpolicy_corr as oc
from on_device import DEVICE, MARKS, loss_and_gradient, moved
from support import Problem

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def setting() -> tuple[Tensor, oc.SamplerRecord, Tensor]:
    problem = Problem(size=5, vocab=40, kind="mixed", seed=3)
    return problem.logits.float().to(DEVICE), moved(problem.record()), problem.advantages.to(DEVICE)


SEQUENCES = {"sequence_ids": torch.tensor([0, 0, 1, 1, 2], device=DEVICE)}
MASK = torch.tensor([True, True, False, True, True], device=DEVICE)
LOSSES: dict[str, dict[str, Any]] = {
    "default": {},
    "in place": {"inplace": True},
    "masked": {"loss_mask": MASK, "entropy_coef": 0.1},
    "every token": {"reduction": "none", "correction": oc.Correction(oc.Unweighted())},
    "kept": {"denominator": "kept"},
    "sequences": SEQUENCES
    | {"reduction": "sequence-mean", "sequence_keep": torch.tensor([True, False, True], device=DEVICE)},
}


def assert_compiles(
    step: Callable[..., Tensor], *calls: tuple[Any, ...], compiler: str = "aot_eager", whole: bool = True
) -> None:
    """One graph where it must be ``whole``, and from every call the same gradient as uncompiled."""
    torch.compiler.reset()
    compiled = torch.compile(step, backend=compiler, fullgraph=whole)
    for logits, *rest in calls:
        grads = []
        for function in (step, compiled):
            leaf = logits.detach().requires_grad_()
            function(leaf, *rest).backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)


def loss_step(source: Tensor, record: oc.SamplerRecord, advantages: Tensor, **options: Any) -> Tensor:
    out = oc.policy_loss(source * 2.0, record, advantages, backend="triton", validate=False, **options)
    return 3.0 * out.loss.sum() + 0.0 * out.diagnostics.weight.sum()


def logprobs_step(source: Tensor, record: oc.SamplerRecord, entropy: bool = True) -> Tensor:
    logp, candidate_logp, entropies = oc.selected_logprobs(
        source * 2.0, record.tokens, record.candidates, record.temperature, backend="triton", validate=False
    )
    return logp.sum() + 0.1 * candidate_logp.sum() + (entropies.sum() if entropy else 0.0)


def loss_and_logprobs(
    source: Tensor, record: oc.SamplerRecord, advantages: Tensor, coefficient: float
) -> Tensor:
    return loss_step(source, record, advantages, entropy_coef=coefficient) + logprobs_step(source, record)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_compiles_to_one_graph(setting: Any, name: str) -> None:
    assert_compiles(partial(loss_step, **LOSSES[name]), setting)


@pytest.mark.parametrize("entropy", [True, False])
def test_log_probs_compile_to_one_graph(setting: Any, entropy: bool) -> None:
    logits, record, _ = setting
    assert_compiles(partial(logprobs_step, entropy=entropy), (logits, record))


def test_other_sizes_and_settings_from_call_to_call(setting: Any) -> None:
    calls = []
    for size, coefficient in ((5, 0.1), (7, 0.2), (9, 0.3)):
        problem = Problem(size=size, vocab=40, kind="mixed", seed=size)
        record = moved(problem.record())
        calls.append((problem.logits.float().to(DEVICE), record, problem.advantages.to(DEVICE), coefficient))
    assert_compiles(loss_and_logprobs, *calls)


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_gradient(setting: Any) -> None:
    assert_compiles(loss_and_logprobs, (*setting, 0.1), compiler="inductor")


def test_checks_break_the_graph_and_change_nothing(setting: Any) -> None:
    logits, record, advantages = setting

    def step(source: Tensor) -> Tensor:
        return oc.policy_loss(source * 2.0, record, advantages, backend="triton").loss

    assert_compiles(step, (logits,), whole=False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_steps_give_the_same_gradient(setting: Any, reentrant: bool) -> None:
    logits, record, advantages = setting

    def step(source: Tensor) -> Tensor:
        inner = source * 2.0
        loss = oc.policy_loss(inner, record, advantages, backend="triton", inplace=True).loss
        logp, _, _ = oc.selected_logprobs(source, record.tokens, record.candidates, backend="triton")
        return loss + logp.sum()

    grads = []
    for function in (step, lambda x: checkpoint(step, x, use_reentrant=reentrant)):
        leaf = logits.detach().requires_grad_()
        function(leaf).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_the_operators_pass_torch_s_own_checks(setting: Any) -> None:
    """Schema, aliasing, fake implementation."""
    from offpolicy_corr.kernels import rescale, triton_logprobs, triton_loss, vocab_parallel

    logits, record, advantages = setting
    candidates, size = record.candidates, 5
    log2e_over_temps = torch.full((size,), 1.44, device=DEVICE)
    candidate_logits = torch.empty(candidates.ids.shape, device=DEVICE)
    checks = ("test_schema", "test_faketensor")
    token_is_candidate = torch.zeros(size, dtype=torch.bool, device=DEVICE)
    arguments = (
        logits, torch.empty_like(logits), candidate_logits, record.tokens, None, record.logprobs, advantages,
        torch.ones(size, device=DEVICE), log2e_over_temps, None, candidates.ids, candidates.logprobs,
        candidates.offsets,
        candidates.complete, torch.full((size,), 0.1, device=DEVICE), None, 40, 0,
        [1e-6, 0.0, 0.0, 0.5, 5.0, -0.7, 1.6, 0.2, 2.0], 3, 0, True, False,
    )  # fmt: skip
    torch.library.opcheck(triton_loss._LOSS, arguments, test_utils=checks)
    arguments = (
        logits,
        record.tokens,
        None,
        log2e_over_temps,
        candidates.ids,
        candidates.offsets,
        None,
        40,
        0,
        0.0,
    )
    torch.library.opcheck(vocab_parallel._ROW_STATS, arguments, test_utils=checks)
    arguments = (
        logits, torch.empty_like(logits), record.tokens, None, log2e_over_temps, log2e_over_temps,
        log2e_over_temps, log2e_over_temps, candidates.ids,
        candidates.offsets, candidate_logits.zero_(), log2e_over_temps, token_is_candidate, 40, 0,
    )  # fmt: skip
    torch.library.opcheck(triton_logprobs._ROW_GRADIENT, arguments, test_utils=checks)
    torch.library.opcheck(
        rescale._SCALE, (logits.clone(), torch.tensor(2.0, device=DEVICE)), test_utils=checks
    )


@pytest.mark.parametrize("shape", [(), (5,), "expanded"])
def test_held_gradients_are_scaled_on_the_device(setting: Any, shape: Any) -> None:
    from offpolicy_corr.kernels.rescale import scale_

    logits, _, _ = setting
    expanded = torch.full((1,), 3.0, device=DEVICE).expand(5)
    upstream = expanded if shape == "expanded" else torch.randn(shape, device=DEVICE)
    factor = upstream[:, None] if upstream.dim() else upstream
    torch.testing.assert_close(scale_(logits.clone(), upstream), logits * factor)
    flat = torch.randn(7, device=DEVICE)
    torch.testing.assert_close(scale_(flat.clone(), torch.tensor(2.0, device=DEVICE)), 2.0 * flat)
    ones = torch.ones(5, device=DEVICE)
    ones[2] = 2.0
    spoiled = logits.clone()
    spoiled[0, 0] = torch.nan  # a row whose factor is 1 is not even read
    assert torch.equal(scale_(spoiled.clone(), ones)[1], spoiled[1])


def test_the_loss_is_differentiable_through_the_usual_wrappers(setting: Any) -> None:
    logits, record, advantages = setting
    _, plain = loss_and_gradient(logits, record, advantages, "triton")
    leaf = logits.detach().requires_grad_()
    out = oc.policy_loss(leaf, record, advantages, backend="triton")
    out.loss.backward(retain_graph=True)
    out.loss.backward()
    torch.testing.assert_close(leaf.grad, 2.0 * plain)
