"""The per-token count that Miles' torch-native trainers drop: divided by once, never twice."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from offpolicy_corr.integrations.miles.host import UnknownVersion
from offpolicy_corr.integrations.miles.step_tokens import count_step_tokens, require_dropped_count

import miles_double as double
import offpolicy_corr as oc
from miles_double import DROPS_COUNT, install_trainer

MENDED = {
    "the count is read": DROPS_COUNT.replace("loss.backward()", "(loss / count).backward()"),
    "the count is handed on": DROPS_COUNT.replace("return log", "return log, count"),
    "scales are made elsewhere": DROPS_COUNT.replace(
        "loss.backward()", "(loss * scales(self.args.calculate_per_token_loss)).backward()"
    ),
    "the results are kept together": DROPS_COUNT.replace("loss, count, log =", "results ="),
    "the results are indexed": DROPS_COUNT.replace("loss, count, log = loss_function(", "loss = first(").replace(
        "batch=batch", "batch=loss_function(batch)"
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def host() -> None:
    double.install(double.single())


def per_token_args() -> Any:
    more = {"calculate_per_token_loss": True, "train_backend": "fsdp", "global_batch_size": 2}
    return double.plain("none", **more)


def loss_of_17_tokens() -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """(what Miles calls ``backward`` on, the logits' leaves, the gradient that is right)."""
    problem = double.make_problem(prompts=(2, 3), responses=(8, 9))
    for mask in problem.masks:
        mask.fill_(1)
    problem.rollout = [torch.full((r,), -1.0) for r in problem.responses]
    args, state = per_token_args(), double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state, "none")
    batch["offpolicy_corr_step_tokens"] = count_step_tokens([m.tolist() for m in problem.masks], [[0, 1]], 2)
    leaves = double.make_leaves(problem)
    logits = double.local_logits(problem, leaves, args, state)
    loss, _, _ = double.loss_function(args, batch, 1, logits, state, problem, megatron=False)
    _, gradients, _ = double.expected(problem, args, "none", correction=oc.Correction.from_name("none"))
    return loss, leaves, [gradient / 17 for gradient in gradients]


def test_a_trainer_that_drops_the_count_gets_the_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_trainer(monkeypatch, tmp_path)
    loss, leaves, want = loss_of_17_tokens()
    loss.backward()
    for leaf, gradient in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_a_trainer_that_divides_before_backward_is_refused_before_any_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As radixark/miles pull request 3231 does, in a place that is not looked at: 1/17 of the right gradient."""
    install_trainer(monkeypatch, tmp_path)
    loss, leaves, _ = loss_of_17_tokens()
    with pytest.raises(UnknownVersion, match=r"0\.0588235 itself"):
        (loss * (1 / 17)).backward()
    assert all(leaf.grad is None for leaf in leaves)


@pytest.mark.parametrize("text", MENDED.values(), ids=MENDED.keys())
def test_a_trainer_that_may_use_the_count_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert text != DROPS_COUNT
    install_trainer(monkeypatch, tmp_path, text)
    with pytest.raises(UnknownVersion, match="uses the token count"):
        loss_of_17_tokens()


@pytest.mark.skipif(bool(double.MILES_SRC), reason="the real Miles has a trainer")
def test_a_trainer_that_cannot_be_found_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["miles"], "__path__", [str(tmp_path)])
    with pytest.raises(UnknownVersion, match="is not known"):
        loss_of_17_tokens()


@pytest.mark.skipif(bool(double.MILES_SRC), reason="the real Miles has a trainer")
def test_megatron_divides_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["miles"], "__path__", [str(tmp_path)])
    args = double.plain("none", calculate_per_token_loss=True)
    loss, _, _ = double.one_sample([[0.0, 1.0]] * 2, [0, 1], [-1.0, -1.0], args)
    assert bool(loss.isfinite())


@pytest.mark.skipif(not double.MILES_SRC, reason="MILES_SRC is not set")
def test_the_installed_miles_drops_the_count() -> None:
    require_dropped_count()


def test_step_tokens_follow_miles_cut_into_steps() -> None:
    masks = [[1] * n for n in (1, 2, 3, 4, 5, 6, 7, 8, 9)]
    tokens = count_step_tokens(masks, [[8, 0, 2, 4], [1, 3, 5, 7]], 4)
    assert [int(count[0]) for count in tokens] == [16, 16, 22, 16, 22, 22, 0, 22, 16]
