"""Row passes: how kernels are launched, tile sizes and inputs in the form that kernels take."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offpolicy_corr.csr import row_mass
from offpolicy_corr.loss_inputs import LossInputs
from offpolicy_corr.records.candidates import CandidateSet

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tiles(NamedTuple):
    """Columns and candidates that a program handles at a time, its warps, and registers of a thread at most.

    ``columns`` of 16-bit logits, half as many of 32-bit ones: as many bytes. Fixed, never tuned at run time: a trial
    of an in-place kernel would consume its input.
    """

    columns: int
    candidates: int
    warps: int
    registers: int = 128

    def options(self, dtype: torch.dtype, contiguous: bool = True) -> dict[str, Any]:
        """Keywords of a launch. ``contiguous``: neighboring columns are neighbors in memory."""
        block = self.columns * 2 // dtype.itemsize
        keywords = {"CONTIGUOUS": contiguous, "BLOCK": block, "num_warps": self.warps, "num_stages": 1}
        if torch.version.hip is None:
            keywords["maxnreg"] = self.registers
        return keywords

    def lanes(self, dtype: torch.dtype) -> dict[str, int]:
        """Keywords of a kernel that sums a row: its threads, and the columns that one reads at a time."""
        block = self.columns * 2 // dtype.itemsize
        vector = min(16 // dtype.itemsize, block)
        return {"LANES": min(32 * self.warps, block // vector), "VECTOR": vector}


# four 128-bit accesses of a thread at a time. Where a row is read twice, 16 warps at 64 registers make two programs on
# a multiprocessor: enough bytes in flight, one loads while the other is among its candidates, and no more than two
# rows per multiprocessor compete for the L2 cache
TWICE = Tiles(16384, 128, 16, registers=64)
ONCE = Tiles(8192, 128, 8)
# rows this short leave most of a large tile unused
SHORT = Tiles(1024, 128, 4)
SHORT_COLUMNS = 4096
# where accesses cannot be 128 bits wide each takes its own address, and its own registers
ODD = Tiles(2048, 128, 8)
# what `offpolicy-corr bench --tiles` compares
CONFIGURATIONS = {
    "two rows of 16 warps": TWICE,
    "two or three rows of 8 warps": ONCE,
    "four rows of 8 warps": Tiles(8192, 128, 8, registers=64),
    "one row of 32 warps": Tiles(32768, 128, 32, registers=64),
}


def tiles_for(width: int, *matrices: Tensor, twice: bool = False) -> Tiles:
    """The tiles for rows of ``width`` columns of these matrices; ``twice``: the program reads its row twice.

    Raises:
        TypeError: a dtype that the kernels do not take.
    """
    for matrix in matrices:
        if matrix.dtype not in DTYPES:
            raise TypeError(
                f"kernels compute in float32 and take bf16, fp16 or fp32 logits, not {matrix.dtype}"
            )
    if width <= SHORT_COLUMNS:
        return SHORT
    if not all(map(_is_aligned, matrices)):
        return ODD
    return TWICE if twice else ONCE


def _is_aligned(matrix: Tensor) -> bool:
    """What Triton looks at: neighbors in memory, and a start and row stride that are multiples of 16."""
    return matrix.stride(1) == 1 and matrix.stride(0) % 16 == 0 and matrix.data_ptr() % 16 == 0


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def log2e_over_temperature(inputs: LossInputs, device: torch.device) -> Tensor:
    """log2(e) / temperature, fp32 ``[T]``: what turns a logit into an exponent of 2."""
    temperature = inputs.temperature
    if isinstance(temperature, Tensor):
        return (math.log2(math.e) / temperature.double()).float().contiguous()
    return torch.full((len(inputs),), math.log2(math.e) / temperature, dtype=torch.float32, device=device)


def sampler_tail_mass(candidates: CandidateSet) -> Tensor:
    """1 − Q_H, fp32 ``[T]``, subtracted in fp64: it is data, and ρ divides by small values of it."""
    assert candidates.logprobs is not None
    return (1.0 - row_mass(candidates.logprobs, candidates.offsets)).float()


def define(
    name: str, schema: str, mutates: tuple[str, ...], kernel: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """Register a launch as ``torch.ops.offpolicy_corr.<name>``: `torch.compile` then keeps it whole, and writing to
    an argument counts as a write for autograd's version counters."""
    operator = torch.library.custom_op(f"offpolicy_corr::{name}", kernel, mutates_args=mutates, schema=schema)
    operator.register_fake(fake)
    return operator


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Kernels index ``[T]`` and ``[nnz]`` inputs without strides."""
    return None if tensor is None else tensor.contiguous()
