"""Autograd: the loss from logits, whose closed-form gradient is computed together with the loss.

A scalar loss gets its gradient in the forward pass; backward multiplies it by the upstream gradient. With
``reduction="none"`` the upstream gradient of each token is known only in backward, so the logit gradient is
computed there, in a second pass. Until then only the logits are saved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backend import logprob_passes, loss_and_grad, rescale_
from .loss_inputs import LossProblem
from .numerics import safe_mul
from .result import FIELDS
from .torch_logprobs import Selection


class LossFromLogits(torch.autograd.Function):
    """(loss, results): ``loss`` is Σ scale·loss, or scale·loss ``[T]`` when not ``reduce``."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        problem: LossProblem,
        backend: str,
        reduce: bool,
        inplace: bool,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        gradient = _gradient_buffer(logits, inplace) if needs_grad and reduce else None
        fp16_problem, fp16_scale = rescaled_for_fp16(problem, logits.dtype)
        with torch.autocast(logits.device.type, enabled=False):
            results = loss_and_grad(backend)(logits.detach(), fp16_problem, gradient)
            loss = scaled_loss(results, problem, reduce)
        ctx.deferred = None if reduce else (problem, backend, inplace)
        if gradient is not None:
            ctx.gradients = PrecomputedGrads([gradient], [gradient.dtype], backend, fp16_scale)
        elif needs_grad:
            ctx.save_for_backward(logits)
        ctx.mark_non_differentiable(results)
        return loss, results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.deferred is None:
            return (*ctx.gradients.times(upstream), None, None, None, None, None)
        problem, backend, inplace = ctx.deferred
        (logits,) = ctx.saved_tensors
        scale = safe_mul(problem.inputs.scale, upstream)
        problem = replace(problem, inputs=replace(problem.inputs, scale=scale))
        gradient = _gradient_buffer(logits, inplace)
        with torch.autocast(logits.device.type, enabled=False):
            loss_and_grad(backend)(logits.detach(), problem, gradient)
        return gradient, None, None, None, None, None


class TokenLossesFromLogits(torch.autograd.Function):
    """(scale·loss, log p, entropy, results), the first three ``[T]`` and differentiable.

    Each output that the caller differentiates costs its own part of the backward pass: one pass over the logits for the
    loss, and two more for log-probs and entropy.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, problem: LossProblem, backend: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(logits.device.type, enabled=False):
            results = loss_and_grad(backend)(logits.detach(), problem, None)
            loss = scaled_loss(results, problem, reduce=False)
        ctx.save_for_backward(logits)
        ctx.problem, ctx.backend = problem, backend
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results)
        logp, entropy = (results[FIELDS.index(name)].clone() for name in ("logprobs", "entropy"))
        return loss, logp, entropy, results

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, on_loss: Tensor | None, on_logp: Tensor | None, on_entropy: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        logits, problem, backend = logits.detach(), ctx.problem, ctx.backend
        gradient = None
        with torch.autocast(logits.device.type, enabled=False):
            if on_loss is not None:
                scale = safe_mul(problem.inputs.scale, on_loss)
                scaled = replace(problem, inputs=replace(problem.inputs, scale=scale))
                gradient = torch.empty_like(logits)
                loss_and_grad(backend)(logits, scaled, gradient)
            if on_logp is not None or on_entropy is not None:
                part = _logprob_gradient(logits, problem, backend, on_logp, on_entropy)
                gradient = part if gradient is None else gradient.add_(part)
        return gradient, None, None


def _logprob_gradient(
    logits: Tensor, problem: LossProblem, backend: str, on_logp: Tensor | None, on_entropy: Tensor | None
) -> Tensor:
    passes = logprob_passes(backend)
    selection = Selection(problem.inputs, problem.trained, problem.shard)
    _, _, entropy, saved = passes.forward(logits, selection)
    if on_logp is None:
        on_logp = torch.zeros_like(entropy)
    on_candidates = entropy.new_zeros(problem.inputs.num_candidates)
    gradient: Tensor = passes.backward(logits, selection, saved, (on_logp, on_candidates, on_entropy))
    return gradient


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


def needs_gradient(*inputs: Tensor | None) -> tuple[bool, ...]:
    """Which inputs get a gradient from the current call: none under ``no_grad``.

    Asked before ``apply``: inside it grad mode is always off, and ``ctx.needs_input_grad`` ignores the mode.
    """
    return tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs)


def scaled_loss(results: Tensor, problem: LossProblem, reduce: bool) -> Tensor:
    """Σ scale·loss or scale·loss; a token whose scale is 0 gives 0 even if its loss is NaN."""
    loss = safe_mul(problem.inputs.scale.to(results.dtype), results[0])
    return loss.sum() if reduce else loss


def rescaled_for_fp16(problem: LossProblem, dtype: torch.dtype) -> tuple[LossProblem, Tensor | None]:
    """For fp16, a problem whose largest scale · |advantage| is about 1, and the factor taken out; else the problem.

    A gradient divided by the number of tokens is below fp16's range long before the loss scale multiplies it.
    """
    inputs = problem.inputs
    if dtype != torch.float16 or inputs.scale.numel() == 0:
        return problem, None
    advantages = inputs.advantages.abs().nan_to_num(0.0, posinf=0.0)
    if problem.trained is not None:
        advantages = torch.where(problem.trained, advantages, 0.0)
    scale = inputs.scale.max().clamp(min=torch.finfo(torch.float64).tiny) * advantages.max().clamp(min=1.0)
    scale = scale.log2().ceil().exp2()  # a power of two, so that dividing and multiplying round nothing
    return replace(problem, inputs=replace(inputs, scale=inputs.scale / scale)), scale


class PrecomputedGrads:
    """Gradients computed in forward; backward multiplies them by the upstream gradient.

    ``dtypes`` are those that autograd receives; a gradient may be stored in a wider one. ``fp16_scale`` is the
    factor that `rescaled_for_fp16` took out.
    """

    def __init__(
        self,
        gradients: list[Tensor | None],
        dtypes: list[torch.dtype],
        backend: str,
        fp16_scale: Tensor | None = None,
    ) -> None:
        self.gradients: list[Tensor | None] | None = gradients
        # nobody else reaches a buffer that a compiler places
        traced = torch.compiler.is_compiling()
        self.versions = [None if g is None or traced else g._version for g in gradients]
        self.dtypes, self.backend, self.fp16_scale = dtypes, backend, fp16_scale

    def times(self, upstream: Tensor) -> list[Tensor | None]:
        """upstream · gradient, ``upstream`` a scalar.

        Written over the stored gradient, unless the graph is kept for another backward pass.

        Raises:
            RuntimeError: the gradient was returned by an earlier backward pass, or someone wrote into it.
        """
        factor = upstream if self.fp16_scale is None else upstream * self.fp16_scale
        gradients = self.gradients
        if gradients is None:
            raise RuntimeError(
                "the gradient was returned by an earlier backward pass: pass retain_graph=True there"
            )
        stored = list(zip(gradients, self.dtypes, strict=True))
        if torch.compiler.is_compiling():
            return [None if g is None else (g * factor).to(dtype) for g, dtype in stored]
        for gradient, version in zip(gradients, self.versions, strict=True):
            if gradient is not None and gradient._version != version:
                raise RuntimeError(
                    "the gradient was overwritten between forward and backward: with inplace=True it lives in "
                    "the logits. Use inplace=False, or do not write into the logits"
                )
        keep = _graph_is_kept()
        if not keep:
            self.gradients = None
        return [None if g is None else self._scaled(g, factor, keep).to(dtype) for g, dtype in stored]

    def _scaled(self, gradient: Tensor, factor: Tensor, keep: bool) -> Tensor:
        out = gradient.clone() if keep else gradient
        return rescale_(self.backend, out, factor)


def _graph_is_kept() -> bool:
    """Whether this backward was called with retain_graph; assumed where torch cannot tell."""
    probe = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if probe is None else bool(probe())
