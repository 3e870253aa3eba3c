"""Threads of the CPU's row passes: what they compute, and that they leave nothing changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from offpolicy_corr.benchmarks import cpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import offpolicy_corr as oc
from offpolicy_corr import lm_head_on_supports, threads, torch_loss
from offpolicy_corr.row_passes import RowBlock
from offpolicy_corr.threads import MAX_WORKERS, Workers, one_intra_op_thread
from offpolicy_corr.weights import WeightRule
from support import ENTRANCES, Problem, gradient_through

COUNTS = (1, 2, 3, 5)


@pytest.fixture(autouse=True)
def two_intra_op_threads() -> Iterator[None]:
    """Every test starts with 2 and must leave 2, in this thread and in those that start after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
        assert torch.get_num_threads() == 2
        assert in_new_thread(torch.get_num_threads) == 2
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_loss, "_TILE_ON_CPU", 1)
    monkeypatch.setattr(lm_head_on_supports, "_TILE", 1)


def in_new_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def with_threads(count: int, call: Callable[[], Any]) -> Any:
    """``call()`` in a thread of its own whose operations have ``count`` intra-op threads."""

    def limited() -> Any:
        torch.get_num_threads()
        setters = threads._thread_setters()
        assert setters is not None, "this machine's torch has no OpenMP: the passes run in the caller"
        setters.openmp(count)
        setters.mkl(count)
        assert torch.get_num_threads() == count
        return call()

    return in_new_thread(limited)


def bits(out: oc.PolicyLoss, gradient: Tensor) -> list[Tensor]:
    return [out.loss.detach(), gradient, *vars(out.diagnostics).values()]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("reduction", ["token-mean", "none"])
def test_the_bits_of_a_result_do_not_depend_on_the_number_of_threads(
    entrance: str, dtype: torch.dtype, reduction: str
) -> None:
    problem = Problem(size=9, vocab=33, seed=3)
    mask = torch.arange(9) % 4 != 0
    options = {"loss_mask": mask, "entropy_coef": 0.1, "reduction": reduction}
    call = lambda: gradient_through(
        entrance, problem.logits.to(dtype), problem.record(), problem.advantages, **options
    )
    expected = bits(*with_threads(1, call))
    for count in COUNTS[1:]:
        for ours, reference in zip(bits(*with_threads(count, call)), expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("entrance", ["logits", "inplace", "logprobs"])
def test_rows_that_intra_op_threads_would_divide_give_the_same_bits(entrance: str, rows: int) -> None:
    """PyTorch sums a single long row in as many parts as there are intra-op threads."""
    problem = Problem(size=rows, vocab=200_003, dtype=torch.float32, seed=1, kind="head")
    call = lambda: gradient_through(
        entrance, problem.logits, problem.record(), problem.advantages, entropy_coef=0.1
    )
    row = problem.logits[:1]
    divided = [with_threads(count, lambda: torch.linalg.vecdot(row.exp(), row)) for count in COUNTS]
    assert len({float(total) for total in divided}) > 1, "the input does not show what this test is about"
    expected = bits(*with_threads(1, call))
    for count in COUNTS[1:]:
        for ours, reference in zip(bits(*with_threads(count, call)), expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", ["head", "support"])
def test_tiles_run_in_threads_of_one_intra_op_thread_each(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    seen: list[tuple[int, int]] = []
    run = Workers.run

    def spying(self: Workers, function: Callable[[int, Any], None], items: Any) -> None:
        def spied(worker: int, item: Any) -> None:
            seen.append((threading.get_ident(), torch.get_num_threads()))
            function(worker, item)

        run(self, spied, items)

    monkeypatch.setattr(Workers, "run", spying)
    problem = Problem(kind=kind)
    for entrance in ENTRANCES:
        seen.clear()
        gradient_through(entrance, problem.logits, problem.record(), problem.advantages)
        assert seen
        assert {count for _, count in seen} == {1}
        assert threading.get_ident() not in {thread for thread, _ in seen}


def test_two_workers_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=60.0)
    with Workers(2) as workers:
        workers.run(lambda worker, item: both.wait() and None, [0, 1])


@pytest.mark.usefixtures("small_tiles")
def test_a_users_rule_is_called_in_the_calling_thread() -> None:
    problem, calls = Problem(kind="head"), []
    rule = type("Rule", (oc.Unweighted,), {"weight": watched(calls)})()
    gradient_through(
        "logits", problem.logits, problem.record(), problem.advantages, correction=oc.Correction(rule)
    )
    assert calls
    assert set(calls) == {threading.get_ident()}


def watched(calls: list[int]) -> Callable[..., Tensor]:
    def weight(self: WeightRule, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        calls.append(threading.get_ident())
        return torch.ones_like(log_ratio)

    return weight


def test_another_threads_number_stays_while_the_passes_run() -> None:
    def look(worker: int, item: int) -> None:
        assert torch.get_num_threads() == 1
        assert in_new_thread(torch.get_num_threads) == 2
        old.append(torch.get_num_threads())

    old: list[int] = []
    with ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == 2
        with Workers(3) as workers:
            workers.run(look, list(range(6)))
            assert other.submit(torch.get_num_threads).result() == 2
    assert len(old) == 6


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_item_that_fails_is_named_whichever_thread_is_faster(count: int) -> None:
    def fail(worker: int, item: int) -> None:
        if item == 4:
            time.sleep(0.05)
        if item >= 4:
            raise ValueError(f"item {item}")

    for _ in range(5):
        with pytest.raises(ValueError, match="item 4"), Workers(count) as workers:
            workers.run(fail, list(range(12)))
        assert torch.get_num_threads() == 2


def test_an_interrupt_is_raised_when_no_thread_works_any_more() -> None:
    begun: list[int] = []
    ended: list[int] = []

    def slow(worker: int, item: int) -> None:
        begun.append(item)
        if item == 0:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        ended.append(item)

    with pytest.raises(KeyboardInterrupt), Workers(2) as workers:
        try:
            workers.run(slow, list(range(50)))
        finally:
            assert len(begun) < 50
            assert sorted(begun) == sorted(ended)


@pytest.mark.usefixtures("small_tiles")
def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    problems = [Problem(size=8, vocab=60, seed=seed) for seed in range(6)]
    call = lambda problem: bits(
        *gradient_through("logits", problem.logits, problem.record(), problem.advantages, entropy_coef=0.1)
    )
    expected = [call(problem) for problem in problems]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            for ours, reference in zip(pool.map(call, problems), expected, strict=True):
                for a, b in zip(ours, reference, strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert set(pool.map(lambda _: torch.get_num_threads(), range(30))) == {2}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("inplace", [False, True])
def test_inference_mode_holds_in_the_threads(inplace: bool) -> None:
    problem = Problem(size=6, vocab=33)
    with torch.inference_mode():
        logits = problem.logits.clone()
        out = oc.policy_loss(logits, problem.record(), problem.advantages, inplace=inplace)
        logp, _, _ = oc.selected_logprobs(logits, problem.tokens, problem.candidates, problem.temperature)
    reference = oc.policy_loss(problem.logits, problem.record(), problem.advantages)
    torch.testing.assert_close(out.loss, reference.loss, rtol=0, atol=0)
    torch.testing.assert_close(logp, reference.diagnostics.logprobs, rtol=0, atol=0)


class Operations(TorchDispatchMode):
    """How often each operation was dispatched in the thread that entered the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_dispatch_mode_sees_every_operation(entrance: str) -> None:
    def call() -> Counter[str]:
        problem = Problem()
        with Operations() as operations:
            gradient_through(entrance, problem.logits, problem.record(), problem.advantages)
        return operations.seen

    alone = with_threads(1, call)
    assert alone["aten.exp.out"] >= 3
    assert with_threads(4, call) == alone


def test_subclasses_and_single_tiles_stay_in_the_calling_thread() -> None:
    class Named(Tensor):
        pass

    logits = torch.zeros(4, 4)
    assert Workers.for_tiles(logits, 9).count == 2
    assert Workers.for_tiles(logits, 1).count == 1
    assert Workers.for_tiles(logits.as_subclass(Named), 9).count == 1
    assert Workers.for_tiles(logits.to("meta"), 9).count == 1
    with one_intra_op_thread():
        assert Workers.for_tiles(logits, 9).count == 1
    with torch.device("cpu"):  # a default device changes no operation of the passes
        assert Workers.for_tiles(logits, 9).count == 2


def test_without_openmp_the_passes_run_in_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem()
    expected = gradient_through("logits", problem.logits, problem.record(), problem.advantages)
    monkeypatch.setattr(threads, "_thread_setters", lambda: None)
    monkeypatch.setattr(torch_loss, "_TILE_ON_CPU", 1)
    assert Workers.for_tiles(problem.logits, 9).count == 1
    again = gradient_through("logits", problem.logits, problem.record(), problem.advantages)
    torch.testing.assert_close(again[1], expected[1])


@pytest.mark.parametrize("count", [1, 2, 16, 64])
@pytest.mark.parametrize("vocab", [1_000, 151_936])
def test_scratch_memory_is_a_block_and_a_tile_per_worker(count: int, vocab: int) -> None:
    logits = torch.empty(1, dtype=torch.bfloat16).expand(4096, vocab)
    with Workers(min(count, MAX_WORKERS)) as workers:
        scratch = torch_loss.chunk_scratch(logits, workers)
    used = scratch.exps.nbytes + scratch.shifted.nbytes
    tile = max(torch_loss._TILE_ON_CPU, vocab)
    assert used <= 4 * (max(torch_loss._BLOCK_ON_CPU, vocab) + min(count, MAX_WORKERS) * tile)
    assert scratch.shifted.shape[0] == min(count, MAX_WORKERS)


FORKED = """
import os, signal, torch, offpolicy_corr as oc
from offpolicy_corr import torch_loss
torch_loss._TILE_ON_CPU = 1
torch.set_num_threads(2)
logits, advantages = torch.randn(3, 200_000), torch.ones(3)
record = oc.SamplerRecord(torch.arange(3), torch.full((3,), -12.0))
def gradient():
    leaf = logits.detach().requires_grad_()
    oc.policy_loss(leaf, record, advantages, correction="mis").loss.backward()
    return leaf.grad
expected = gradient()
(logits + 1).sum()  # the parent has OpenMP threads now
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if gradient().numpy().tobytes() == expected.numpy().tobytes() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.get_num_threads())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_the_passes_of_a_forked_process_do_not_wait_for_its_parents_threads() -> None:
    """A fork copies no thread, but OpenMP's memory of them: an operation that wants them waits for ever."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["0", "2"], done.stderr


@pytest.mark.usefixtures("small_tiles")
def test_a_failing_pass_leaves_no_thread_and_no_changed_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: RowBlock, worker: int, *_: Any) -> Tensor:
        raise MemoryError("no room for a tile")

    monkeypatch.setattr(RowBlock, "_shift", broken)
    problem, before = Problem(), threading.active_count()
    with pytest.raises(MemoryError, match="no room"):
        oc.policy_loss(problem.logits, problem.record(), problem.advantages)
    assert threading.active_count() == before


def test_busy_processes_run_in_the_block_and_not_after_it() -> None:
    with cpu.busy_processes(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert [process.poll() for process in processes] == [-signal.SIGKILL] * 2


def test_the_busy_benchmark_reports_every_variant_alone_and_beside_a_busy_process(tmp_path: Path) -> None:
    sizes = ["--tokens", "6", "--vocab", "300", "--k", "4", "--repeats", "1", "--threads", "2"]
    path = tmp_path / "busy.json"
    assert cpu.main([*sizes, "--dtype", "fp32", "--busy", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [row["variant"] for row in result["rows"]] == list(cpu.VARIANTS)
    for row in result["rows"]:
        assert row["busy_ratio"] == row["busy_seconds"] / row["seconds"]
    assert "--busy 1" in result["command"]
