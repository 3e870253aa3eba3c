"""Benchmark: the kernels, ``offpolicy-corr bench`` or ``python -m offpolicy_corr.benchmarks.kernels``.

On a GPU: loss and gradient of real model shapes, ours against PyTorch and against whatever peers are installed, as a
share of what this machine's own copy reaches. Forward and backward are timed together (some implementations do all
their work in forward), the L2 cache is flushed between runs, and logits that a step overwrites are restored outside
the timed region. GB/s and %copy count the floor, one read and one write of each logit, for everybody, so that they rank
implementations; B/logit is a model of what each one moves.

Without a GPU: ``--static`` compiles the kernels ahead of time and predicts from a roofline; ``offpolicy-corr bench
--cpu`` measures the PyTorch path and has options of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from offpolicy_corr.kernels import launch

from . import output, roofline, static
from .cases import DTYPES, Case, make_case, make_hidden_case
from .peers import ON_HIDDEN, ON_LOGITS, OnLogits, Skip
from .static import Figures
from .tile_choice import using_tiles
from .timing import Machine, OnGpu, OnHost, Rates, Timing, measure, timed

SHAPES = ((8192, 151_936), (8192, 248_320), (4096, 151_936), (32_768, 151_936), (65_536, 151_936))
SUPPORT = 128  # ids of the largest top-p set
BASELINES = ("eager", "compile", "liger", "quack", "quack-1read", "cce")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 where there is no GPU and none of the ways without one was asked for."""
    args = _arguments(argv)
    if args.static:
        return _static(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: take --static for figures from the compiler, or --cpu for the PyTorch path")
        return 2
    machine: Machine = OnGpu() if args.device == "cuda" else OnHost()
    repeats = min(10, machine.repeats) if args.quick else machine.repeats
    rates = measure(machine, repeats)
    print(f"copy {rates.copy:.0f} GB/s, bf16 matmul {rates.matmul:.0f} TFLOP/s, {_versions()}", flush=True)
    bench = _Bench(machine, rates, repeats, args)
    rows = list(bench.tiles() if args.tiles else bench.rows())
    if args.tiles:
        title = "ours in place, by tile configuration"
        _name_best(rows)
    else:
        title = "forward and backward together"
        _compare(rows)
    for op in dict.fromkeys(row["op"] for row in rows):
        output.print_table(f"{op}: {title}", [row for row in rows if row["op"] == op])
    document = {"environment": output.environment(), "machine": rates._asdict(), "rows": rows}
    output.write(document, rows, args.json, args.csv)
    if args.plot:
        output.plot(rows, args.plot, "%copy", "% of copy bandwidth, counting one read and one write")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="offpolicy-corr bench",
        description=__doc__.splitlines()[0],
        epilog="offpolicy-corr bench --cpu --help: options of the benchmark of the PyTorch path on a CPU",
    )
    parser.add_argument(
        "--shape", action="append", type=_shape, metavar="TxV", help="e.g. 8192x151936; repeatable"
    )
    parser.add_argument(
        "--k", action="append", type=_count, help="candidates per row; repeatable (0, 32, 128)"
    )
    parser.add_argument(
        "--hidden", type=_count, default=4096, help="width of the LM head benchmark; 0 leaves it out"
    )
    parser.add_argument(
        "--only", type=_names, help="comma-separated implementations: " + ", ".join(ON_LOGITS)
    )
    parser.add_argument("--quick", action="store_true", help="one shape, K = 128, few repeats")
    parser.add_argument(
        "--tiles", action="store_true", help="compare the kernels' tile configurations instead"
    )
    parser.add_argument(
        "--static", action="store_true", help="compile ahead of time and predict; needs no GPU"
    )
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: try it out under TRITON_INTERPRET=1"
    )
    for name in ("json", "csv", "plot"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    for file in (args.json, args.csv, args.plot):
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"there is no directory for {file}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'offpolicy-corr[bench]'")
    args.shapes = args.shape or (SHAPES[:1] if args.quick else SHAPES)
    args.ks = args.k if args.k is not None else ([128] if args.quick else [0, 32, 128])
    return args


def _shape(text: str) -> tuple[int, int]:
    rows, _, vocab = text.partition("x")
    if not (rows.isdecimal() and vocab.isdecimal() and int(rows) and int(vocab)):
        raise argparse.ArgumentTypeError(f"{text!r} is not TxV, e.g. 8192x151936")
    return int(rows), int(vocab)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count")
    return int(text)


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in ON_LOGITS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(ON_LOGITS)}")
    return names


# ------------------------------------------------------------------------------------------------ on a machine


@dataclass(frozen=True)
class _Bench:
    """Everything that one run of the benchmark measures, row by row."""

    machine: Machine
    rates: Rates
    repeats: int
    args: argparse.Namespace

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every implementation on every case, then once in fp32, then from hidden states."""
        for tokens, vocab in self.args.shapes:
            for k in self.args.ks:
                yield from self._on_logits(tokens, vocab, k, False, "bf16")
            if not self.args.quick:
                yield from self._on_logits(tokens, vocab, SUPPORT, True, "bf16")
        (tokens, vocab), k = self.args.shapes[0], max(self.args.ks)
        if not self.args.quick:
            yield from self._on_logits(tokens, vocab, k, False, "fp32")
        if self.args.hidden:
            yield from self._on_hidden(tokens, vocab, k, False)
            if not self.args.quick:
                yield from self._on_hidden(tokens, vocab, SUPPORT, True)

    def tiles(self) -> Iterator[dict[str, Any]]:
        """Ours in place under every tile configuration. Never chosen at run time: a trial would consume its input."""
        for tokens, vocab in self.args.shapes:
            for k in self.args.ks:
                yield from self._on_tiles(tokens, vocab, k)

    # a case is as large as the device: one method's local, so that it is gone before the next is made

    def _on_tiles(self, tokens: int, vocab: int, k: int) -> Iterator[dict[str, Any]]:
        case = self._case(tokens, vocab, k, False, "bf16")
        if case is not None:
            for name, tiles in launch.CONFIGURATIONS.items():
                with using_tiles(tiles):
                    yield from self._row(name, ON_LOGITS["ours"], case)

    def _on_logits(
        self, tokens: int, vocab: int, k: int, support: bool, dtype: str
    ) -> Iterator[dict[str, Any]]:
        case = self._case(tokens, vocab, k, support, dtype)
        if case is not None:
            for name in self.args.only or ON_LOGITS:
                yield from self._row(name, ON_LOGITS[name], case)

    def _row(self, name: str, implementation: OnLogits, case: Case) -> Iterator[dict[str, Any]]:
        restore = case.restore if implementation.overwrites else None
        found = self._measure(name, partial(implementation.build, case), restore)
        if found is not None:
            touched = 1e-9 * 2 * case.logits.numel() * case.logits.dtype.itemsize
            rate = touched / found[0].median
            yield _line("loss", name, case, found) | {
                "GB/s": rate,
                "%copy": 100 * rate / self.rates.copy,
                "B/logit": implementation.traffic(case),
            }

    def _on_hidden(self, tokens: int, vocab: int, k: int, support: bool) -> Iterator[dict[str, Any]]:
        case = self._case(tokens, vocab, k, support, "bf16")
        if case is None:
            return
        hidden = make_hidden_case(case, self.args.hidden)
        for name, build in ON_HIDDEN.items():
            found = self._measure(f"hidden {name}", partial(build, hidden), None)
            if found is not None:
                rate = 1e-12 * 6 * hidden.hidden.numel() * vocab / found[0].median
                yield _line("LM head + loss", name, case, found) | {
                    "TFLOP/s": rate,
                    "%matmul": 100 * rate / self.rates.matmul,
                }

    def _case(self, tokens: int, vocab: int, k: int, support: bool, dtype: str) -> Case | None:
        """None, with a line that says why, where it cannot be made."""
        self.machine.free()
        kind = _kind(k, support)
        print(f"{tokens} x {vocab} {dtype}, K = {kind}", flush=True)
        if k > vocab:
            print(f"skipped: a vocabulary of {vocab} has no {k} candidates")
            return None
        try:
            return make_case(tokens, vocab, k, support, self.machine.device, DTYPES[dtype])
        except torch.OutOfMemoryError:
            print("skipped: it does not fit this device's memory")
            return None

    def _measure(
        self, name: str, build: Callable[[], Callable[[], Any]], restore: Callable[[], Any] | None
    ) -> tuple[Timing, int] | None:
        """Seconds, and bytes beyond the inputs; None, with a line that says why, where it cannot run."""
        try:
            step = build()
            times = timed(self.machine, step, self.repeats, restore)
            if restore is not None:
                restore()
            peak = self.machine.peak(step)
        except Skip as reason:
            print(f"  skipped {name}: {reason}", flush=True)
        except Exception as error:  # a peer's fault must not end the run
            first = (str(error).strip() or "no message").splitlines()[0]
            print(f"  skipped {name}: {type(error).__name__}: {first[:160]}", flush=True)
        else:
            print(f"  {name}: {1e3 * times.median:.3f} ms", flush=True)
            return times, peak
        finally:
            self.machine.free()
        return None


def _kind(k: int, support: bool) -> str:
    return f"set ≤{k}" if support else str(k)


def _line(op: str, name: str, case: Case, found: tuple[Timing, int]) -> dict[str, Any]:
    times, peak = found
    tokens, vocab = case.logits.shape
    return {
        "op": op,
        "impl": name,
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == case.logits.dtype),
        "N": tokens,
        "V": vocab,
        "K": _kind(case.k, case.support),
        "ms": 1e3 * times.median,
        "ms p20": 1e3 * times.low,
        "ms p80": 1e3 * times.high,
        "peak MiB": peak / 2**20,
    }


def _compare(rows: list[dict[str, Any]]) -> None:
    """How many times faster each row is than each baseline of its own case."""
    for baseline in BASELINES:
        times = {_case_of(row): row["ms"] for row in rows if row["impl"] == baseline}
        for row in rows:
            other = times.get(_case_of(row))
            if times:
                row[f"x {baseline}"] = None if other is None else other / row["ms"]


def _name_best(rows: list[dict[str, Any]]) -> None:
    """Say which row of each case is the fastest."""
    for case in dict.fromkeys(map(_case_of, rows)):
        best = min((row for row in rows if _case_of(row) == case), key=lambda row: row["ms"])
        print(f"best at {best['N']} x {best['V']}, K = {best['K']}: {best['impl']}")


def _case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("op", "dtype", "N", "V", "K"))


def _versions() -> str:
    found = output.environment()
    return f"{found['device']}, torch {found['torch']}, Triton {found['triton']}"


# ------------------------------------------------------------------------------------------------ without one


def _static(args: argparse.Namespace) -> int:
    try:
        static.require_compiler()
    except (ImportError, RuntimeError) as error:
        print(f"--static compiles the kernels: {error}")
        return 2
    found = [
        (c, static.figures(c, target)) for c in static.main_configurations() for target in static.TARGETS
    ]
    compiled = [
        {
            "kernel": configuration.kernel,
            "configuration": configuration.label,
            "dtype": configuration.dtype,
            "target": f"sm_{figures.target}",
            "registers": figures.registers,
            "stack": figures.stack_bytes,
            "shared": figures.shared_bytes,
            "bits": "/".join(map(str, figures.sweep_widths)),
            "slots/logit": " + ".join(f"{slots:.2f}" for slots in figures.sweeps),
            "sum": figures.slots,
            "ex2/logit": figures.ex2,
        }
        for configuration, figures in found
    ]
    default = {figures.target: figures for configuration, figures in found if configuration == static.fused()}
    predicted = [
        _predicted(machine, shape, default[machine.target])
        for machine in roofline.MACHINES
        for shape in SHAPES[:2]
    ]
    output.print_table("COMPILED ahead of time: what the compiler made of the kernels", compiled)
    title = "PREDICTED by a roofline, nothing was run: fused_loss, bf16, in place, everything overlapped"
    output.print_table(title, predicted)
    document = {
        "kind": "predicted: compiled ahead of time, no GPU was used",
        "environment": output.environment(),
        "compiled": compiled,
        "predicted": predicted,
    }
    output.write(document, compiled, args.json, args.csv)
    if args.plot:
        bars = [
            {**p, "op": "PREDICTED", "dtype": "bf16", "impl": f"ours, {p['PREDICTED for']}", "K": "any"}
            for p in predicted
        ]
        output.plot(bars, args.plot, "ms at best", "ms at best, predicted")
    return 0


def _predicted(machine: roofline.Machine, shape: tuple[int, int], figures: Figures) -> dict[str, Any]:
    programs = roofline.programs(figures.registers, static.fused().options["num_warps"])
    bound = roofline.predict(machine, *shape, figures.slots, figures.ex2, programs)
    return {
        "PREDICTED for": bound.machine,
        "N": bound.rows,
        "V": bound.vocab,
        "B/logit": bound.bytes_per_logit,
        "memory ms": bound.memory,
        "ex2 ms": bound.exponential,
        "issue ms": bound.issue,
        "ms at best": bound.total,
        "limit": bound.limit,
        "copy TB/s": machine.copy / 1e12,
        "copy rate is": "reported" if machine.reported else "assumed",
    }


if __name__ == "__main__":
    raise SystemExit(main())
