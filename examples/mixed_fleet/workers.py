"""Arms in processes of their own, each on one thread."""

from __future__ import annotations

import contextlib
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

Key = tuple[str, str, int]
"""Experiment, arm and seed."""


def run_job(plan: Plan, experiment: int, arm: int, seed: int, weights: bytes, ticks: Any) -> History:
    """One arm with one seed, on one thread; puts (steps, text) into the queue `ticks`."""
    torch.set_num_threads(1)
    settings = plan.experiments[experiment]
    text = f"{settings.name}: {settings.arms[arm].name}"
    state = torch.load(io.BytesIO(weights), weights_only=True)

    def tick(steps: int) -> None:
        ticks.put((steps, text))

    return run_arm(settings.arms[arm], settings.budget, plan.task, state, seed, tick)


def run_all(plan: Plan, weights: bytes, jobs: int, progress: Progress) -> Results:
    """Run every arm with every seed, `jobs` at a time; say which one ended, and with what reward."""
    context = multiprocessing.get_context("spawn")
    futures: dict[Key, Future[History]] = {}
    with context.Manager() as manager, ProcessPoolExecutor(jobs, mp_context=context) as pool:
        ticks = manager.Queue()
        for e, experiment in enumerate(plan.experiments):
            for seed in experiment.seeds:
                for a, arm in enumerate(experiment.arms):
                    key = (experiment.name, arm.name, seed)
                    futures[key] = pool.submit(run_job, plan, e, a, seed, weights, ticks)
        running = dict(futures)
        while running:
            with contextlib.suppress(queue.Empty):
                progress.advance(*ticks.get(timeout=0.5))
            for key in [key for key, future in running.items() if future.done()]:
                future = running.pop(key)
                if future.exception() is not None:
                    pool.shutdown(cancel_futures=True)
                    running.clear()
                    break
                progress.say(finished(key, future.result()))
    results: Results = {experiment.name: {} for experiment in plan.experiments}
    for (experiment_name, arm_name, _), future in futures.items():
        results[experiment_name].setdefault(arm_name, []).append(future.result())
    return results


def finished(key: Key, history: History) -> str:
    """One line about an arm that ended."""
    experiment, arm, seed = key
    first, last = history.evaluations[0], history.evaluations[-1]
    run = f"{experiment}, seed {seed}: {arm}"
    return f"{run:<40} reward {first['reward']:.2f} > {last['reward']:.2f}, {len(history.updates)} updates"
