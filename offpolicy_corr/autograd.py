"""The closed-form gradient as autograd functions.

A scalar loss computes it in the forward visit and hands it over in the backward. One loss a token does not know yet
what each will be multiplied by: there a second visit, in the backward, writes the gradient as it is to be, and between
the two nothing of the logits' size is held but the logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend
from .centering import live
from .torch_loss import Job


class LossFromLogits(torch.autograd.Function):
    """(loss, results): ``loss`` is Σ scale·loss, or scale·loss ``[T]`` when not ``reduce``."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, job: Job, chosen: str, reduce: bool, inplace: bool, wanted: bool
    ) -> tuple[Tensor, Tensor]:
        gradient = _gradient_buffer(logits, inplace) if wanted and reduce else None
        held_job, unit = at_unit_scale(job, logits.dtype)
        with torch.autocast(logits.device.type, enabled=False):
            results = backend.visit(chosen)(logits.detach(), held_job, gradient)
            loss = scaled_loss(results, job, reduce)
        ctx.later = None if reduce else (job, chosen, inplace)
        if gradient is not None:
            ctx.held = Held([gradient], [gradient.dtype], unit)
        elif wanted:
            ctx.save_for_backward(logits)
        ctx.mark_non_differentiable(results)
        return loss, results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.later is None:
            return (*ctx.held.times(upstream), None, None, None, None, None)
        job, chosen, inplace = ctx.later
        (logits,) = ctx.saved_tensors
        job = replace(job, terms=replace(job.terms, scale=live(job.terms.scale, upstream)))
        gradient = _gradient_buffer(logits, inplace)
        with torch.autocast(logits.device.type, enabled=False):
            backend.visit(chosen)(logits.detach(), job, gradient)
        return gradient, None, None, None, None, None


def _gradient_buffer(logits: Tensor, inplace: bool) -> Tensor:
    # the detached alias shares its version counter, so another reader of the logits notices the write
    # (a compiler turns writes into copies and places buffers itself: there inplace gains nothing)
    write_over = inplace and not torch.compiler.is_compiling()
    if write_over and any(
        size > 1 and stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True)
    ):
        raise ValueError(
            "inplace=True cannot write over expanded logits, whose elements share memory: use inplace=False"
        )
    return logits.detach() if write_over else torch.empty_like(logits)


def wants_gradient(*inputs: Tensor | None) -> tuple[bool, ...]:
    """Which inputs get a gradient from the call that is being made: none does under ``no_grad``.

    Asked before ``apply``: inside it grad mode is always off, and what torch tells there ignores the mode.
    """
    return tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs)


def scaled_loss(results: Tensor, job: Job, reduce: bool) -> Tensor:
    """Σ scale·loss or scale·loss; a scale of 0 silences whatever the token's loss is."""
    scale = job.terms.scale.to(results.dtype)
    loss = live(scale, results[0])
    return loss.sum() if reduce else loss


def at_unit_scale(job: Job, dtype: torch.dtype) -> tuple[Job, Tensor | None]:
    """For fp16, a job whose largest scale · |advantage| is about 1, and the factor taken out; else the job itself.

    A gradient divided by the number of tokens is below fp16's range long before the loss scale reaches it.
    """
    if dtype != torch.float16 or job.terms.scale.numel() == 0:
        return job, None
    advantages = job.terms.advantages.abs().nan_to_num(0.0, posinf=0.0)
    if job.trained is not None:
        advantages = torch.where(job.trained, advantages, 0.0)
    unit = job.terms.scale.max().clamp(min=torch.finfo(torch.float64).tiny) * advantages.max().clamp(min=1.0)
    unit = unit.log2().ceil().exp2()  # a power of two, so that dividing and multiplying round nothing
    return replace(job, terms=replace(job.terms, scale=job.terms.scale / unit)), unit


class Held:
    """Gradients computed ahead of time, waiting for what is multiplied onto them.

    ``dtypes`` are those they are handed over in; a gradient may be held wider than that.
    """

    def __init__(
        self, gradients: list[Tensor | None], dtypes: list[torch.dtype], unit: Tensor | None = None
    ) -> None:
        self.gradients: list[Tensor | None] | None = gradients
        # nobody else reaches a buffer that a compiler places
        traced = torch.compiler.is_compiling()
        self.versions = [None if g is None or traced else g._version for g in gradients]
        self.dtypes, self.unit = dtypes, unit

    def times(self, upstream: Tensor) -> list[Tensor | None]:
        """upstream · gradient; upstream is a scalar, or ``[T]`` for gradients of ``T`` rows.

        Written over the held gradient, unless the graph is kept for another backward pass.

        Raises:
            RuntimeError: the gradient was handed over before, or someone wrote into it.
        """
        factor, gradients = upstream if self.unit is None else upstream * self.unit, self.gradients
        if gradients is None:
            raise RuntimeError(
                "the gradient was handed over in an earlier backward: pass retain_graph=True there"
            )
        pairs = list(zip(gradients, self.dtypes, strict=True))
        if torch.compiler.is_compiling():
            return [None if g is None else (g * _along_rows(factor, g)).to(dtype) for g, dtype in pairs]
        for gradient, version in zip(gradients, self.versions, strict=True):
            if gradient is not None and gradient._version != version:
                raise RuntimeError(
                    "the gradient was overwritten between forward and backward: with inplace=True it lives in "
                    "the logits. Use inplace=False, or do not write into the logits"
                )
        keep = _graph_is_kept()
        if not keep:
            self.gradients = None
        return [None if g is None else _scale(g, factor, keep).to(dtype) for g, dtype in pairs]


def _scale(gradient: Tensor, factor: Tensor, keep: bool) -> Tensor:
    if factor.dim() == 0 and factor.device.type == "cpu":
        if float(factor) == 1.0:
            return gradient.clone() if keep else gradient
        return gradient * float(factor) if keep else gradient.mul_(float(factor))
    if gradient.device.type == "cuda" and gradient.dtype != torch.float64 and backend.has_kernels():
        # reads the factor on the device and returns at once where it is 1
        from .kernels.rescale import scale_

        return scale_(gradient.clone() if keep else gradient, factor)
    out = gradient.clone() if keep else gradient
    # a half-precision row times an fp32 factor passes through fp32: a few rows at a time, not [T, V]
    for rows, factors in zip(out.split(64), factor.expand(len(out)).split(64), strict=True):
        rows.mul_(_along_rows(factors, rows))
    return out


def _along_rows(factor: Tensor, gradient: Tensor) -> Tensor:
    """A scalar, or one factor per row, in a shape that multiplies ``gradient`` ``[T, …]``."""
    return factor.view(-1, *[1] * (gradient.dim() - 1))


def _graph_is_kept() -> bool:
    """Whether this backward was called with retain_graph; taken to be so where torch cannot tell."""
    probe = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if probe is None else bool(probe())
