"""A progress bar that needs nothing installed."""

from __future__ import annotations

import time
from typing import Any


class Progress:
    """A progress bar with a line of text: rich where it is installed, else a plain line every twentieth."""

    def __init__(self, total: float) -> None:
        self.done, self.total, self.began = 0.0, total, time.monotonic()
        self.bar: Any = None
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
        before, self.done = self.done, self.done + steps
        if self.bar is not None:
            self.bar.update(self.task, advance=steps, description=f"{text:<30}")
        elif 20 * before // self.total != 20 * self.done // self.total:
            seconds = time.monotonic() - self.began
            print(f"{100 * self.done / self.total:3.0f} %  {seconds:4.0f} s  {text}", flush=True)

    def close(self) -> None:
        """Stop drawing."""
        if self.bar is not None:
            self.bar.stop()
