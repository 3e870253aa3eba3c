"""Run the demo: `python -m examples.mixed_fleet`, from the repository's root.

QUICK=1 in the environment, or --quick, makes a shorter run.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import sys
import time
from pathlib import Path

import torch

from . import figure, report
from .experiments import make_plan
from .progress import Progress
from .train import warm_up
from .workers import run_all

WARMUP_STEP = 0.15
"""Time of a supervised step, in reinforcement-learning updates, for the progress bar."""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.mixed_fleet", description=__doc__)
    quick = os.environ.get("QUICK", "0") not in ("", "0")
    parser.add_argument("--quick", action="store_true", default=quick, help="a shorter run (also QUICK=1)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/mixed_fleet"), help="folder for the PNG and the JSON"
    )
    parser.add_argument("--jobs", type=int, default=2, help="arms at a time, one thread each (default 2)")
    return parser.parse_args()


def main() -> None:
    """Warm up, run both experiments, report."""
    arguments, began = parse_arguments(), time.monotonic()
    plan = make_plan(arguments.quick)
    arguments.out.mkdir(parents=True, exist_ok=True)
    updates = sum(e.budget.steps * len(e.arms) * len(e.seeds) for e in plan.experiments)
    progress = Progress(WARMUP_STEP * plan.warmup.steps + updates)
    try:
        progress.say(f"warm-up of {plan.warmup.steps} steps, then a line per arm as it ends")
        torch.set_num_threads(1)  # more are of little use to a model this small, and slow on a busy machine
        model = warm_up(plan.task, plan.warmup, 0, lambda n: progress.advance(WARMUP_STEP * n, "warm-up"))
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        results = run_all(plan, buffer.getvalue(), arguments.jobs, progress)
    finally:
        progress.close()
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    run = {
        "command": " ".join(["python -m examples.mixed_fleet", *sys.argv[1:]]),
        "quick": arguments.quick,
        "wall_seconds": time.monotonic() - began,
        "cpu_seconds": sum(u.ru_utime + u.ru_stime for u in usage),
    }
    report.print_report(plan, results)
    report.write_json(arguments.out / "mixed_fleet.json", plan, results, run)
    figure.save(arguments.out / "mixed_fleet.png", plan, results)
    print(f"\n{run['wall_seconds']:.0f} s, {run['cpu_seconds']:.0f} s of processor time")
    print(f"written: {arguments.out / 'mixed_fleet.png'} and {arguments.out / 'mixed_fleet.json'}")


if __name__ == "__main__":
    main()
