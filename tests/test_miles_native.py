"""Against Miles' own numbers, with ``MILES_SRC``: its policy loss, its log-probs, its native score centering.

Skipped without a checkout. The built-in policy loss needs megatron-core for its vocabulary-parallel log-probs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from offpolicy_corr.integrations.miles import policy_loss

import miles_double as double
import offpolicy_corr as oc
from live_memory import Live

pytestmark = pytest.mark.skipif(not double.MILES_SRC, reason="MILES_SRC is not set")

BUILT_IN = {
    "loss_type": "policy_loss",
    "use_rollout_logprobs": False,
    "skip_actor_forward_only": False,
    "observe_training_entropy": False,
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "eps_clip_c": None,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "get_mismatch_metrics": False,
    "custom_tis_function_path": None,
    "custom_pg_loss_reducer_function_path": None,
    "use_opsm": False,
    "use_unbiased_kl": False,
    "log_probs_chunk_size": -1,
}


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def built_in(
    problem: double.Problem, logits: torch.Tensor, state: double.State, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of Miles' own policy loss; the old policy is the present one, so that its ratio is 1."""
    double.install(state)
    args = double.make_args(**{**BUILT_IN, **more})
    batch = double.make_batch(problem, args, state, "none")
    leaf = logits.detach().clone().requires_grad_()
    get = double.real("get_log_probs_and_entropy")
    names = ("unconcat_tokens", "total_lengths", "response_lengths", "max_seq_lens")
    with torch.no_grad():
        batch["log_probs"] = get(leaf.detach(), args=args, **{name: batch[name] for name in names})[
            "log_probs"
        ]
    loss, _, _ = double.real("loss_function")(args, batch, 1, leaf, apply_megatron_loss_scaling=True)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def vocabulary_parallel(state: double.State) -> None:
    """One rank of TP 2 × CP 2: our uncentered gradient is that of Miles' policy loss, shard by shard."""
    problem = double.make_problem(seed=8, dtype=torch.float32, vocab=24)
    for form, allgather in (("thd", False), ("thd", True), ("bshd", False)):
        layout = {"qkv_format": form, "allgather_cp": allgather}
        args = double.make_args(offpolicy_corr={"correction": "none"}, **layout)
        double.install(state)
        leaf = double.local_logits(problem, problem.logits, args, state).clone().requires_grad_()
        _, reference = built_in(problem, leaf, state, **layout)
        batch = double.make_batch(problem, args, state, "none")
        loss, _, _ = double.loss_function(args, batch, 1, leaf, state, problem)
        loss.backward()
        torch.testing.assert_close(leaf.grad, reference, rtol=2**-8, atol=1e-7)
        assert float(reference.abs().max()) > 1e-3


def test_vocabulary_parallel_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    from test_miles_distributed import search_path, spawn

    monkeypatch.setenv("PYTHONPATH", search_path())
    spawn("vocabulary_parallel")


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("name", ["none", "tis"])
def test_our_uncentered_gradient_is_that_of_miles_policy_loss(
    name: str, temperature: float, one_process: None
) -> None:
    pytest.importorskip("megatron.core")
    problem = double.make_problem(seed=3, dtype=torch.float32, temperature=temperature)
    for mask, values in zip(problem.masks, problem.rollout, strict=True):
        values[~mask.bool()] = -1.0  # its own TIS takes NaN at masked tokens into the loss
    args = double.make_args(offpolicy_corr={"correction": name}, rollout_temperature=temperature)
    state = replace(double.single(), tp=double.Dimension(0, 1, dist.group.WORLD))
    double.install(state)
    leaf = double.local_logits(problem, problem.logits, args, state).clone().requires_grad_()
    _, reference = built_in(problem, leaf, state, use_tis=name == "tis", rollout_temperature=temperature)
    batch = double.make_batch(problem, args, state, "none")
    loss, _, _ = double.loss_function(args, batch, 1, leaf, state, problem)
    loss.backward()
    # megatron-core's fused cross entropy hands its gradient on in bfloat16, so that Miles' is good to 2⁻⁸
    torch.testing.assert_close(leaf.grad, reference, rtol=2**-8, atol=1e-7)
    exact = double.expected(problem, args, "none", correction=oc.Correction.from_name(name))[1]
    wanted = torch.cat(exact) / args.global_batch_size
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad[0, : len(wanted)].double(), wanted, rtol=1e-5, atol=1e-7)
    assert float(reference.abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "low_var_kl"])
def test_our_reference_kl_is_that_of_miles(name: str, one_process: None) -> None:
    pytest.importorskip("megatron.core")
    problem = double.make_problem(seed=7, dtype=torch.float32)
    problem.reference = [torch.full_like(values, -0.01) for values in problem.reference]
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": name, "entropy_coef": 0.01}
    args = double.make_args(offpolicy_corr={"correction": "none"}, **kl)
    state = replace(double.single(), tp=double.Dimension(0, 1, dist.group.WORLD))
    double.install(state)
    leaf = double.local_logits(problem, problem.logits, args, state).clone().requires_grad_()
    _, reference = built_in(problem, leaf, state, **kl)
    batch = double.make_batch(problem, args, state, "none")
    loss, _, _ = double.loss_function(args, batch, 1, leaf, state, problem)
    loss.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, reference, rtol=2**-7, atol=1e-5)


def test_the_hook_runs_inside_miles_policy_loss(one_process: None) -> None:
    """Through ``custom_tis_function_path``: TIS as Miles' own, MIS as the core's, on Miles' own reduction."""
    pytest.importorskip("megatron.core")
    problem = double.make_problem(seed=4, dtype=torch.float32, noise=0.9)
    for mask, values in zip(problem.masks, problem.rollout, strict=True):
        values[~mask.bool()] = -1.0
    state = replace(double.single(), tp=double.Dimension(0, 1, dist.group.WORLD))
    double.install(state)
    logits = double.local_logits(problem, problem.logits, double.make_args(), state)
    hook = {"use_tis": True, "custom_tis_function_path": "offpolicy_corr.integrations.miles.tis_function"}
    _, own = built_in(problem, logits, state, use_tis=True)
    _, tis = built_in(problem, logits, state, offpolicy_corr={"correction": "tis"}, **hook)
    torch.testing.assert_close(tis, own, rtol=2**-8, atol=1e-7)
    _, mis = built_in(problem, logits, state, offpolicy_corr={"correction": "mis"}, **hook)
    args = double.make_args()
    exact = double.expected(problem, args, "none", correction=oc.Correction.from_name("mis"))[1]
    wanted = (torch.cat(exact) / args.global_batch_size).float()
    torch.testing.assert_close(mis[0, : len(wanted)], wanted, rtol=2**-8, atol=1e-6)
    assert float((mis - tis).abs().max()) > 1e-3


def native() -> Any:
    for home in ("loss.hub.score_centering", "loss_hub.score_centering"):
        try:
            module = import_module(f"miles.backends.training_utils.{home}")
            module.selected_log_probs_and_entropy  # noqa: B018
            return module
        except (ImportError, AttributeError):
            continue
    pytest.skip("this Miles has no native score centering")


def native_loss(
    problem: double.Problem,
    args: Any,
    mode: str,
    support: bool,
    leaf: torch.Tensor | None = None,
    chunk_size: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Native score centering with Miles' reducer: loss, and gradient over the packed row.

    Sample by sample on slices of the logits, as Miles does it: nothing of their size is joined or copied here.
    ``chunk_size`` is its ``log_probs_chunk_size``.
    """
    state = double.single()
    double.install(state)
    module = native()
    leaf = packed(problem, args) if leaf is None else leaf
    batch = double.make_batch(problem, args, state, "dense" if support else "heads")
    starts = torch.tensor([0, *problem.totals]).cumsum(0)
    rows = [
        leaf[0, s + p - 1 : s + p - 1 + r]
        for s, p, r in zip(starts[:-1], problem.prompts, problem.responses, strict=True)
    ]
    width = max(ids.shape[1] for ids in batch["rollout_topk_token_ids"])
    pad = lambda x, value: torch.nn.functional.pad(torch.from_numpy(x), (0, width - x.shape[1]), value=value)
    ids = torch.cat([pad(x, -1) for x in batch["rollout_topk_token_ids"]]).long()
    head = torch.cat([pad(x, -torch.inf) for x in batch["rollout_topk_log_probs"]])
    active = torch.cat(problem.masks).bool()
    sampled = torch.cat([t[p:] for t, p in zip(problem.tokens, problem.prompts, strict=True)])
    wanted = torch.cat([sampled[:, None], ids], 1).split(problem.responses)
    options = {"temperature": args.rollout_temperature, "sampling_support": support, "chunk_size": chunk_size}
    score = module.selected_log_probs_and_entropy
    scored = torch.cat([score(part, own, **options)[0] for part, own in zip(rows, wanted, strict=True)])
    columns = (
        scored[:, 0],
        scored[:, 1:],
        torch.where(active, torch.cat(batch["rollout_log_probs"]), 0.0).to(scored.dtype),
        head.to(scored.dtype),
        (ids >= 0) & active[:, None],
        torch.where(active, torch.cat(batch["advantages"]), 0.0).to(scored.dtype),
    )
    if "mode" in module.ScoreCenteringInputs.__dataclass_fields__:
        token_loss, _ = module.score_centering_loss(module.ScoreCenteringInputs(*columns, mode=mode))
    else:
        token_loss, _ = module.score_centering_loss(module.ScoreCenteringInputs(*columns), mode=mode)
    loss = double.make_reducer(batch, args, state, problem)(token_loss)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def packed(problem: double.Problem, args: Any) -> torch.Tensor:
    return double.local_logits(problem, problem.logits, args, double.single()).clone().requires_grad_()


def ours(
    problem: double.Problem, args: Any, candidates: str, leaf: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    state = double.single()
    double.install(state)
    leaf = packed(problem, args) if leaf is None else leaf
    batch = double.make_batch(problem, args, state, candidates)
    loss, _ = policy_loss(args, batch, leaf, double.make_reducer(batch, args, state, problem))
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
@pytest.mark.parametrize("support", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_native_score_centering_agrees(mode: str, support: bool, per_token: bool) -> None:
    """Rows whose tails exceed 1e-2: gradient to 1e-6, loss to 1e-5.

    On a whole support the native loss carries −Σ p log p besides, with p constant, which has no gradient.
    """
    problem = double.make_problem(seed=5, dtype=torch.float32, head=4)
    own = {"correction": named(mode), "candidates": "supports" if support else "heads"}
    filters = {"rollout_top_p": 0.9, "rollout_top_k": 6} if support else {}
    args = double.make_args(offpolicy_corr=own, calculate_per_token_loss=per_token, **filters)
    tails = torch.cat([1 - torch.from_numpy(x).double().exp().sum(1) for x in problem.head_logprobs])
    assert float(tails[torch.cat(problem.masks).bool()].min()) > 1e-2
    got = ours(problem, args, "dense" if support else "heads")
    want = native_loss(problem, args, mode, support)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)
    assert float(want[1].abs().max()) > 1e-2
    if not support:
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)


def named(mode: str) -> str:
    return "sc" if mode == "none" else f"sc+{mode}"


@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
def test_where_tails_are_thin_ours_stays_with_fp64(mode: str) -> None:
    """Peaked policies with tails down to 1e-6: distances of both to fp64, printed; ours is never the larger by far."""
    problem = double.make_problem(seed=6, dtype=torch.float32, head=6, noise=0.3)
    for logits in problem.logits:
        logits.mul_(4.0)
    correction = oc.Correction.from_name(named(mode))
    args = double.make_args(offpolicy_corr={"correction": named(mode)})
    _, want, _ = double.expected(problem, args, correction=correction)
    reference = torch.cat(want)

    def distance(gradient: torch.Tensor) -> float:
        return float((gradient[0, : len(reference)].double() - reference).abs().max() / reference.abs().max())

    mine = distance(ours(problem, args, "heads")[1])
    native_distance = distance(native_loss(problem, args, mode, False)[1])
    print(f"{mode}: relative distance to fp64, ours {mine:.1e}, native {native_distance:.1e}")
    assert mine < 1e-4
    assert mine <= max(native_distance * 2, 1e-6)


@pytest.mark.parametrize("vocab, head", [(2**15, 64), (151_936, 128)])
def test_time_and_peak_memory_beside_native(vocab: int, head: int) -> None:
    """fp32 logits, as Megatron hands them to a custom loss. Printed; ours needs less memory whatever the machine.

    Native at both of its settings: unchunked, and in chunks of 128 rows, its smallest peak.
    """
    problem = double.make_problem(
        seed=7, prompts=(64,), responses=(960,), vocab=vocab, head=head, dtype=torch.float32
    )
    args = double.make_args()
    in_place = double.make_args(offpolicy_corr={"inplace_logits": True})
    runs: dict[str, Callable[[torch.Tensor], Any]] = {
        "native": lambda leaf: native_loss(problem, args, "mis", False, leaf),
        "native, chunks of 128": lambda leaf: native_loss(problem, args, "mis", False, leaf, 128),
        "ours": lambda leaf: ours(problem, args, "heads", leaf),
        "ours, in place": lambda leaf: ours(problem, in_place, "heads", leaf),
    }
    size = packed(problem, args).untyped_storage().nbytes()
    peaks, seconds = {}, {}
    for name, run in runs.items():
        run(packed(problem, args))
        times = []
        for _ in range(3):
            leaf = packed(problem, args)
            start = time.perf_counter()
            run(leaf)
            times.append(time.perf_counter() - start)
        seconds[name] = min(times)
        leaf = packed(problem, args)
        with Live() as live:
            run(leaf)
        peaks[name] = live.peak / size
        print(f"{name}: {seconds[name]:.3f} s, peak {peaks[name]:.2f} times the logits, the logits included")
    assert peaks["ours, in place"] < peaks["ours"] < min(peaks["native"], peaks["native, chunks of 128"])
