"""Benchmark: time and peak memory of `policy_loss` on a CPU, against the same loss by plain autograd.

``python -m offpolicy_corr.benchmarks.cpu`` measures loss and gradient of every variant in a fresh child process
(memory is not handed back by the one before), prints ratios, and writes JSON where ``--json`` names a file. With
``--busy`` it measures what other busy processes do to the times instead. What it is compared with is in `plain`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import offpolicy_corr as oc

from .plain import plain_loss

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VARIANTS = ("autograd", "policy_loss", "policy_loss in place")
# of the tables: key of a row -> title, width, format
_COLUMNS = {
    "seconds": ("seconds", 9, "{:.2f}"),
    "speed_up": ("speed-up", 10, "{:.1f}x"),
    "extra_mib": ("extra MiB", 11, "{:.0f}"),
    "memory_ratio": ("of autograd", 13, "{:.3f}"),
}
_BUSY_COLUMNS = {
    "seconds": ("alone s", 9, "{:.2f}"),
    "busy_seconds": ("busy s", 9, "{:.2f}"),
    "busy_ratio": ("ratio", 8, "{:.1f}x"),
    "worst_seconds": ("worst alone", 13, "{:.2f}"),
    "worst_busy_seconds": ("worst busy", 12, "{:.2f}"),
}


def problem(tokens: int, vocab: int, k: int, dtype: torch.dtype) -> tuple[Tensor, oc.SamplerRecord, Tensor]:
    """Logits ``[tokens, vocab]`` and a record of top-``k`` heads drawn from slightly different ones."""
    torch.manual_seed(0)
    logits = torch.empty(tokens, vocab, dtype=dtype)
    ids = torch.empty(tokens, k, dtype=torch.int32)
    logq = torch.empty(tokens, k)
    sampled = torch.empty(tokens, dtype=torch.int64)
    for row in range(tokens):
        sampler = 3.0 * torch.randn(vocab)
        logits[row] = (sampler + 0.05 * torch.randn(vocab)).to(dtype)
        top = sampler.log_softmax(0).topk(k)
        ids[row], logq[row], sampled[row] = top.indices, top.values, top.indices[row % k]
    own = logq.gather(1, (torch.arange(tokens) % k)[:, None]).squeeze(1)
    record = oc.SamplerRecord(sampled, own, oc.CandidateSet.from_topk(ids, logq))
    return logits, record, torch.randn(tokens)


def measure(variant: str, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds and peak bytes beyond the inputs of forward + backward, in this process."""
    step = _step(variant, args)
    base = _reset_peak()
    seconds = [step() for _ in range(args.repeats + 1)]
    return {"seconds": statistics.median(seconds[1:]), "extra_bytes": _peak() - base}


def measure_busy(variant: str, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds alone and beside ``args.busy`` busy processes, alternately in this process, and the worst ones."""
    step = _step(variant, args)
    step()
    alone, beside = [], []
    for _ in range(args.repeats):
        alone.append(step())
        with busy_processes(args.busy):
            beside.append(step())
    medians = {"seconds": statistics.median(alone), "busy_seconds": statistics.median(beside)}
    return medians | {"worst_seconds": max(alone), "worst_busy_seconds": max(beside)}


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """``count`` processes that compute without a pause, running when the block begins."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _step(variant: str, args: argparse.Namespace) -> Callable[[], float]:
    """A function that runs forward + backward once and returns its seconds."""
    torch.set_num_threads(args.threads)
    logits, record, advantages = problem(args.tokens, args.vocab, args.k, DTYPES[args.dtype])
    inplace = variant == "policy_loss in place"
    plain = plain_loss(record, advantages)
    ours = lambda leaf: oc.policy_loss(leaf, record, advantages, inplace=inplace).loss
    original = logits.clone() if inplace else None

    def step() -> float:
        if original is not None:
            logits.copy_(original)  # the last run left its gradient here
        leaf = logits.detach().requires_grad_()
        start = time.perf_counter()
        (plain if variant == "autograd" else ours)(leaf).backward()
        return time.perf_counter() - start

    return step


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak that making the inputs left
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _child(variant: str, dtype: str, argv: list[str]) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "offpolicy_corr.benchmarks.cpu",
        "--child",
        variant,
        "--dtype",
        dtype,
        *argv,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{variant} ({dtype}) failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout)
    return result


def run(args: argparse.Namespace, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Every variant in its own process, as a dictionary with the machine and the command."""
    sizes = ["--tokens", args.tokens, "--vocab", args.vocab, "--k", args.k]
    shared = [str(word) for word in [*sizes, "--repeats", args.repeats, "--threads", args.threads]]
    shared += ["--busy", str(args.busy)] if args.busy else []
    beside = f", alone and beside {args.busy} busy process(es)" if args.busy else ""
    show(
        f"T={args.tokens} V={args.vocab} K={args.k}, {args.threads} thread(s), torch {torch.__version__}{beside}"
    )
    rows = []
    for dtype in [args.dtype] if args.dtype else list(DTYPES):
        results = {variant: _child(variant, dtype, shared) for variant in VARIANTS}
        rows += [
            {"dtype": dtype, "variant": variant, **result}
            for variant, result in (_against_busy if args.busy else _against_autograd)(results).items()
        ]
    columns = _BUSY_COLUMNS if args.busy else _COLUMNS
    show(f"{'dtype':6}{'variant':22}" + "".join(f"{title:>{width}}" for title, width, _ in columns.values()))
    for row in rows:
        values = "".join(f"{form.format(row[name]):>{width}}" for name, (_, width, form) in columns.items())
        show(f"{row['dtype']:6}{row['variant']:22}{values}")
    return {
        "benchmark": "cpu",
        "command": " ".join(
            [
                "python -m offpolicy_corr.benchmarks.cpu",
                *shared,
                *(["--dtype", args.dtype] if args.dtype else []),
            ]
        ),
        "machine": {
            "processor": _processor(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "rows": rows,
    }


def _against_autograd(results: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The results with their ratios to autograd's."""
    plain = results["autograd"]
    return {
        variant: result
        | {
            "speed_up": plain["seconds"] / result["seconds"],
            "memory_ratio": result["extra_bytes"] / plain["extra_bytes"],
            "extra_mib": result["extra_bytes"] / 2**20,
        }
        for variant, result in results.items()
    }


def _against_busy(results: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The results with the ratio of the time beside busy processes to the time alone."""
    return {
        variant: result | {"busy_ratio": result["busy_seconds"] / result["seconds"]}
        for variant, result in results.items()
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="offpolicy-corr bench --cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--dtype", choices=list(DTYPES), help="one dtype only")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--busy",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="N",
        help="time alone and beside N busy processes (default 1) instead of time and memory against autograd",
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps((measure_busy if args.busy else measure)(args.child, args)))
        return 0
    if not args.busy and not Path("/proc/self/clear_refs").exists():
        print("peak memory is read from /proc, which this system does not have", file=sys.stderr)
        return 1
    results = run(args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
