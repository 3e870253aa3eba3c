"""Autograd: the loss from hidden states, through the whole LM head or through the candidates' rows of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .autograd import PrecomputedGrads, needs_gradient, rescaled_for_fp16, scaled_loss
from .lm_head import LMHead, LMHeadGradients, loss_on_vocabulary
from .lm_head_on_supports import loss_on_supports
from .loss_inputs import LossProblem
from .numerics import compute_dtype
from .result import FIELDS


def loss_from_hidden(
    lm_head: LMHead, problem: LossProblem, backend: str, reduce: bool
) -> tuple[Tensor, Tensor]:
    """(loss, results) as `autograd.LossFromLogits` gives them."""
    needed = needs_gradient(lm_head.hidden, lm_head.weight, lm_head.bias)
    result: tuple[Tensor, Tensor] = _LossFromHidden.apply(  # type: ignore[no-untyped-call]
        lm_head.hidden, lm_head.weight, lm_head.bias, lm_head.softcap, problem, backend, reduce, needed
    )
    return result


class _LossFromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        problem: LossProblem,
        backend: str,
        reduce: bool,
        needed: tuple[bool, ...],
    ) -> tuple[Tensor, Tensor]:
        lm_head = LMHead(hidden.detach(), weight.detach(), None if bias is None else bias.detach(), softcap)
        # with reduction="none" the upstream gradient of each token must be known before the weight's gradient is summed
        in_forward = needed if reduce else (False, False, False)
        fp16_problem, fp16_scale = rescaled_for_fp16(problem, hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = LMHeadGradients.zeros_for(lm_head, in_forward)
            results = loss_by_rows(lm_head, fp16_problem, backend, gradients)
            loss = scaled_loss(results, problem, reduce)
        if gradients.wanted:
            dtypes = [t.dtype if t is not None else hidden.dtype for t in (hidden, weight, bias)]
            summed = _summed_over_ranks(gradients, problem)
            if fp16_scale is None:
                summed = _narrowed(summed, dtypes)
            ctx.gradients = PrecomputedGrads(summed, dtypes, backend, fp16_scale)
        ctx.deferred = None if reduce else (softcap, problem, backend, needed)
        if any(needed) and not reduce:
            ctx.save_for_backward(hidden, weight, bias)
        ctx.mark_non_differentiable(results)
        return loss, results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.deferred is None:
            return (*ctx.gradients.times(upstream), None, None, None, None, None)
        softcap, problem, backend, needed = ctx.deferred
        hidden, weight, bias = ctx.saved_tensors
        lm_head = LMHead(hidden.detach(), weight.detach(), None if bias is None else bias.detach(), softcap)
        with torch.autocast(upstream.device.type, enabled=False):
            gradients = LMHeadGradients.zeros_for(lm_head, needed)
            loss_by_rows(lm_head, problem.scaled_by(upstream), backend, gradients)
        dtypes = [t.dtype if t is not None else hidden.dtype for t in (hidden, weight, bias)]
        narrowed = _narrowed(_summed_over_ranks(gradients, problem), dtypes)
        return (*narrowed, None, None, None, None, None)


def loss_by_rows(lm_head: LMHead, problem: LossProblem, backend: str, gradients: LMHeadGradients) -> Tensor:
    """Results ``[len(FIELDS), T]`` of all tokens; ``gradients`` receives the sums. Masked rows are left out.

    Complete rows go through their candidates' rows of the LM head, the others through all of it.
    """
    inputs, device = problem.inputs, lm_head.hidden.device
    results = torch.zeros(len(FIELDS), len(inputs), dtype=compute_dtype(lm_head.hidden.dtype), device=device)
    trained = problem.trained
    if trained is None:
        trained = torch.ones(len(inputs), dtype=torch.bool, device=device)
    # where the LM head is sharded, several ranks hold the candidates' rows: there every row needs the vocabulary
    on_support = torch.zeros_like(trained)
    if inputs.candidates is not None and problem.shard.group is None:
        on_support = trained & inputs.candidates.complete
    rows = (trained & ~on_support).nonzero().squeeze(1)
    if rows.numel():
        part = replace(problem, inputs=inputs.select(rows), trained=None)
        results[:, rows] = loss_on_vocabulary(lm_head, part, backend, rows, gradients)
    rows = on_support.nonzero().squeeze(1)
    if rows.numel():
        results[:, rows] = loss_on_supports(lm_head, inputs.select(rows), problem.config, rows, gradients)
    return results


def _summed_over_ranks(gradients: LMHeadGradients, problem: LossProblem) -> list[Tensor | None]:
    """All gradients, hidden's summed over the ranks that hold shards of the vocabulary."""
    if gradients.hidden is not None and problem.shard.group is not None:
        dist.all_reduce(gradients.hidden, group=problem.shard.group)
    return [gradients.hidden, gradients.weight, gradients.bias]


def _narrowed(gradients: list[Tensor | None], dtypes: list[torch.dtype]) -> list[Tensor | None]:
    """Every gradient in the dtype of its parameter."""
    return [None if g is None else g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True)]
