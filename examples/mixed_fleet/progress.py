"""How far the run is: a bar on a terminal, a line per finished arm anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """A bar where standard output is a terminal and rich is installed, else lines of text."""

    def __init__(self, total: float) -> None:
        self.done, self.total, self.began = 0.0, total, time.monotonic()
        self.bar: Any = None
        if not sys.stdout.isatty():
            return
        try:
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        self.bar = Bar(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self.task = self.bar.add_task("starting", total=total)
        self.bar.start()

    def advance(self, steps: float, text: str) -> None:
        """Count steps as done and say what they were."""
        self.done += steps
        if self.bar is not None:
            self.bar.update(self.task, advance=steps, description=f"{text:<30}")

    def say(self, text: str) -> None:
        """A line about something that began or ended; a bar shows it by itself."""
        if self.bar is None:
            seconds = time.monotonic() - self.began
            print(f"{100 * self.done / self.total:3.0f} %  {seconds:4.0f} s  {text}", flush=True)

    def close(self) -> None:
        """Stop drawing."""
        if self.bar is not None:
            self.bar.stop()
