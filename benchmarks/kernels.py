"""Microbenchmarks of the kernels: ``offpolicy-corr bench``, or ``python -m offpolicy_corr.benchmarks.kernels``.

On a GPU: loss and gradient of real model shapes, ours against PyTorch and against whatever peers are installed, as a
share of what this machine's own copy reaches. Forward and backward are timed together (some implementations do all
their work in forward), the L2 cache is flushed between runs, and logits that a step overwrites are restored outside
the timed region. GB/s and %copy count the floor of 4 bytes per bf16 logit for everybody, so that they rank
implementations; B/logit is a model of what each one moves.

Without a GPU: ``--static`` compiles the kernels ahead of time and predicts from a roofline.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import output, peers, roofline, static
from .peers import ON_HIDDEN, ON_LOGITS, Case, Skip
from .static import Figures

SHAPES = ((8192, 151_936), (8192, 248_320), (4096, 151_936), (32_768, 151_936), (65_536, 151_936))
FLUSH = 2**28  # bytes, more than any L2 cache
FLOOR = 4  # bytes per bf16 logit: read once, written once


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 where there is no GPU and none of the ways without one was asked for."""
    args = _arguments(argv)
    if args.static:
        return _static(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: take --static for figures from the compiler, or --cpu for the PyTorch path")
        return 2
    machine = measure_machine(args.device, args.quick)
    print(
        f"copy {machine['copy GB/s']:.0f} GB/s, bf16 matmul {machine['matmul TFLOP/s']:.0f} TFLOP/s, {_versions()}"
    )
    rows = list(_rows(args, machine["copy GB/s"]))
    _compare(rows)
    output.print_table("loss + gradient", rows)
    document = {"environment": output.environment(), "machine": machine, "rows": rows}
    output.write(document, rows, args.json, args.csv)
    if args.plot and rows:
        output.plot(rows, args.plot, "%copy", "% of copy bandwidth, on 4 bytes per logit")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="offpolicy-corr bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", action="append", type=_shape, metavar="TxV", help="e.g. 8192x151936; repeatable"
    )
    parser.add_argument("--k", action="append", type=int, help="candidates per row; repeatable (0, 32, 128)")
    parser.add_argument(
        "--hidden", type=int, default=4096, help="width of the LM head benchmark; 0 leaves it out"
    )
    parser.add_argument("--only", help="comma-separated implementations: " + ", ".join(ON_LOGITS))
    parser.add_argument("--quick", action="store_true", help="one shape, K = 128, few repeats")
    parser.add_argument(
        "--static", action="store_true", help="compile ahead of time and predict; needs no GPU"
    )
    parser.add_argument("--all", action="store_true", help="with --static: every configuration")
    parser.add_argument("--device", default="cuda", help="cpu: try the harness out under TRITON_INTERPRET=1")
    for name in ("json", "csv", "plot"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    args.shapes = args.shape or (SHAPES[:1] if args.quick else SHAPES)
    args.ks = args.k if args.k is not None else ([128] if args.quick else [0, 32, 128])
    return args


def _shape(text: str) -> tuple[int, int]:
    rows, _, vocab = text.partition("x")
    return int(rows), int(vocab)


# ------------------------------------------------------------------------------------------------ on a machine


def measure_machine(device: str, quick: bool) -> dict[str, float]:
    """What this machine does at best: GB/s of a large copy (read + write), TFLOP/s of a square bf16 product."""
    on_cpu = device == "cpu"
    size = 2**22 if on_cpu else 2**32
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    repeats = 3 if quick or on_cpu else 20
    seconds = timed(lambda: target.copy_(source), device, repeats)[0]
    side = 128 if on_cpu else 8192
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = timed(lambda: a @ b, device, repeats)[0]
    return {"copy GB/s": 2e-9 * size / seconds, "matmul TFLOP/s": 2e-12 * side**3 / product}


def timed(
    step: Callable[[], Any], device: str, repeats: int, restore: Callable[[], Any] | None = None
) -> tuple[float, float, float]:
    """(median, 20th, 80th percentile) seconds of ``step``; ``restore`` runs before each, untimed."""
    flush = torch.empty(FLUSH if device == "cuda" else 1, dtype=torch.uint8, device=device)
    seconds = []
    for repeat in range(repeats + 3):
        if restore is not None:
            restore()
        flush.zero_()
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            end.synchronize()
            elapsed = 1e-3 * start.elapsed_time(end)
        else:
            began = time.perf_counter()
            step()
            elapsed = time.perf_counter() - began
        if repeat >= 3:  # compilation, allocator, clocks
            seconds.append(elapsed)
    if len(seconds) < 2:
        return seconds[0], seconds[0], seconds[0]
    fifths = statistics.quantiles(seconds, n=5)
    return statistics.median(seconds), fifths[0], fifths[-1]


def _rows(args: argparse.Namespace, copy: float) -> Iterator[dict[str, Any]]:
    wanted = args.only.split(",") if args.only else None
    for tokens, vocab in args.shapes:
        kinds = [(k, False) for k in args.ks] + ([] if args.quick else [(128, True)])
        for k, support in kinds:
            try:
                case = peers.make_case(tokens, vocab, k, support, args.device)
            except torch.OutOfMemoryError:
                print(f"skipped {tokens} x {vocab}: it does not fit this device's memory")
                break
            for name, (build, traffic, overwrites) in ON_LOGITS.items():
                if wanted is None or name in wanted:
                    restore = _restoring(case) if overwrites else None
                    found = _measure(partial(build, case), name, args, restore)
                    if found is not None:
                        yield _line("loss+grad", name, case, found, copy, traffic)
            if args.hidden and (tokens, vocab) == args.shapes[0] and k == max(args.ks):
                hidden = peers.make_hidden_case(case, args.hidden)
                for name, make in ON_HIDDEN.items():
                    found = _measure(partial(make, hidden), f"hidden {name}", args, None)
                    if found is not None:
                        yield _line("hidden+loss+grad", name, case, found, None, "-")
            del case


def _restoring(case: Case) -> Callable[[], Any]:
    return lambda: case.logits.copy_(case.source)


def _measure(
    build: Callable[[], Any], name: str, args: argparse.Namespace, restore: Callable[[], Any] | None
) -> dict[str, float] | None:
    """Seconds and peak bytes beyond the inputs; None, with a line that says why, where it cannot run."""
    repeats = 10 if args.quick else 50
    if args.device == "cpu":
        repeats = 1
    try:
        step = build()
        step()
        base = _reset_peak(args.device)
        median, low, high = timed(step, args.device, repeats, restore)
        return {"median": median, "low": low, "high": high, "peak": _peak(args.device) - base}
    except Skip as reason:
        print(f"skipped {name}: {reason}")
    except Exception as error:  # a peer's fault must not end the run
        first = (str(error).strip() or "no message").splitlines()[0]
        print(f"skipped {name}: {type(error).__name__}: {first[:160]}")
    finally:
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return None


def _reset_peak(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() + FLUSH


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _line(
    op: str, name: str, case: Case, found: dict[str, float], copy: float | None, traffic: str
) -> dict[str, Any]:
    logits = case.logits.numel()
    rate = 1e-9 * FLOOR * logits / found["median"] if copy else None
    return {
        "op": op,
        "impl": name,
        "N": case.logits.shape[0],
        "V": case.logits.shape[1],
        "K": f"≤{case.k} (set)" if case.support else str(case.k),
        "ms": 1e3 * found["median"],
        "ms p20": 1e3 * found["low"],
        "ms p80": 1e3 * found["high"],
        "GB/s": rate,
        "%copy": None if rate is None or copy is None else 100 * rate / copy,
        "B/logit": traffic,
        "peak MiB": max(0.0, found["peak"]) / 2**20,
    }


def _compare(rows: list[dict[str, Any]]) -> None:
    """How many times faster each row is than each baseline of its own shape."""
    for baseline in ("eager", "compile", "liger", "quack", "cce"):
        times = {(r["op"], r["N"], r["V"], r["K"]): r["ms"] for r in rows if r["impl"] == baseline}
        for row in rows:
            other = times.get((row["op"], row["N"], row["V"], row["K"]))
            row[f"x {baseline}"] = None if other is None else other / row["ms"]


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
    chosen = static.all_configurations() if args.all else static.main_configurations()
    found = [(c, static.figures(c, target)) for c in chosen for target in static.TARGETS]
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
            {**p, "op": "PREDICTED", "impl": f"ours, {p['PREDICTED for']}", "K": "any"} for p in predicted
        ]
        output.plot(bars, args.plot, "ms at best", "ms at best, predicted")
    return 0


def _predicted(machine: roofline.Machine, shape: tuple[int, int], figures: Figures) -> dict[str, Any]:
    programs = min(2, 65_536 // (-(-figures.registers // 8) * 8 * 256))  # by registers, at 8 warps
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
