"""Row passes: the LM head and the loss in chunks of rows, with both gradients; logits of size [T, V] never exist.

``6·T·V·D`` FLOPs for loss and gradients, and no recomputation. Rows whose recorded set is complete need only their
candidates' rows of the LM head: see `lm_head_on_supports`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .backend import loss_and_grad
from .loss_inputs import LossProblem
from .numerics import compute_dtype

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
class LMHeadGradients:
    """Where gradients accumulate: hidden's by rows, the weight's and the bias's summed in fp32 (fp64). None: not
    needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros_for(cls, lm_head: LMHead, needed: tuple[bool, ...]) -> LMHeadGradients:
        def wide(tensor: Tensor) -> Tensor:
            return torch.zeros(tensor.shape, dtype=compute_dtype(tensor.dtype), device=tensor.device)

        return cls(
            torch.zeros_like(lm_head.hidden) if needed[0] else None,
            wide(lm_head.weight) if needed[1] else None,
            wide(lm_head.bias) if needed[2] and lm_head.bias is not None else None,
        )

    @property
    def wanted(self) -> bool:
        """Whether any gradient is computed at all."""
        return any(g is not None for g in (self.hidden, self.weight, self.bias))


def loss_on_vocabulary(
    lm_head: LMHead, problem: LossProblem, backend: str, rows: Tensor, gradients: LMHeadGradients
) -> Tensor:
    """Results ``[len(FIELDS), R]`` of rows that need the whole vocabulary, one chunk of logits at a time.

    ``rows`` are the positions of ``problem``'s tokens in ``lm_head.hidden``; ``gradients`` receives the sums.
    """
    size = _ROWS
    if lm_head.hidden.device.type == "cpu":
        size = max(1, min(size, _LOGITS_ON_CPU // lm_head.weight.shape[0]))
    parts = []
    for row_slice, _, inputs in problem.inputs.chunks(size):
        hidden = lm_head.hidden[rows[row_slice]]
        logits = hidden @ lm_head.weight.T
        if lm_head.bias is not None:
            logits += lm_head.bias
        cap_slope = None
        if lm_head.softcap is not None:
            squashed = logits.div_(lm_head.softcap).tanh_()
            cap_slope = 1 - squashed.square() if gradients.wanted else None
            logits = squashed.mul_(lm_head.softcap)
        target = logits if gradients.wanted else None
        parts.append(loss_and_grad(backend)(logits, replace(problem, inputs=inputs), target))
        if gradients.wanted:
            logit_grads = logits if cap_slope is None else logits.mul_(cap_slope)
            _accumulate(gradients, lm_head, hidden, logit_grads, rows[row_slice])
    return torch.cat(parts, 1)


def _accumulate(
    gradients: LMHeadGradients, lm_head: LMHead, hidden: Tensor, logit_grads: Tensor, rows: Tensor
) -> None:
    """Add one chunk, whose logits have the gradient ``logit_grads`` ``[R, V]``."""
    if gradients.hidden is not None:
        gradients.hidden.index_copy_(0, rows, logit_grads @ lm_head.weight)
    if gradients.weight is not None:
        wide = gradients.weight.dtype
        if logit_grads.dtype != wide and logit_grads.device.type == "cuda":
            torch.addmm(gradients.weight, logit_grads.T, hidden, out_dtype=wide, out=gradients.weight)
        else:
            gradients.weight.addmm_(logit_grads.T.to(wide), hidden.to(wide))
    if gradients.bias is not None:
        gradients.bias += logit_grads.sum(0, dtype=gradients.bias.dtype)
