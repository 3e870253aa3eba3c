"""Benchmark: rows as a table, JSON, CSV, or a picture."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, str]:
    """Machine, versions and command: what a number means nothing without."""
    found = {
        "command": " ".join(["python -m offpolicy_corr.benchmarks.kernels", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
    }
    for name in ("offpolicy-corr", "triton", "liger-kernel", "cut-cross-entropy", "quack-kernels"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["driver"] = _driver()
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.splitlines()[0].strip() if done.stdout else "unknown"


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """A rich table where rich is installed, aligned text otherwise."""
    if not rows:
        return
    columns = [c for c in _columns(rows) if any(row.get(c) is not None for row in rows)]
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        for line in [columns, *cells]:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for line in cells:
        table.add_row(*line)
    # cut to the width of a terminal, or of a pipe, which has none, the table would lose its numbers
    needed = sum(widths) + 3 * len(widths) + 4
    Console(width=max(Console().width, needed)).print(table)


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(
    document: dict[str, Any], rows: Sequence[dict[str, Any]], json_to: Path | None, csv_to: Path | None
) -> None:
    """Write the whole document as JSON and the rows as CSV, where files are named."""
    if json_to is not None:
        json_to.write_text(json.dumps(document, indent=1) + "\n")
    if csv_to is not None and rows:
        with csv_to.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, _columns(rows))
            writer.writeheader()
            writer.writerows(rows)


def plot(rows: Sequence[dict[str, Any]], path: Path, value: str, unit: str) -> None:
    """Bars of ``value`` by implementation, one panel per shape. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.get(value) is not None]
    if not rows:
        return
    shapes = list(dict.fromkeys((r["op"], r["N"], r["V"], r["K"], r.get("dtype", "")) for r in rows))
    figure, axes = pyplot.subplots(len(shapes), 1, figsize=(8, 1.2 + 1.8 * len(shapes)), squeeze=False)
    for axis, shape in zip(axes[:, 0], shapes, strict=True):
        here = [r for r in rows if (r["op"], r["N"], r["V"], r["K"], r.get("dtype", "")) == shape]
        names = [r["impl"] for r in here]
        bars = axis.barh(
            names, [r[value] for r in here], color=["C0" if "ours" in n else "0.7" for n in names]
        )
        axis.bar_label(bars, fmt="%.3g", padding=3)
        axis.set_title(
            f"{shape[0]}: {shape[1]} × {shape[2]} {shape[4]}, K = {shape[3]}", loc="left", fontsize=9
        )
        axis.set_xlabel(unit)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
