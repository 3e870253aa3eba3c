"""Command: the console script, ``offpolicy-corr bench …`` and ``offpolicy-corr miles check …``."""

from __future__ import annotations

import importlib
import sys

_USAGE = """usage: offpolicy-corr bench [--cpu | --static] [options]   kernel microbenchmarks on this machine
       offpolicy-corr miles check CONFIG [launch arguments] check a Miles configuration before it is launched
       offpolicy-corr --version

`offpolicy-corr bench --help` lists the options."""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["bench"]:
        on_cpu = "--cpu" in words
        rest = [word for word in words[1:] if word != "--cpu"]
        return _run(
            "offpolicy_corr.benchmarks.cpu" if on_cpu else "offpolicy_corr.benchmarks.kernels", "main", rest
        )
    if words[:2] == ["miles", "check"]:
        return _run("offpolicy_corr.integrations.miles.check", "check_main", words[2:])
    if words == ["--version"]:
        from . import __version__

        print(f"offpolicy-corr {__version__}")
        return 0
    asked = words in (["--help"], ["-h"])
    print(_USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _run(module: str, function: str, argv: list[str]) -> int:
    status: int = getattr(importlib.import_module(module), function)(argv)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
