"""Benchmark rows as a table, JSON, CSV, or a picture."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import platform
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
    return found


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """A rich table where rich is installed, aligned text otherwise."""
    if not rows:
        return
    columns = list(rows[0])
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
        print(title)
        for line in [columns, *cells]:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(*columns, title=title, box=box.SIMPLE, title_justify="left")
    for line in cells:
        table.add_row(*line)
    console = Console()
    # a pipe has no width; a table cut to 80 columns would lose its numbers
    (console if console.is_terminal else Console(width=200)).print(table)


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
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def plot(rows: Sequence[dict[str, Any]], path: Path, value: str, unit: str) -> None:
    """Bars of ``value`` by implementation, one panel per shape. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys((r["op"], r["N"], r["V"], r["K"]) for r in rows))
    figure, axes = pyplot.subplots(len(shapes), 1, figsize=(8, 1.2 + 1.8 * len(shapes)), squeeze=False)
    for axis, shape in zip(axes[:, 0], shapes, strict=True):
        here = [r for r in rows if (r["op"], r["N"], r["V"], r["K"]) == shape and r[value] is not None]
        names = [r["impl"] for r in here]
        bars = axis.barh(
            names, [r[value] for r in here], color=["C0" if "ours" in n else "0.7" for n in names]
        )
        axis.bar_label(bars, fmt="%.3g", padding=3)
        axis.set_title(f"{shape[0]}: {shape[1]} × {shape[2]}, K = {shape[3]}", loc="left", fontsize=9)
        axis.set_xlabel(unit)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
