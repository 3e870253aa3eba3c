"""How kernels are launched: tile sizes, and inputs in the form that kernels take."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offpolicy_corr.candidates import CandidateSet
from offpolicy_corr.segments import segment_sum
from offpolicy_corr.terms import Terms

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tiles(NamedTuple):
    """Columns and candidates that a program handles at a time, and its warps.

    Fixed, never tuned at run time: a trial of an in-place kernel would consume its input.
    """

    columns: int
    candidates: int
    warps: int

    def options(self, contiguous: bool) -> dict[str, Any]:
        """Keywords of a launch. ``contiguous``: neighbouring columns are neighbours in memory."""
        chosen = {"CONTIGUOUS": contiguous, "BLOCK": self.columns, "num_warps": self.warps, "num_stages": 1}
        if contiguous and torch.version.hip is None:
            # two programs of 8 warps on a multiprocessor, said to the assembler, which otherwise may spill for a third
            chosen["maxnreg"] = REGISTERS
        return chosen


REGISTERS = 128
# 32 elements per thread: fewer barriers per logit than smaller tiles, and with at most 128 registers two programs of
# 8 warps on a multiprocessor, so that one loads while the other is at a barrier or among its candidates, and no more
# than two rows per multiprocessor compete for the L2 cache
WIDE = Tiles(8192, 128, 8)
# rows this short leave most of a large tile unused
NARROW = Tiles(1024, 128, 4)
NARROW_COLUMNS = 4096


def tiles_for(dtype: torch.dtype, columns: int) -> Tiles:
    """Raises TypeError for a dtype that the kernels do not take."""
    if dtype not in DTYPES:
        raise TypeError(f"kernels compute in float32 and take bf16, fp16 or fp32 logits, not {dtype}")
    return NARROW if columns <= NARROW_COLUMNS else WIDE


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def sharpness(terms: Terms, device: torch.device) -> Tensor:
    """log2(e) / temperature, fp32 ``[T]``: what turns a logit into an exponent of 2."""
    temperature = terms.temperature
    if isinstance(temperature, Tensor):
        return (math.log2(math.e) / temperature.double()).float().contiguous()
    return torch.full((len(terms),), math.log2(math.e) / temperature, dtype=torch.float32, device=device)


def unrecorded_mass(candidates: CandidateSet) -> Tensor:
    """1 − Q_H, fp32 ``[T]``, subtracted in fp64: it is data, and ρ divides by small values of it."""
    assert candidates.logprobs is not None
    return (1.0 - segment_sum(candidates.logprobs.double().exp(), candidates.offsets)).float()


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
