"""`tis_function`: weights, sequence guards and both denominators inside Miles' own policy loss."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import pytest
import torch
from offpolicy_corr.integrations.miles import SettingsError, tis_function

import miles_double as double
import offpolicy_corr as oc


def call(
    problem: double.Problem, own: dict[str, Any], state: double.State, form: str = "thd", **more: Any
) -> Any:
    """The hook on one context-parallel rank; train log-probs are `reference`, token losses are 1, 2, 3, …"""
    args = Namespace(offpolicy_corr=own, qkv_format=form, **{"use_tis": True, **more})
    losses = [torch.arange(1.0, r + 1) for r in problem.responses]
    local = {
        name: double.zigzag(problem, values, double.make_args(qkv_format=form), state)
        for name, values in {"loss": losses, "train": problem.reference, "rollout": problem.rollout}.items()
    }
    loss, masks, metrics = tis_function(
        args,
        pg_loss=torch.cat(local["loss"]),
        train_log_probs=local["train"],
        rollout_log_probs=local["rollout"],
        loss_masks=problem.masks,
        total_lengths=problem.totals,
        response_lengths=problem.responses,
        parallel_state=state,
        max_seq_lens=[double.max_seq_len(problem)] * len(problem.prompts) if form == "bshd" else None,
        step_id=3,
    )
    assert masks is problem.masks
    return loss, metrics


def log_ratios(problem: double.Problem) -> torch.Tensor:
    mask = torch.cat(problem.masks).bool()
    return torch.where(mask, torch.cat(problem.reference) - torch.cat(problem.rollout), 0.0)


@pytest.mark.parametrize("form", ["thd", "bshd"])
@pytest.mark.parametrize("cp", [1, 2])
def test_the_rule_s_weight_times_the_loss_on_every_layout(form: str, cp: int) -> None:
    problem = double.make_problem(seed=1)
    rule = oc.MaskedIS(0.9, 1.1)
    weight = rule.weight(log_ratios(problem), torch.ones(sum(problem.responses)))
    want = (
        weight * torch.cat([torch.arange(1.0, r + 1) for r in problem.responses]) * torch.cat(problem.masks)
    )
    assert 0 < int((want == 0).sum()) < want.numel()
    got = sum(
        float(
            call(problem, {"correction": "mis", "low": 0.9, "high": 1.1}, double.single(r, cp), form)[0].sum()
        )
        for r in range(cp)
    )
    assert got == pytest.approx(float(want.sum()), rel=1e-6)


def test_a_guard_drops_the_whole_sequence() -> None:
    problem = double.make_problem(seed=2)
    means = [
        float(x.sum() / m.sum())
        for x, m in zip(log_ratios(problem).split(problem.responses), problem.masks, strict=True)
    ]
    order = sorted(range(3), key=lambda i: means[i])
    own = {
        "correction": "tis",
        "guards": {"geometric_mean": {"low": 0.0, "high": math.exp((means[order[1]] + means[order[2]]) / 2)}},
    }
    loss, metrics = call(problem, own, double.single())
    parts = loss.split(problem.responses)
    assert [bool((part != 0).any()) for part in parts] == [i != order[2] for i in range(3)]
    kept = metrics["offpolicy_corr/sequence_kept"].split(problem.responses)
    assert [float(k.sum()) for k in kept] == [
        float(m.sum()) * (i != order[2]) for i, m in enumerate(problem.masks)
    ]


def test_without_use_tis_it_only_measures() -> None:
    problem = double.make_problem(seed=2)
    loss, metrics = call(problem, {"correction": "mis"}, double.single(), use_tis=False)
    assert torch.equal(loss, torch.cat([torch.arange(1.0, r + 1) for r in problem.responses]))
    assert float(metrics["offpolicy_corr/kl_k3"].sum()) > 0


@pytest.mark.parametrize(
    "own, reason",
    [
        ({"correction": "sc+mis"}, "needs logits"),
        ({"correction": "ppo"}, "advantages"),
        ({"correction": "mis", "candidates": "heads"}, "no effect"),
        ({"correction": "mis", "inplace_logits": True}, "no effect"),
        ({"correction": "mis", "guards": {"off_policy": {"delta": 0.1}}}, "advantages"),
        ({"correction": "mis", "guards": {"behind_newest_sampler": {"max_lag": 2}}}, "weight versions"),
        ({"correction": "mis", "groups": ["a"]}, "no effect"),
        ({"correction": "mis", "backend": "torch"}, "no effect"),
        ({"correction": "mis", "vocab_size": 9}, "no effect"),
    ],
)
def test_what_the_hook_cannot_do_is_refused(own: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        call(double.make_problem(), own, double.single())


def test_a_per_token_loss_on_a_torch_native_trainer_is_refused() -> None:
    more = {"calculate_per_token_loss": True, "train_backend": "fsdp"}
    with pytest.raises(SettingsError, match="drops the token count"):
        call(double.make_problem(), {"correction": "mis"}, double.single(), **more)
    call(
        double.make_problem(), {"correction": "mis"}, double.single(), **{**more, "train_backend": "megatron"}
    )


def test_a_missing_log_prob_at_a_trained_token_is_an_error() -> None:
    problem = double.make_problem()
    problem.rollout[1][problem.masks[1].nonzero()[0, 0]] = math.nan
    with pytest.raises(oc.RecordError, match="not a number"):
        call(problem, {"correction": "mis"}, double.single())
