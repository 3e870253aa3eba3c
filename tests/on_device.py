"""Where kernel tests run: on the GPU where there is one, otherwise in Triton's interpreter.

Import this before anything that imports kernels: they are bound to the interpreter when they are defined.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import offpolicy_corr as oc  # noqa: E402

MARKS = [pytest.mark.gpu] if DEVICE == "cuda" else []


def moved(record: oc.SamplerRecord) -> oc.SamplerRecord:
    """The record on the test device, its log-probs in fp32, as samplers ship them."""
    candidates = record.candidates
    if candidates is not None and candidates.logprobs is not None:
        candidates = replace(candidates, logprobs=candidates.logprobs.float())
    logprobs = None if record.logprobs is None else record.logprobs.float()
    return replace(record, logprobs=logprobs, candidates=candidates).to(DEVICE)


def loss_and_gradient(
    logits: Tensor,
    record: oc.SamplerRecord,
    advantages: Tensor,
    backend: str,
    inplace: bool = False,
    **options: Any,
) -> tuple[oc.PolicyLoss, Tensor]:
    """`policy_loss` and the gradient of its sum with respect to ``logits``."""
    leaf = logits.detach().requires_grad_()
    inner = leaf.clone(memory_format=torch.preserve_format) if inplace else leaf
    out = oc.policy_loss(inner, record, advantages, backend=backend, inplace=inplace, **options)
    out.loss.sum().backward()
    assert leaf.grad is not None
    return out, leaf.grad


def assert_same(
    logits: Tensor,
    record: oc.SamplerRecord,
    advantages: Tensor,
    tolerance: float = 1e-5,
    inplace: bool = False,
    **options: Any,
) -> Tensor:
    """The kernel on ``logits`` and PyTorch in fp64 on the same numbers agree, diagnostics and all.

    Returns the kernel's gradient.
    """
    record = moved(record)
    logits, advantages = logits.to(DEVICE), advantages.to(DEVICE)
    options = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in options.items()}
    ours, gradient = loss_and_gradient(logits, record, advantages, "triton", inplace, **options)
    exact, expected = loss_and_gradient(logits.double(), record, advantages, "torch", **options)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(gradient.double(), expected, **close)
    torch.testing.assert_close(ours.loss.double(), exact.loss, **close)
    for name, values in vars(exact.diagnostics).items():
        got = getattr(ours.diagnostics, name).to(values.dtype)
        # ρ divides by the trainer's tail, which is good to 1e-7 of the row
        loose = {"rtol": 1e-3, "atol": 1e-5} if name == "tail_ratio" else close
        torch.testing.assert_close(got, values, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}", **loose)
    return gradient
