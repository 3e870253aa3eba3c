"""Benchmark: what a machine allows a row kernel, by bytes, exponentials and issue slots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Rates that a prediction rests on. ``copy`` was reported by others where ``reported`` is set, else assumed."""

    name: str
    target: int  # architecture that kernels are compiled for
    copy: float  # bytes/s of a device-to-device copy, read and write counted
    l2: float  # bytes
    processors: int
    clock: float  # Hz
    exponentials: int  # per clock and multiprocessor
    reported: bool = False


MACHINES = (
    Machine("H100 SXM", 90, 3.0e12, 50e6, 132, 1.98e9, 16),
    Machine("H200", 90, 4.3e12, 60e6, 132, 1.98e9, 16, reported=True),
    Machine("B200", 100, 7.2e12, 126e6, 148, 1.85e9, 16),
    Machine("B300", 100, 7.2e12, 126e6, 160, 1.85e9, 32),
)


@dataclass(frozen=True)
class Prediction:
    """Milliseconds for one launch over ``[rows, vocab]`` bf16 logits, in place."""

    machine: str
    rows: int
    vocab: int
    bytes_per_logit: float
    memory: float
    exponential: float
    issue: float

    @property
    def total(self) -> float:
        return max(self.memory, self.exponential, self.issue)

    @property
    def limit(self) -> str:
        names = {self.memory: "memory", self.exponential: "ex2", self.issue: "issue"}
        return names[self.total]


def programs(registers: int, warps: int) -> int:
    """How many programs a multiprocessor holds, by their registers and by its 64 warps."""
    allocated = -(-registers // 8) * 8  # of a thread, in steps of 8
    return min(65_536 // (allocated * 32 * warps), 64 // warps)


def predict(
    machine: Machine, rows: int, vocab: int, slots: float, ex2: float, programs_per_processor: int
) -> Prediction:
    """Perfect overlap of everything, so a bound rather than a forecast.

    The second read of a row costs DRAM traffic for the part of the rows in flight that does not fit the L2 cache.
    """
    in_flight = machine.processors * programs_per_processor * 2.0 * vocab
    hit = min(1.0, machine.l2 / in_flight)
    traffic = 6.0 - 2.0 * hit
    logits = rows * vocab
    lanes = machine.processors * machine.clock
    return Prediction(
        machine.name,
        rows,
        vocab,
        traffic,
        1e3 * logits * traffic / machine.copy,
        1e3 * logits * ex2 / (lanes * machine.exponentials),
        1e3 * logits * slots / (lanes * 128),
    )
