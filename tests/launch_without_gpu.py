"""Run as a program: real launches, compiled just in time for an architecture, on a driver that runs nothing.

Prints as JSON what was launched: kernel, grid, and the widths of its global accesses in bits. Interpreted tests pass
the same arguments, but only here does Triton look at them as on a GPU: types, divisibility, strides of 1.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch
from offpolicy_corr.benchmarks.cases import make_case
from offpolicy_corr.kernels.rescale import scale_
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import offpolicy_corr as oc
from offpolicy_corr import backend
from ranks import Ranks

LAUNCHED: list[dict[str, Any]] = []


class Launcher:
    def __init__(self, src: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        widths = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bu](\d+)", function)
        bits = sorted({int(count or 1) * int(width) for count, width in widths})
        columns = max(
            (a.shape[1] for a in rest if isinstance(a, torch.Tensor) and a.dim() == 2 and a.shape[0] == 2),
            default=0,
        )
        LAUNCHED.append({"kernel": self.name, "grid": [x, y, z], "columns": columns, "bits": bits})


class Utils:
    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return 0, PTX[binary], 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32}


class Driver:
    """A GPU of an architecture, as far as a launch asks for it."""

    launcher_cls = Launcher
    utils = Utils()

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Assembly(dict[bytes, str]):
    """The PTX of every binary, so that the launcher can look at what it launches."""

    def install(self) -> None:
        from triton.compiler import CompiledKernel

        plain = CompiledKernel._init_handles

        def noting(kernel: Any) -> None:
            self[kernel.kernel] = kernel.asm["ptx"]
            plain(kernel)

        CompiledKernel._init_handles = noting


PTX = Assembly()


def main(architecture: int) -> None:
    driver.set_active(Driver(architecture))  # type: ignore[arg-type]
    PTX.install()
    backend._triton_obstacle = lambda like, rule: None  # the tensors are on the host, and are never read
    options: dict[str, Any] = {"backend": "triton", "validate": False}
    vocab = 151_936
    for support, dtype in ((False, torch.bfloat16), (True, torch.bfloat16), (False, torch.float32)):
        case = make_case(2, vocab, 32, support, "cpu", dtype)
        leaf = case.logits.requires_grad_()
        oc.policy_loss(leaf, case.record, case.advantages, inplace=True, **options)
        scale_(case.source, torch.ones(()))
    mask, reference = torch.tensor([True, False]), torch.full((2,), -2.0)
    correction = oc.Correction(oc.ClampedIS(0.5, 2.0))
    oc.policy_loss(
        leaf, case.record, case.advantages, correction=correction, loss_mask=mask, entropy_coef=0.1, kl_coef=0.1,
        ref_logprobs=reference, **options,
    )  # fmt: skip
    logp, head, entropy = oc.selected_logprobs(leaf, case.record.tokens, case.record.candidates, **options)
    (logp.sum() + head.sum() + entropy.sum()).backward()
    odd = torch.zeros(2, 50_257, dtype=torch.bfloat16).requires_grad_()
    tokens = oc.SamplerRecord(torch.tensor([1, 2]), reference)
    oc.policy_loss(odd, tokens, reference, correction=oc.Correction.from_name("is"), **options)
    halves = case.logits.detach().chunk(2, 1)
    Ranks(2).run(
        lambda group: oc.policy_loss(
            halves[group.rank].contiguous().requires_grad_(),
            case.record,
            case.advantages,
            process_group=group,
            **options,
        ),
        pytest.MonkeyPatch(),
    )
    print(json.dumps(LAUNCHED))


if __name__ == "__main__":
    main(int(sys.argv[1]))
