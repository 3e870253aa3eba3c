"""Pages of documentation as tests run them: their Python blocks in order, in one namespace."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)


def text(page: str) -> str:
    """The page's source; ``page`` is its path in the repository."""
    return (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE)


def section(page: str, title: str) -> str:
    """The text below the heading ``## title``, up to the next one."""
    return text(page).split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


@cache
def run(page: str) -> tuple[dict[str, Any], str]:
    """Run the page's Python blocks; returns the names that they leave and what they printed."""
    names: dict[str, Any] = {"__name__": page}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        for number, block in enumerate(blocks(page, "python"), 1):
            exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names, printed.getvalue()
