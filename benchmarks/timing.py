"""Benchmark: seconds and bytes of a step, on a GPU or on the host, and what the machine does at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


class Machine(Protocol):
    """Where steps run and how they are measured."""

    device: str
    copied: int  # bytes of the copy that shows the bandwidth
    side: int  # of the square product that shows the matmul rate
    repeats: int

    def seconds(self, step: Callable[[], Any]) -> float:
        """Of one run of ``step``, with cold caches."""
        ...

    def peak(self, step: Callable[[], Any]) -> int:
        """Bytes that ``step`` holds at most, beyond what was there before it."""
        ...

    def free(self) -> None:
        """Give back what the last implementation left in the allocator."""
        ...


class OnGpu:
    """CUDA events around each run, the L2 cache overwritten before it.

    The device is kept busy while the host enqueues the step, so that what is measured is the work and not the
    launches of a step that waits for none of it.
    """

    device = "cuda"
    copied = 2**32
    side = 8192
    repeats = 50
    flushed = 2**28  # bytes, more than any L2 cache
    head_start = 4_000_000  # cycles, about 2 ms

    def __init__(self) -> None:
        self.buffer = torch.empty(self.flushed, dtype=torch.uint8, device=self.device)
        self.copied = min(self.copied, torch.cuda.mem_get_info()[0] // 4)

    def seconds(self, step: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.buffer.zero_()
        torch.cuda._sleep(self.head_start)
        start.record()
        step()
        end.record()
        end.synchronize()
        return 1e-3 * float(start.elapsed_time(end))

    def peak(self, step: Callable[[], Any]) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before

    def free(self) -> None:
        torch.cuda.empty_cache()


class OnHost:
    """To try the harness out where there is no GPU: Triton's interpreter, whose times mean nothing."""

    device = "cpu"
    copied = 2**22
    side = 128
    repeats = 1

    def seconds(self, step: Callable[[], Any]) -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    def peak(self, step: Callable[[], Any]) -> int:
        step()
        return 0

    def free(self) -> None:
        pass


class Timing(NamedTuple):
    """Seconds of the middle run, and of those that a fifth of all runs beat, and four fifths."""

    median: float
    low: float
    high: float


def timed(
    machine: Machine, step: Callable[[], Any], repeats: int, restore: Callable[[], Any] | None = None
) -> Timing:
    """``repeats`` runs of ``step``, after three that warm it up; ``restore`` runs before each, untimed."""
    seconds = []
    for repeat in range(repeats + 3):
        if restore is not None:
            restore()
        elapsed = machine.seconds(step)
        if repeat >= 3:  # compilation, allocator, clocks
            seconds.append(elapsed)
    if len(seconds) == 1:
        return Timing(*seconds * 3)
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    return Timing(statistics.median(seconds), fifths[0], fifths[-1])


class Rates(NamedTuple):
    """What a machine does at best, GB/s and TFLOP/s."""

    copy: float
    matmul: float


def measure(machine: Machine, repeats: int) -> Rates:
    """The rates of a large copy (read + write) and of a square bf16 product."""
    rates = Rates(_copy(machine, repeats), _matmul(machine, repeats))
    machine.free()
    return rates


def _copy(machine: Machine, repeats: int) -> float:
    source, target = (torch.empty(machine.copied, dtype=torch.uint8, device=machine.device) for _ in range(2))
    return 2e-9 * machine.copied / timed(machine, lambda: target.copy_(source), repeats).median


def _matmul(machine: Machine, repeats: int) -> float:
    side = machine.side
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=machine.device) for _ in range(2))
    return 2e-12 * side**3 / timed(machine, lambda: a @ b, repeats).median
