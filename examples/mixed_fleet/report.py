"""What the demo shows: the numbers of every arm, as tables and as JSON."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .experiments import Experiment, Plan
from .train import History

TABLE_WIDTH = 116

Results = dict[str, dict[str, list[History]]]
"""Histories by experiment and arm, one for each seed."""


def mean(values: list[float]) -> float:
    """Arithmetic mean of the finite values; NaN of none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def window(history: History, name: str, begin: float, end: float) -> float:
    """Mean of one number over the updates from a fraction `begin` to a fraction `end` of the run."""
    count = len(history.updates)
    rows = history.updates[int(begin * count) : max(int(end * count), int(begin * count) + 1)]
    return mean([row[name] for row in rows])


def growth(early: float, late: float) -> float:
    """How many times its early value a number has become; NaN where it started at about zero."""
    return late / early if early > 1e-6 else math.nan


def describe(history: History) -> dict[str, float]:
    """One run in a dozen numbers. *Early* is the first tenth of the updates, *late* the last fifth.

    The three signs of a collapse are `reward` falling from its best, `kl_growth` (late over early) and
    `format_errors`, the worst share of responses that broke the format at any evaluation.
    """
    rewards = [row["reward"] for row in history.evaluations]
    last = history.evaluations[-max(1, len(rewards) // 5) :]
    kl_early, kl_late = window(history, "kl_k3", 0.0, 0.1), window(history, "kl_k3", 0.8, 1.0)
    norm_early = window(history, "gradient_norm", 0.0, 0.1)
    return {
        "reward_first": rewards[0],
        "reward_best": max(rewards),
        "reward_lowest": min(rewards[len(rewards) // 4 :]),
        "reward_late": mean([row["reward"] for row in last]),
        "format_errors": max(row["format_errors"] for row in history.evaluations),
        "entropy_first": history.evaluations[0]["entropy"],
        "entropy_late": mean([row["entropy"] for row in last]),
        "moved": history.evaluations[-1]["moved"],
        "kl_early": kl_early,
        "kl_mean": window(history, "kl_k3", 0.0, 1.0),
        "kl_peak": max(
            mean([row["kl_k3"] for row in history.updates[i : i + 10]])
            for i in range(0, len(history.updates), 10)
        ),
        "kl_growth": growth(kl_early, kl_late),
        "gradient_norm_early": norm_early,
        "gradient_norm_growth": growth(norm_early, window(history, "gradient_norm", 0.8, 1.0)),
        "gradient_norm_peak": growth(norm_early, max(row["gradient_norm"] for row in history.updates)),
        "out_of_band": window(history, "out_of_band", 0.0, 1.0),
        "masked": 1 - window(history, "kept", 0.0, 1.0),
    }


def describe_arm(histories: list[History]) -> dict[str, float]:
    """`describe`, averaged over seeds; the extremes are those of all seeds."""
    runs = [describe(history) for history in histories]
    extreme = {
        "reward_best": max,
        "reward_lowest": min,
        "format_errors": max,
        "kl_peak": max,
        "gradient_norm_peak": max,
    }
    return {name: extreme.get(name, mean)([run[name] for run in runs]) for name in runs[0]}


def group_totals(histories: list[History]) -> dict[str, dict[str, float]]:
    """For each sampler group of one arm, over all seeds: shares of tokens and out-of-band tokens, rates."""
    sums: dict[str, dict[str, float]] = {}
    for history in histories:
        for group, totals in history.groups.items():
            entry = sums.setdefault(group, dict.fromkeys(totals, 0.0))
            for name, value in totals.items():
                entry[name] += value
    tokens = sum(entry["tokens"] for entry in sums.values())
    out_of_band = sum(entry["out_of_band"] for entry in sums.values())
    return {
        group: {
            "token_share": entry["tokens"] / tokens,
            "out_of_band_share": entry["out_of_band"] / out_of_band if out_of_band else math.nan,
            "out_of_band": entry["out_of_band"] / entry["tokens"],
            "kl_k3": entry["kl_k3"] / entry["tokens"],
        }
        for group, entry in sums.items()
    }


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table, through rich where it is installed."""
    if importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", title_style="bold")
        for column, name in enumerate(header):
            table.add_column(name, justify="left" if column == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        Console(width=max(Console().width, TABLE_WIDTH)).print(table)
        return
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    print(f"\n{title}")
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells))


def _percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def _times(value: float) -> str:
    return f"{value:.1f} x" if math.isfinite(value) else "-"


def drift_rows(arms: dict[str, list[History]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the drift table."""
    header = ["arm", "reward", "bad format", "entropy", "moved, nats", "KL growth", "grad norm", "outside"]
    rows = []
    for arm, histories in arms.items():
        d = describe_arm(histories)
        rows.append(
            [
                arm,
                f"{d['reward_first']:.2f} > {d['reward_late']:.2f}",
                _percent(d["format_errors"]),
                f"{d['entropy_first']:.2f} > {d['entropy_late']:.2f}",
                f"{d['moved']:.3f}",
                _times(d["kl_growth"]),
                _times(d["gradient_norm_peak"]),
                _percent(d["out_of_band"], 2),
            ]
        )
    return header, rows


def learning_rows(arms: dict[str, list[History]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the learning table."""
    header = [
        "arm",
        "reward",
        "by seed",
        "lowest",
        "bad format",
        "KL",
        "peak KL",
        "grad norm",
        "outside",
        "masked",
    ]
    rows = []
    for arm, histories in arms.items():
        d = describe_arm(histories)
        rows.append(
            [
                arm,
                f"{d['reward_late']:.3f}",
                " ".join(f"{describe(history)['reward_late']:.2f}" for history in histories),
                f"{d['reward_lowest']:.2f}",
                _percent(d["format_errors"], 1),
                f"{d['kl_mean']:.4f}",
                f"{d['kl_peak']:.3f}",
                _times(d["gradient_norm_growth"]),
                _percent(d["out_of_band"], 2),
                _percent(d["masked"], 2),
            ]
        )
    return header, rows


def group_rows(
    experiment: Experiment, arms: dict[str, list[History]], shown: tuple[str, ...]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of sampler groups, for the arms `shown`."""
    header = ["group", "precision", "lag", "tokens"]
    totals = {arm: group_totals(arms[arm]) for arm in shown}
    for arm in shown:
        header += [f"{arm}: of all", "rate"]
    rows = []
    for group in next(arm.groups for arm in experiment.arms if arm.name == shown[0]):
        row = [
            group.name,
            group.precision,
            str(group.lag),
            _percent(totals[shown[0]][group.name]["token_share"]),
        ]
        for arm in shown:
            entry = totals[arm][group.name]
            row += [_percent(entry["out_of_band_share"]), _percent(entry["out_of_band"], 2)]
        rows.append(row)
    return header, rows


GROUPS_SHOWN = ("GRPO", "SC + MIS")
"""Arms whose sampler groups are reported: one that suffers from the mismatch, and one that holds it."""


DRIFT_NOTE = """\
reward, entropy: before > last fifth of the run. bad format: worst evaluation. moved: KL of the trained
policy from the initial one. KL growth: last fifth over first tenth. grad norm: peak over the mean of the
first tenth. outside: tokens with a ratio outside [0.2, 5].
"""
LEARNING_NOTE = """\
reward: last fifth. lowest: of all evaluations but the first quarter. bad format: worst evaluation.
KL: sampler from trainer, k3, nats per token (top-p: over the recorded set). peak KL: worst ten updates.
grad norm: last fifth over first tenth. masked: tokens of weight zero.
"""
GROUPS_NOTE = (
    "of all: the group's part of all tokens with a ratio outside [0.2, 5]. rate: of its own tokens.\n"
)


def print_report(plan: Plan, results: Results) -> None:
    """Print the three tables and how to read them."""
    drift, learning = plan.experiments
    print_table(f"{drift.title} ({drift.budget.steps} updates)", *drift_rows(results["drift"]))
    print(DRIFT_NOTE)
    seeds = "1 seed" if len(learning.seeds) == 1 else f"{len(learning.seeds)} seeds"
    print_table(
        f"{learning.title} ({learning.budget.steps} updates, {seeds})", *learning_rows(results["learning"])
    )
    print(LEARNING_NOTE)
    rows = group_rows(learning, results["learning"], GROUPS_SHOWN)
    print_table("Where out-of-band tokens come from (learning)", *rows)
    print(GROUPS_NOTE)


def _rounded(value: Any) -> Any:
    """Six significant digits, and null for what is not finite, so that the file is valid JSON."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def machine() -> dict[str, Any]:
    """The machine and the versions of what computed the results."""
    model = ""
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    packages = ("torch", "transformers", "offpolicy-corr", "matplotlib")
    versions = {
        name: importlib.metadata.version(name)
        for name in packages
        if importlib.util.find_spec(name.replace("-", "_")) is not None
    }
    return {
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def write_json(path: Path, plan: Plan, results: Results, run: dict[str, Any]) -> None:
    """Write settings, machine and every curve. `run` holds the command and the times."""
    data = {
        "run": run,
        "machine": machine(),
        "plan": asdict(plan),
        "summary": {
            name: {arm: describe_arm(histories) for arm, histories in arms.items()}
            for name, arms in results.items()
        },
        "groups": {arm: group_totals(histories) for arm, histories in results["learning"].items()},
        "curves": {
            name: {arm: [asdict(history) for history in histories] for arm, histories in arms.items()}
            for name, arms in results.items()
        },
    }
    path.write_text(json.dumps(_rounded(data)) + "\n")
