"""Mask replay through the LM head: a complete row needs only the head's rows of its own candidates.

On such a row the trainer's distribution lives on the recorded set S, so loss and gradients touch ``|S|`` rows of
the head instead of ``V``: ``6·T·|S|·D`` FLOPs where the dense way spends ``6·T·V·D``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .centering import closed_form
from .csr import segment_logsumexp
from .loss_inputs import Settings, Terms
from .replay import TrainerLogprobs, support_entropy
from .result import pack
from .row_passes import compute_dtype

if TYPE_CHECKING:
    from .hidden import HeadGradients, LMHead

# elements of the head's rows gathered at a time
_GATHERED = 2**22
_GATHERED_ON_GPU = 2**27


def visit_supports(
    head: LMHead, terms: Terms, settings: Settings, rows: Tensor, gradients: HeadGradients
) -> Tensor:
    """Results ``[len(FIELDS), R]`` of complete rows; ``rows`` are their positions in ``head.hidden``.

    ``trainer_head_mass`` is NaN: the rest of the vocabulary is never visited.
    """
    elements = _GATHERED if head.weight.device.type == "cpu" else _GATHERED_ON_GPU
    budget = max(1, elements // head.weight.shape[1])
    parts = []
    for span, _, part in terms.chunks(len(terms), budget):
        parts.append(_visit(head, part, settings, rows[span], gradients))
    return torch.cat(parts, 1)


def _visit(head: LMHead, terms: Terms, settings: Settings, rows: Tensor, gradients: HeadGradients) -> Tensor:
    candidates = terms.candidates
    assert candidates is not None
    dtype = compute_dtype(head.hidden.dtype)
    ids, owner, offsets = candidates.ids.to(torch.int64), candidates.rows, candidates.offsets
    weight, hidden = head.weight[ids].to(dtype), head.hidden[rows].to(dtype)
    logits = torch.linalg.vecdot(weight, hidden[owner])
    if head.bias is not None:
        logits = logits + head.bias[ids].to(dtype)
    slope = torch.ones_like(logits)
    if head.softcap is not None:
        squashed = (logits / head.softcap).tanh()
        logits, slope = squashed * head.softcap, 1 - squashed.square()
    temperature = terms.temperature
    cooling = temperature.to(dtype)[owner] if isinstance(temperature, Tensor) else temperature
    logits, slope = logits / cooling, slope / cooling

    peak, log_norm = segment_logsumexp(logits, offsets, owner)
    logp = logits - peak[owner] - log_norm[owner]
    is_token = ids == terms.tokens[owner]
    token = torch.full_like(log_norm, -torch.inf).index_put_((owner[is_token],), logp[is_token])
    unknown = torch.full_like(token, torch.nan)
    entropy = support_entropy(logp, candidates)
    trainer = TrainerLogprobs(token, logp, entropy, unknown, unknown, log_norm.isfinite())
    loss = closed_form(settings, terms, trainer, log_norm)
    if gradients.wanted:
        pull = (loss.gradient.candidates * slope)[:, None]
        _accumulate(gradients, pull, ids, owner, weight, hidden, rows)
    return pack(loss.loss, loss.correction, loss.coefficients, trainer)


def _accumulate(
    gradients: HeadGradients,
    slope: Tensor,
    ids: Tensor,
    owner: Tensor,
    weight: Tensor,
    hidden: Tensor,
    rows: Tensor,
) -> None:
    if gradients.hidden is not None:
        into = torch.zeros_like(hidden).index_add_(0, owner, slope * weight)
        gradients.hidden.index_copy_(0, rows, into.to(gradients.hidden.dtype))
    if gradients.weight is not None:
        gradients.weight.index_add_(0, ids, slope * hidden[owner])
    if gradients.bias is not None:
        gradients.bias.index_add_(0, ids, slope.squeeze(1))
