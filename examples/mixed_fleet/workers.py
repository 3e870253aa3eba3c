"""Arms in processes of their own, each on one thread."""

from __future__ import annotations

import io
import multiprocessing
import queue
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import torch

from .experiments import Plan
from .progress import Progress
from .report import Results
from .train import History, run_arm


def run_job(plan: Plan, experiment: int, arm: int, seed: int, weights: bytes, ticks: Any) -> History:
    """One arm with one seed, on one thread; puts (steps, text) into the queue `ticks`."""
    torch.set_num_threads(1)
    chosen = plan.experiments[experiment]
    text = f"{chosen.name}: {chosen.arms[arm].name}"
    state = torch.load(io.BytesIO(weights), weights_only=True)

    def tick(steps: int) -> None:
        ticks.put((steps, text))

    return run_arm(chosen.arms[arm], chosen.budget, plan.task, state, seed, tick)


def run_all(plan: Plan, weights: bytes, jobs: int, progress: Progress) -> Results:
    """Run every arm with every seed, `jobs` at a time."""
    context = multiprocessing.get_context("spawn")
    futures: dict[tuple[str, str, int], Future[History]] = {}
    with context.Manager() as manager, ProcessPoolExecutor(jobs, mp_context=context) as pool:
        ticks = manager.Queue()
        for e, experiment in enumerate(plan.experiments):
            for seed in experiment.seeds:
                for a, arm in enumerate(experiment.arms):
                    key = (experiment.name, arm.name, seed)
                    futures[key] = pool.submit(run_job, plan, e, a, seed, weights, ticks)
        while not all(future.done() for future in futures.values()):
            if any(future.done() and future.exception() for future in futures.values()):
                pool.shutdown(cancel_futures=True)
                break
            try:
                progress.advance(*ticks.get(timeout=0.5))
            except queue.Empty:
                continue
    results: Results = {experiment.name: {} for experiment in plan.experiments}
    for (experiment_name, arm_name, _), future in futures.items():
        results[experiment_name].setdefault(arm_name, []).append(future.result())
    return results
