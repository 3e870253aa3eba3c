"""Row passes: mask replay through the LM head. A complete row needs only its candidates' rows of the LM head.

On such a row the trainer's distribution lives on the recorded set S, so loss and gradients touch ``|S|`` rows of
the LM head instead of ``V``: ``6·T·|S|·D`` FLOPs where the whole LM head costs ``6·T·V·D``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .centering import closed_form, pack_results
from .lm_head import LMHead, LMHeadGradients
from .loss_inputs import LossConfig, LossInputs
from .numerics import compute_dtype
from .replay import support_entropy, support_logprobs
from .rows import TrainerLogprobs

# elements of the LM head's rows gathered at a time
_GATHERED = 2**22
_GATHERED_ON_GPU = 2**27


def loss_on_supports(
    lm_head: LMHead, inputs: LossInputs, config: LossConfig, rows: Tensor, gradients: LMHeadGradients
) -> Tensor:
    """Results ``[len(FIELDS), R]`` of complete rows; ``rows`` are their positions in ``lm_head.hidden``.

    ``trainer_head_mass`` is NaN: the rest of the vocabulary is never read.
    """
    elements = _GATHERED if lm_head.weight.device.type == "cpu" else _GATHERED_ON_GPU
    max_candidates = max(1, elements // lm_head.weight.shape[1])
    parts = []
    for row_slice, _, chunk in inputs.chunks(len(inputs), max_candidates):
        parts.append(_loss_of_chunk(lm_head, chunk, config, rows[row_slice], gradients))
    return torch.cat(parts, 1)


def _loss_of_chunk(
    lm_head: LMHead, inputs: LossInputs, config: LossConfig, rows: Tensor, gradients: LMHeadGradients
) -> Tensor:
    candidates = inputs.candidates
    assert candidates is not None
    dtype = compute_dtype(lm_head.hidden.dtype)
    ids, owner = candidates.ids.to(torch.int64), candidates.rows
    weight, hidden = lm_head.weight[ids].to(dtype), lm_head.hidden[rows].to(dtype)
    logits = torch.linalg.vecdot(weight, hidden[owner])
    if lm_head.bias is not None:
        logits = logits + lm_head.bias[ids].to(dtype)
    logit_slope = torch.ones_like(logits)
    if lm_head.softcap is not None:
        squashed = (logits / lm_head.softcap).tanh()
        logits, logit_slope = squashed * lm_head.softcap, 1 - squashed.square()
    temperature = inputs.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype)[owner]
    logits, logit_slope = logits / temperature, logit_slope / temperature

    logp, _, log_norm = support_logprobs(logits, candidates)
    is_token = ids == inputs.tokens[owner]
    token_logp = torch.full_like(log_norm, -torch.inf).index_put_((owner[is_token],), logp[is_token])
    unknown = torch.full_like(token_logp, torch.nan)
    entropy = support_entropy(logp, candidates)
    trainer = TrainerLogprobs(token_logp, logp, entropy, unknown, unknown, log_norm.isfinite())
    token_loss = closed_form(config, inputs, trainer, log_norm)
    if gradients.wanted:
        dot_grads = (token_loss.gradient.candidate_grads * logit_slope)[:, None]
        _accumulate(gradients, dot_grads, ids, owner, weight, hidden, rows)
    return pack_results(token_loss.loss, token_loss.centering_term, token_loss.coefficients, trainer)


def _accumulate(
    gradients: LMHeadGradients,
    dot_grads: Tensor,
    ids: Tensor,
    owner: Tensor,
    weight: Tensor,
    hidden: Tensor,
    rows: Tensor,
) -> None:
    """Add one chunk: ``dot_grads`` ``[nnz, 1]`` are the gradients of the candidates' dot products."""
    if gradients.hidden is not None:
        per_row = torch.zeros_like(hidden).index_add_(0, owner, dot_grads * weight)
        gradients.hidden.index_copy_(0, rows, per_row.to(gradients.hidden.dtype))
    if gradients.weight is not None:
        gradients.weight.index_add_(0, ids, dot_grads * hidden[owner])
    if gradients.bias is not None:
        gradients.bias.index_add_(0, ids, dot_grads.squeeze(1))
