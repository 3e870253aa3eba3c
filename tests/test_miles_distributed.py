"""The Miles adapter over gloo, TP 2 × CP 2: every layout against the core's fp64 result."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from offpolicy_corr.integrations.miles import policy_loss, tis_function

import miles_double as double
import offpolicy_corr as oc

TP, CP = 2, 2
LAYOUTS = [(form, allgather) for form in ("thd", "bshd") for allgather in (False, True)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spawn(case: str, ranks: int = TP * CP) -> None:
    mp.spawn(_worker, args=(case, free_port(), ranks), nprocs=ranks, join=True)


def _worker(rank: int, case: str, port: int, ranks: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        case_of(case)(double.fake_group_state(TP if ranks == TP * CP else 1, CP))
    finally:
        dist.destroy_process_group()


def case_of(name: str) -> Callable[[double.State], None]:
    if name in CASES:
        return CASES[name]
    import test_miles_native

    return getattr(test_miles_native, name)


def search_path() -> str:
    return os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def compare(
    state: double.State, problem: double.Problem, args: Any, candidates: str = "heads", **core: Any
) -> dict[str, Any]:
    """One step through the dispatcher on every rank; loss and gradient joined over ranks equal the core's."""
    want_loss, want, _ = double.expected(problem, args, candidates, **core)
    double.install(state)
    leaves = double.make_leaves(problem)
    batch = double.make_batch(problem, args, state, candidates)
    logits = double.local_logits(problem, leaves, args, state, pad_columns=5)
    scaled, count, log = double.loss_function(args, batch, 2, logits, state, problem, num_rollouts=4)
    scaled.backward()
    factor = CP if args.calculate_per_token_loss else CP * 2 / 4
    loss = scaled.detach() / factor
    dist.all_reduce(loss, group=state.cp.group)
    torch.testing.assert_close(loss, want_loss, rtol=1e-9, atol=1e-9)
    for leaf, reference in zip(leaves, want, strict=True):
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient / factor, reference, rtol=1e-9, atol=1e-9)
    if args.calculate_per_token_loss:
        assert int(count) == sum(max(int(m.sum()), 1) for m in problem.masks)
    values = log["values"].double()
    dist.all_reduce(values, group=state.cp.group)
    torch.testing.assert_close(values[1 + log["keys"].index("loss")], want_loss, rtol=1e-5, atol=1e-5)
    return dict(zip(log["keys"], values[1:].tolist(), strict=True))


def layouts(state: double.State) -> None:
    for seed, (form, allgather) in enumerate(LAYOUTS):
        for per_token in (False, True):
            args = double.make_args(
                qkv_format=form, allgather_cp=allgather, calculate_per_token_loss=per_token, vocab_size=23
            )
            compare(state, double.make_problem(seed=seed), args)
        args.offpolicy_corr = {"inplace_logits": True}
        compare(state, double.make_problem(seed=seed), args)
        args.offpolicy_corr, args.recompute_loss_function = {}, True
        compare(state, double.make_problem(seed=seed), args)


def options(state: double.State) -> None:
    for form, allgather in (("thd", False), ("thd", True)):
        base = {"qkv_format": form, "allgather_cp": allgather, "vocab_size": 23}
        problem = double.make_problem(seed=21, temperature=0.8)
        with_kl = {"entropy_coef": 0.03, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3"}
        args = double.make_args(**base, **with_kl, rollout_temperature=0.8)
        reference = torch.cat(problem.reference).double()
        compare(state, problem, args, entropy_coef=0.03, kl_coef=0.2, ref_logprobs=reference)
        filters = {"rollout_top_p": 0.9, "rollout_top_k": 6, "rollout_temperature": 0.8}
        for name, kind in (("sc+mis", "supports"), ("mis", "ids")):
            args = double.make_args(**base, **filters, offpolicy_corr={"correction": name})
            compare(state, problem, args, kind, correction=oc.Correction.from_name(name))
        for name in ("sc+tis", "sc", "clamp"):
            args = double.make_args(**base, offpolicy_corr={"correction": name}, rollout_temperature=0.8)
            compare(state, problem, args, correction=oc.Correction.from_name(name))


def one_sided(state: double.State) -> None:
    """Ranks without a response row: all rows on one rank, and samples masked whole."""
    for form, allgather in LAYOUTS:
        args = double.make_args(qkv_format=form, allgather_cp=allgather, vocab_size=23)
        early = double.make_problem(seed=31, prompts=(30,), responses=(2,))
        compare(state, early, args)
        masked = double.make_problem(seed=32)
        for mask in masked.masks[1:]:
            mask.zero_()
        compare(state, masked, args)


def guards(state: double.State) -> None:
    """Guards and kept counts look at whole responses: every context-parallel rank takes the same decision."""
    problem = double.make_problem(seed=41, noise=0.9)
    _, _, out = double.expected(problem, double.make_args())
    log_ratios = zip(out.diagnostics.log_ratio.split(problem.responses), problem.masks, strict=True)
    means = sorted(float(log_ratio.sum() / mask.sum()) for log_ratio, mask in log_ratios)
    between = {"geometric_mean": {"low": 0.0, "high": math.exp((means[1] + means[2]) / 2)}}
    found = []
    for form, allgather in LAYOUTS:
        for own in (
            {"guards": between},
            {"correction": "mis", "low": 0.8, "high": 1.25, "denominator": "kept"},
        ):
            args = double.make_args(
                qkv_format=form, allgather_cp=allgather, vocab_size=23, offpolicy_corr=own
            )
            double.install(state)
            leaves = double.make_leaves(problem)
            batch = double.make_batch(problem, args, state, "heads")
            logits = double.local_logits(problem, leaves, args, state, pad_columns=5)
            loss, _, log = double.loss_function(args, batch, 1, logits, state, problem)
            loss.backward()
            gradient = torch.cat(
                [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            )
            dist.all_reduce(gradient)
            found.append((log["keys"], gradient))
    for keys, gradient in found[2:]:
        reference = found[0] if keys == found[0][0] else found[1]
        torch.testing.assert_close(gradient, reference[1], rtol=1e-9, atol=1e-9)
    assert found[0][0] != found[1][0]
    assert all(bool((gradient != 0).any()) for _, gradient in found)


def half_precision_without_rows(state: double.State) -> None:
    """fp16 logits whose plain sum overflows, on a rank without a response row: finite loss, zero gradient."""
    double.install(state)
    problem = double.make_problem(seed=51, prompts=(30,), responses=(2,), dtype=torch.float32)
    args = double.make_args(allgather_cp=True)
    leaves = [torch.full_like(leaf, 6e4, dtype=torch.float16).requires_grad_() for leaf in problem.logits]
    batch = double.make_batch(problem, args, state)
    logits = double.local_logits(problem, leaves, args, state, fill=6e4)
    loss, _ = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    assert loss.dtype == torch.float32
    assert bool(loss.isfinite())
    loss.backward()
    gradient = leaves[0].grad
    assert gradient is not None
    assert bool(gradient.isfinite().all())
    if state.cp.rank == 0:  # the response's rows lie behind the middle of the packed row
        assert bool((gradient == 0).all())
    else:
        assert bool((gradient != 0).any())


Spoil = Callable[[dict[str, Any], torch.Tensor], None]


def nan_log_prob(batch: dict[str, Any], logits: torch.Tensor) -> None:
    batch["rollout_log_probs"][1].fill_(math.nan)


def short_list(batch: dict[str, Any], logits: torch.Tensor) -> None:
    batch["advantages"][1] = batch["advantages"][1][:-1]


def no_rows(batch: dict[str, Any], logits: torch.Tensor) -> None:
    batch["total_lengths"] = [1, 2, 3]


def broken_head(batch: dict[str, Any], logits: torch.Tensor) -> None:
    batch["rollout_topk_log_probs"] = [np.full_like(v, 0.5) for v in batch["rollout_topk_log_probs"]]


def nan_logits(batch: dict[str, Any], logits: torch.Tensor) -> None:
    logits.fill_(math.nan)


SPOILS: dict[Spoil, str] = {
    nan_log_prob: "log-prob is not a finite number",
    short_list: r"values for \d+ tokens .*advantages",
    no_rows: "response_lengths",
    broken_head: "candidate log-prob is NaN or above 0",
    nan_logits: "response token .* is not finite",
}


def raised(call: Callable[[], Any]) -> Exception:
    """What ``call`` raises, within a second; a peer that still waits would take until the group's time limit."""
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(ValueError) as caught:
        call()
    assert time.monotonic() - start < 1.0
    return caught.value


def agree(state: double.State, error: Exception) -> None:
    """Every rank raised the same."""
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, (type(error).__name__, str(error), getattr(error, "sample", None)))
    assert len(set(errors)) == 1, errors


def a_bad_record_on_one_context_parallel_rank(state: double.State) -> None:
    """The ranks of context-parallel rank 1 have it (all its tensor-parallel ranks hold the same record)."""
    double.install(state)
    problem = double.make_problem(seed=61)
    for form, allgather in LAYOUTS:
        for spoil, message in SPOILS.items():
            args = double.make_args(qkv_format=form, allgather_cp=allgather, vocab_size=23)
            batch = double.make_batch(problem, args, state)
            logits = double.local_logits(problem, double.make_leaves(problem), args, state, pad_columns=5)
            logits, reducer = logits.detach().clone(), double.make_reducer(batch, args, state, problem)
            if state.cp.rank == 1:
                spoil(batch, logits)
            error = raised(lambda b=batch, x=logits, a=args, r=reducer: policy_loss(a, b, x, r))
            assert re.search(message, str(error)), (form, allgather, spoil.__name__, error)
            agree(state, error)
    # nothing is left over from the failures: the next step works
    compare(state, problem, double.make_args(vocab_size=23))


def a_bad_record_in_the_hook(state: double.State) -> None:
    problem = double.make_problem(seed=62)
    args = double.make_args()
    lists = {"train": problem.reference, "rollout": problem.rollout}
    local = {name: double.zigzag(problem, values, args, state) for name, values in lists.items()}
    if state.cp.rank == 1:
        local["rollout"][1].fill_(math.nan)
    own = {"correction": "mis", "guards": {"geometric_mean": {"low": 0.5, "high": 2.0}}}
    call = lambda: tis_function(
        Namespace(offpolicy_corr=own, qkv_format="thd", use_tis=True),
        pg_loss=torch.cat(local["train"]),
        train_log_probs=local["train"],
        rollout_log_probs=local["rollout"],
        loss_masks=problem.masks,
        total_lengths=problem.totals,
        response_lengths=problem.responses,
        parallel_state=state,
    )
    error = raised(call)
    assert re.search("sample 1, token .*rollout_log_probs", str(error)), error
    agree(state, error)


CASES = {f.__name__: f for f in (layouts, options, one_sided, guards, half_precision_without_rows)}
CASES |= {f.__name__: f for f in (a_bad_record_on_one_context_parallel_rank, a_bad_record_in_the_hook)}


@pytest.mark.parametrize("case", ["layouts", "options", "one_sided", "guards"])
def test_tensor_and_context_parallel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", search_path())
    spawn(case)


def test_half_precision_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", search_path())
    spawn("half_precision_without_rows", CP)


@pytest.mark.parametrize("ranks", [CP, TP * CP])
def test_a_bad_record_on_one_rank_raises_the_same_error_on_all(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", search_path())
    spawn("a_bad_record_on_one_context_parallel_rank", ranks)


def test_a_bad_record_in_the_hook_raises_the_same_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", search_path())
    spawn("a_bad_record_in_the_hook", CP)
