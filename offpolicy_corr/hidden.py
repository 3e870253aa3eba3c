"""The loss from hidden states: the LM head, the loss and both gradients, one chunk of rows at a time.

Rows whose recorded set is complete need only the candidates' rows of the head (see `sparse_head`); the others
go through the whole head, ``6·T·V·D`` FLOPs for loss and gradients and no recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend
from .autograd import Held, at_unit_scale, scaled_loss, wants_gradient
from .lm_head_on_supports import visit_supports
from .result import FIELDS
from .row_passes import compute_dtype
from .torch_loss import Job

_ROWS = 2048  # fewer starve the matrix products and repeat the pass over the weight's fp32 gradient
_LOGITS_ON_CPU = 2**24  # elements of a chunk's logits


@dataclass(frozen=True, eq=False)
class LMHead:
    """``logits = softcap · tanh((hidden @ weight.T + bias) / softcap)``; the cap is optional."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float | None

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> LMHead:
        """Check shapes and dtypes; under autocast the products are made in its dtype.

        Raises:
            ValueError: shapes that do not fit, mixed dtypes outside autocast, a cap that is not positive.
        """
        if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
            shapes = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
            raise ValueError(f"hidden [T, D] and lm_head_weight [V, D] do not fit: {shapes}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must be [V] = ({weight.shape[0]},), got {tuple(bias.shape)}")
        if softcap is not None and not 0 < softcap < float("inf"):
            raise ValueError(f"logit_softcap must be positive and finite, got {softcap}")
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if hidden.dtype != weight.dtype:
            raise ValueError(
                f"hidden is {hidden.dtype} and lm_head_weight {weight.dtype}: cast one, or use autocast"
            )
        return cls(hidden, weight, bias, softcap)


@dataclass(eq=False)
class HeadGradients:
    """Where a sweep accumulates: hidden's gradient by rows, the weight's and the bias's in fp32 (fp64)."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def like(cls, head: LMHead, needed: tuple[bool, ...]) -> HeadGradients:
        def wide(tensor: Tensor) -> Tensor:
            return torch.zeros(tensor.shape, dtype=compute_dtype(tensor.dtype), device=tensor.device)

        return cls(
            torch.zeros_like(head.hidden) if needed[0] else None,
            wide(head.weight) if needed[1] else None,
            wide(head.bias) if needed[2] and head.bias is not None else None,
        )

    @property
    def wanted(self) -> bool:
        return any(g is not None for g in (self.hidden, self.weight, self.bias))


def loss_from_hidden(head: LMHead, job: Job, chosen: str, reduce: bool) -> tuple[Tensor, Tensor]:
    """(loss, results) as `autograd.LossFromLogits` gives them."""
    wanted = wants_gradient(head.hidden, head.weight, head.bias)
    result: tuple[Tensor, Tensor] = _LossFromHidden.apply(  # type: ignore[no-untyped-call]
        head.hidden, head.weight, head.bias, head.softcap, job, chosen, reduce, wanted
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
        job: Job,
        chosen: str,
        reduce: bool,
        wanted: tuple[bool, ...],
    ) -> tuple[Tensor, Tensor]:
        head = LMHead(hidden.detach(), weight.detach(), None if bias is None else bias.detach(), softcap)
        # a token's own upstream factor must reach the weight's gradient before it is summed over tokens
        ahead = wanted if reduce else (False, False, False)
        held_job, unit = at_unit_scale(job, hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = HeadGradients.like(head, ahead)
            results = sweep(head, held_job, chosen, gradients)
            loss = scaled_loss(results, job, reduce)
        if gradients.wanted:
            dtypes = [t.dtype if t is not None else hidden.dtype for t in (hidden, weight, bias)]
            ctx.held = Held(_finished(gradients, head, job, wide=unit is not None), dtypes, unit)
        ctx.later = None if reduce else (softcap, job, chosen, wanted)
        if any(wanted) and not reduce:
            ctx.save_for_backward(hidden, weight, bias)
        ctx.mark_non_differentiable(results)
        return loss, results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.later is None:
            return (*ctx.held.times(upstream), None, None, None, None, None)
        softcap, job, chosen, wanted = ctx.later
        hidden, weight, bias = ctx.saved_tensors
        head = LMHead(hidden.detach(), weight.detach(), None if bias is None else bias.detach(), softcap)
        job = replace(job, terms=replace(job.terms, scale=job.terms.scale * upstream))
        with torch.autocast(upstream.device.type, enabled=False):
            gradients = HeadGradients.like(head, wanted)
            sweep(head, job, chosen, gradients)
        return (*_finished(gradients, head, job, wide=False), None, None, None, None, None)


def sweep(head: LMHead, job: Job, chosen: str, gradients: HeadGradients) -> Tensor:
    """Results ``[len(FIELDS), T]`` of all tokens; ``gradients`` receives the sums. Masked rows are left out."""
    terms = job.terms
    rows = torch.arange(len(terms), device=head.hidden.device)
    results = torch.zeros(len(FIELDS), len(terms), dtype=compute_dtype(head.hidden.dtype), device=rows.device)
    trained = torch.ones_like(rows, dtype=torch.bool) if job.trained is None else job.trained
    # a sharded head has the candidates' rows on several ranks: there every row takes the dense way
    sparse = torch.zeros_like(trained)
    if terms.candidates is not None and job.shard.group is None:
        sparse = trained & terms.candidates.complete
    dense_rows = (trained & ~sparse).nonzero().squeeze(1)
    if dense_rows.numel():
        part = terms.select(dense_rows)
        results[:, dense_rows] = _dense_sweep(
            head, replace(job, terms=part, trained=None), chosen, dense_rows, gradients
        )
    sparse_rows = sparse.nonzero().squeeze(1)
    if sparse_rows.numel():
        part = terms.select(sparse_rows)
        results[:, sparse_rows] = visit_supports(head, part, job.settings, sparse_rows, gradients)
    return results


def _dense_sweep(head: LMHead, job: Job, chosen: str, rows: Tensor, gradients: HeadGradients) -> Tensor:
    size = _ROWS
    if head.hidden.device.type == "cpu":
        size = max(1, min(size, _LOGITS_ON_CPU // head.weight.shape[0]))
    parts = []
    for span, _, terms in job.terms.chunks(size):
        hidden = head.hidden[rows[span]]
        logits = hidden @ head.weight.T
        if head.bias is not None:
            logits += head.bias
        slope = None
        if head.softcap is not None:
            squashed = logits.div_(head.softcap).tanh_()
            slope = 1 - squashed.square() if gradients.wanted else None
            logits = squashed.mul_(head.softcap)
        target = logits if gradients.wanted else None
        parts.append(backend.visit(chosen)(logits, replace(job, terms=terms), target))
        if gradients.wanted:
            _accumulate(gradients, head, hidden, logits if slope is None else logits.mul_(slope), rows[span])
    return torch.cat(parts, 1)


def _accumulate(gradients: HeadGradients, head: LMHead, hidden: Tensor, slope: Tensor, rows: Tensor) -> None:
    """Add one chunk: ``slope`` ``[R, V]`` is the gradient with respect to its logits."""
    if gradients.hidden is not None:
        gradients.hidden.index_copy_(0, rows, slope @ head.weight)
    if gradients.weight is not None:
        wide = gradients.weight.dtype
        if slope.dtype != wide and slope.device.type == "cuda":
            torch.addmm(gradients.weight, slope.T, hidden, out_dtype=wide, out=gradients.weight)
        else:
            gradients.weight.addmm_(slope.T.to(wide), hidden.to(wide))
    if gradients.bias is not None:
        gradients.bias += slope.sum(0, dtype=gradients.bias.dtype)


def _finished(gradients: HeadGradients, head: LMHead, job: Job, wide: bool) -> list[Tensor | None]:
    """Sum hidden's gradient over the vocabulary's shards; unless ``wide``, give all their parameters' dtype."""
    if gradients.hidden is not None and job.shard.group is not None:
        dist.all_reduce(gradients.hidden, group=job.shard.group)
    if wide:
        return [gradients.hidden, gradients.weight, gradients.bias]
    pairs = [(gradients.hidden, head.hidden), (gradients.weight, head.weight), (gradients.bias, head.bias)]
    return [None if g is None or like is None else g.to(like.dtype) for g, like in pairs]
