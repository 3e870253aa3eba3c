"""`policy_loss` of the Miles adapter against the core's fp64 result, on every layout that one process can hold."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from offpolicy_corr.integrations.miles import policy_loss, tis_function
from offpolicy_corr.integrations.miles.metrics import mismatch

import miles_double as double
import offpolicy_corr as oc

SC = ("sc+mis", "sc+tis", "sc", "mis", "ppo", "none")


def run(
    problem: double.Problem,
    args: Any,
    candidates: str = "heads",
    cp: int = 1,
    sums: list[float] | None = None,
    pad_columns: int = 0,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Loss, gradients and metrics added over the context-parallel ranks, one after the other."""
    leaves = double.make_leaves(problem)
    total, metrics = 0.0, {}
    for rank in range(cp):
        state = double.single(rank, cp)
        double.install(state)
        batch = double.make_batch(problem, args, state, candidates, sums)
        logits = double.local_logits(problem, leaves, args, state, pad_columns)
        loss, found = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
        loss.backward()
        total = total + loss.detach()
        metrics = {key: metrics.get(key, 0.0) + value for key, value in found.items()}
    return total, [leaf.grad for leaf in leaves], metrics


def assert_same(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    for mine, reference in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(mine, reference.to(mine.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", ["thd", "bshd"])
@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", ["sc+mis", "mis"])
def test_every_layout_gives_the_core_s_loss_and_gradient(
    form: str, cp: int, per_token: bool, name: str
) -> None:
    problem = double.make_problem(seed=cp)
    args = double.make_args(
        qkv_format=form, calculate_per_token_loss=per_token, offpolicy_corr={"correction": name}
    )
    kind = "heads" if name.startswith("sc") else "none"
    want = double.expected(problem, args, kind, correction=oc.Correction.from_name(name))
    assert_same(run(problem, args, kind, cp), want)


@pytest.mark.parametrize("name", SC)
@pytest.mark.parametrize("candidates", ["heads", "supports", "lengths", "dense"])
def test_every_correction_on_every_form_of_candidates(name: str, candidates: str) -> None:
    problem = double.make_problem(seed=11)
    filters = {} if candidates == "heads" else {"rollout_top_p": 0.9, "rollout_top_k": 6}
    kind = "heads" if candidates == "heads" else "supports"
    args = double.make_args(offpolicy_corr={"correction": name, "candidates": kind}, **filters)
    form = "heads" if candidates == "heads" else "supports"
    want = double.expected(problem, args, form, correction=oc.Correction.from_name(name))
    assert_same(run(problem, args, candidates), want)


def test_ids_alone_are_replayed_without_centering() -> None:
    problem = double.make_problem(seed=3)
    args = double.make_args(offpolicy_corr={"correction": "mis"}, rollout_top_p=0.9, rollout_top_k=6)
    want = double.expected(problem, args, "ids", correction=oc.Correction.from_name("mis"))
    assert_same(run(problem, args, "ids"), want)
    over_vocabulary = double.expected(problem, args, "none", correction=oc.Correction.from_name("mis"))
    assert abs(float(want[0] - over_vocabulary[0])) > 1e-3, "the example must tell replay from its absence"


def test_tensors_serve_as_well_as_arrays() -> None:
    problem = double.make_problem()
    args, state = double.make_args(), double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state)
    as_tensors = dict(batch)
    for key in ("rollout_topk_token_ids", "rollout_topk_log_probs"):
        as_tensors[key] = [torch.from_numpy(value) for value in batch[key]]
    logits = double.local_logits(problem, problem.logits, args, state)
    reducer = double.make_reducer(batch, args, state, problem)
    first, second = (policy_loss(args, b, logits, reducer)[0] for b in (batch, as_tensors))
    assert float(first) == float(second)


def test_temperature_is_applied_here_and_once() -> None:
    problem = double.make_problem(seed=5, temperature=0.7)
    args = double.make_args(rollout_temperature=0.7)
    assert_same(run(problem, args), double.expected(problem, args))


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "low_var_kl"])
def test_entropy_bonus_and_reference_kl(name: str) -> None:
    problem = double.make_problem(seed=7)
    problem.reference = [torch.full_like(values, -0.01) for values in problem.reference]
    args = double.make_args(entropy_coef=0.02, use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type=name)
    want = double.expected(
        problem,
        args,
        entropy_coef=0.02,
        kl_coef=0.3,
        kl_estimator=name,
        ref_logprobs=torch.cat(problem.reference).double(),
    )
    got = run(problem, args, cp=2)
    assert_same(got, want)
    gap = want[2].diagnostics.logprobs[torch.cat(problem.masks).bool()] + 0.01
    assert 0 < int(((-gap).exp() - 1 + gap > 10).sum()) < len(gap), (
        "the cap of low_var_kl shows, not everywhere"
    )
    plain, _, _ = double.expected(problem, args)
    metrics = got[2]
    recomposed = metrics["pg_loss"] - 0.02 * metrics["entropy_loss"] + 0.3 * metrics["kl_loss"]
    torch.testing.assert_close(metrics["pg_loss"], plain, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(recomposed, metrics["loss"], rtol=1e-9, atol=1e-9)


def test_per_rollout_denominators_are_the_reducer_s() -> None:
    problem = double.make_problem(seed=2)
    sums = [30.0, 30.0, 7.0]
    args = double.make_args()
    assert_same(run(problem, args, sums=sums, cp=2), double.expected(problem, args, rollout_mask_sums=sums))


def test_padding_of_the_vocabulary_is_never_read() -> None:
    problem = double.make_problem(seed=4)
    args = double.make_args(vocab_size=problem.vocab)
    assert_same(run(problem, args, pad_columns=9), double.expected(problem, args))
    own = double.make_args(vocab_size=999, offpolicy_corr={"vocab_size": problem.vocab})
    assert_same(run(problem, own, pad_columns=9), double.expected(problem, args))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)])
def test_precisions_of_the_backends(dtype: torch.dtype, tolerance: float) -> None:
    problem = double.make_problem(seed=6, dtype=dtype)
    args = double.make_args()
    got, want = run(problem, args), double.expected(problem, args)
    assert all(gradient.dtype == dtype for gradient in got[1])
    # the reference sees the same rounded logits, so the loss itself is good to fp32
    torch.testing.assert_close(got[0].double(), want[0], rtol=2e-5, atol=2e-5)
    for mine, reference in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(
            mine.double(), reference, rtol=tolerance, atol=tolerance * float(reference.abs().max())
        )


def test_kept_denominator_gives_each_sample_its_whole_weight() -> None:
    problem = double.make_problem(seed=9, noise=1.5)
    rule = {"correction": "mis", "low": 0.8, "high": 1.25}
    args = double.make_args(offpolicy_corr={**rule, "denominator": "kept"})
    _, _, out = double.expected(
        problem, args, "none", correction=oc.Correction.from_name("mis", low=0.8, high=1.25)
    )
    assert 0 < int(out.diagnostics.kept.sum()) < int(torch.cat(problem.masks).sum())
    want = sum(
        float(loss.detach().sum() / kept.sum().clamp(min=1))
        for loss, kept in zip(
            out.loss.split(problem.responses), out.diagnostics.kept.split(problem.responses), strict=True
        )
    )
    got, _, metrics = run(problem, args, "none")
    assert float(got) == pytest.approx(want, rel=1e-9)
    assert float(metrics["loss"]) == pytest.approx(want, rel=1e-9)


def test_a_guarded_sequence_is_dropped_whole_and_stays_counted() -> None:
    problem = double.make_problem(seed=12, noise=0.8)
    args = double.make_args()
    _, _, out = double.expected(problem, args)
    means = [
        float((log_ratio * mask).sum() / mask.sum())
        for log_ratio, mask in zip(
            out.diagnostics.log_ratio.split(problem.responses), problem.masks, strict=True
        )
    ]
    order = sorted(range(3), key=lambda i: means[i])
    high = np.exp((means[order[1]] + means[order[2]]) / 2)
    guarded = double.make_args(
        offpolicy_corr={"guards": {"geometric_mean": {"low": 0.0, "high": float(high)}}}
    )
    dropped = copy.deepcopy(problem)
    dropped.advantages[order[2]].zero_()
    want = double.expected(dropped, args)
    got = run(problem, guarded)
    assert_same(got, want)
    assert float(got[2]["offpolicy_corr/sequence_kept"]) == pytest.approx(2.0)


def test_metrics_are_the_core_s_means() -> None:
    problem = double.make_problem(seed=13)
    args = double.make_args(offpolicy_corr={"band": [0.8, 1.25]})
    _, _, out = double.expected(problem, args)
    _, _, metrics = run(problem, args, cp=2)

    def mean(values: torch.Tensor) -> float:
        parts = zip(values.double().split(problem.responses), problem.masks, strict=True)
        return sum(float((torch.where(m.bool(), v, 0.0)).sum() / m.sum()) for v, m in parts)

    ratio = out.diagnostics.log_ratio.exp()
    assert float(metrics["offpolicy_corr/kl_k1"]) == pytest.approx(mean(-out.diagnostics.log_ratio), rel=1e-6)
    assert float(metrics["offpolicy_corr/out_of_band"]) == pytest.approx(
        mean((ratio < 0.8) | (ratio > 1.25)), rel=1e-6
    )
    assert float(metrics["offpolicy_corr/kept"]) == pytest.approx(mean(out.diagnostics.kept), rel=1e-6)
    assert float(metrics["offpolicy_corr/trainer_head_mass"]) == pytest.approx(
        mean(out.diagnostics.trainer_head_mass), rel=1e-6
    )
    assert float(metrics["train_rollout_logprob_abs_diff"]) == pytest.approx(
        mean(out.diagnostics.log_ratio.abs()), rel=1e-6
    )
    assert float(metrics["train_rollout_logprob_abs_diff"]) > 0.1


def test_k3_of_a_tiny_mismatch_is_positive_and_right() -> None:
    """At |log r| of 1e-4, ratio − 1 − log r in fp32 is off by a quarter in the mean and often negative."""
    log_ratio = 1e-4 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
    exact = torch.expm1(log_ratio.double()) - log_ratio.double()
    naive = log_ratio.exp() - 1.0 - log_ratio
    assert float((naive < 0).float().mean()) > 0.2
    for found in (
        mismatch(log_ratio, torch.ones_like(log_ratio), (0.2, 5.0))["kl_k3"],
        tis_k3(log_ratio),
    ):
        assert bool((found >= 0).all())
        assert float(found.double().mean()) == pytest.approx(float(exact.mean()), rel=1e-2)


def tis_k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """What the hook reports for these log-ratios, exact in fp32 where log q is 0."""
    size = len(log_ratio)
    _, _, metrics = tis_function(
        double.make_args(offpolicy_corr={"correction": "mis"}, use_rollout_logprobs=False, use_tis=True),
        pg_loss=torch.ones(size),
        train_log_probs=[log_ratio],
        rollout_log_probs=[torch.zeros(size)],
        loss_masks=[torch.ones(size)],
        total_lengths=[size + 1],
        response_lengths=[size],
        parallel_state=double.single(),
    )
    return metrics["offpolicy_corr/kl_k3"]


def test_keys_never_depend_on_the_data() -> None:
    args = double.make_args(
        entropy_coef=0.1,
        use_kl_loss=True,
        kl_loss_coef=0.0,
        offpolicy_corr={"guards": {"outlier": {"low": 0.1, "high": 9}}},
    )
    problem = double.make_problem()
    masked = copy.deepcopy(problem)
    for mask in masked.masks:
        mask.zero_()
    first, second = run(problem, args)[2], run(masked, args, cp=2)[2]
    assert list(first) == list(second)
    assert all(float(value) == 0.0 for key, value in second.items() if key != "offpolicy_corr/sequence_kept")
    assert all(bool(torch.isfinite(torch.as_tensor(value))) for value in second.values())


def test_groups_split_the_same_means() -> None:
    problem = double.make_problem(seed=8)
    args, state = double.make_args(offpolicy_corr={"groups": ["b200", "h100"]}), double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state)
    batch["offpolicy_corr_group"] = [np.arange(r) % 2 for r in problem.responses]
    logits = double.local_logits(problem, problem.logits, args, state)
    _, metrics = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    for key in ("kl_k1", "kept", "out_of_band"):
        parts = sum(float(metrics[f"offpolicy_corr/group/{name}/{key}"]) for name in ("b200", "h100"))
        assert parts == pytest.approx(float(metrics[f"offpolicy_corr/{key}"]), abs=1e-9)
    even = sum(float(mask[::2].sum() / mask.sum()) for mask in problem.masks)
    assert float(metrics["offpolicy_corr/group/b200/tokens"]) == pytest.approx(even)
    assert float(metrics["offpolicy_corr/group/h100/tokens"]) == pytest.approx(3.0 - even)
    assert abs(even - 1.5) > 0.1


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_recomputation_changes_nothing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    problem = double.make_problem()
    args, state = double.make_args(recompute_loss_function=True), double.single()
    double.install(state)
    leaves = double.make_leaves(problem)
    batch = double.make_batch(problem, args, state)
    logits = double.local_logits(problem, leaves, args, state)
    reducer = double.make_reducer(batch, args, state, problem)
    loss, metrics = checkpoint(policy_loss, args, batch, logits, reducer, use_reentrant=reentrant)
    loss.backward()
    assert_same((loss.detach(), [leaf.grad for leaf in leaves]), double.expected(problem, args))
    assert not any(value.requires_grad for value in metrics.values())


def test_the_probe_of_the_reducer_does_not_recompute_the_loss() -> None:
    from torch.utils.checkpoint import checkpoint

    problem = double.make_problem()
    args, state = double.make_args(recompute_loss_function=True), double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state)
    logits = double.local_logits(problem, double.make_leaves(problem), args, state)
    reducer, calls = double.make_reducer(batch, args, state, problem), []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return reducer(x)

    checkpoint(policy_loss, args, batch, logits, counted, use_reentrant=False)
    assert len(calls) == 1


def test_inplace_writes_the_gradient_over_the_logits() -> None:
    problem = double.make_problem(seed=1)
    args, state = double.make_args(offpolicy_corr={"inplace_logits": True}), double.single()
    double.install(state)
    leaves = double.make_leaves(problem)
    batch = double.make_batch(problem, args, state)
    logits = double.local_logits(problem, leaves, args, state) * 1.0
    before = logits.detach().clone()
    loss, _ = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    loss.backward()
    assert not torch.equal(logits.detach(), before)
    assert_same((loss.detach(), [leaf.grad for leaf in leaves]), double.expected(problem, args))
