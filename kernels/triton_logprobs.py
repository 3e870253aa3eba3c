"""Row passes: `selected_logprobs` on the device, one read of the logits forward, one read and one write backward.

The PyTorch twin is `offpolicy_corr.torch_logprobs`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from offpolicy_corr.replay import trainer_logprobs
from offpolicy_corr.torch_logprobs import SavedForBackward, Selection, Upstream, upstream_gradient

from .launch import contiguous, define, log2e_over_temperature, on_device_of, tiles_for
from .single_pass import row_gradient
from .vocab_parallel import local_row_stats, shared_row_stats

_LN2 = math.log(2.0)


def forward(logits: Tensor, selection: Selection) -> tuple[Tensor, Tensor, Tensor, SavedForBackward]:
    """As the twin's, but ``saved`` has all rows; those of masked tokens hold arbitrary numbers."""
    inputs, trained, shard = selection.inputs, selection.trained, selection.shard
    log2e_over_temps = log2e_over_temperature(inputs, logits.device)
    row_stats = local_row_stats if shard.group is None else shared_row_stats
    stats = row_stats(logits, inputs, trained, shard, log2e_over_temps)
    stats = replace(
        stats,
        sum_d_exp=stats.sum_d_exp * _LN2,
        token_logit=stats.token_logit * _LN2,
        candidate_logits=stats.candidate_logits * _LN2,
    )
    trainer = trainer_logprobs(stats, inputs.candidates)
    logp, candidate_logp, entropy = trainer.token_logprob, trainer.candidate_logprobs, trainer.entropy
    saved = SavedForBackward(stats.row_max, stats.sum_exp.log(), entropy, logp, candidate_logp)
    if trained is not None:
        logp, entropy = torch.where(trained, logp, 0.0), torch.where(trained, entropy, 0.0)
        if inputs.candidates is not None:
            candidate_logp = torch.where(trained[inputs.candidates.rows], candidate_logp, 0.0)
    return logp, candidate_logp, entropy, saved


def backward(logits: Tensor, selection: Selection, saved: SavedForBackward, upstream: Upstream) -> Tensor:
    """As the twin's."""
    inputs, trained, shard = selection.inputs, selection.trained, selection.shard
    gradient = torch.empty_like(logits)
    gradient[:, shard.width :].zero_()
    rows_gradient = upstream_gradient(inputs, saved, upstream)
    log2e_over_temps = log2e_over_temperature(inputs, logits.device)
    inv_temperature = log2e_over_temps * _LN2
    scale = inv_temperature * (-rows_gradient.log_sum_exp).exp()
    # p (prob_coef + entropy_coef (log p + H)) as 2^d (intercept + slope·d)
    intercept, slope = scale * rows_gradient.prob_coef, None
    if rows_gradient.entropy_coef is not None:
        entropy_coef = rows_gradient.entropy_coef
        offset = entropy_coef * (saved.entropy - rows_gradient.log_sum_exp)
        intercept = scale * (rows_gradient.prob_coef + offset)
        slope = scale * entropy_coef * _LN2
    ids = offsets = candidate_grads = token_is_candidate = None
    candidates = inputs.candidates
    if candidates is not None:
        rows = candidates.rows
        ids, offsets = candidates.ids.contiguous(), candidates.offsets.contiguous()
        candidate_grads = rows_gradient.candidate_grads * inv_temperature[rows]
        matches = torch.where(candidates.ids == inputs.tokens[rows], rows, len(inputs))
        token_is_candidate = torch.zeros(len(inputs) + 1, dtype=torch.bool, device=logits.device)
        token_is_candidate = token_is_candidate.index_fill_(0, matches, True)
    _ROW_GRADIENT(
        logits, gradient, inputs.tokens.contiguous(), contiguous(trained), log2e_over_temps, saved.row_max,
        intercept, slope, ids, offsets, candidate_grads, rows_gradient.token_grad * inv_temperature,
        token_is_candidate, shard.width, shard.first_id,
    )  # fmt: skip
    return gradient


def _launch(
    logits: Tensor, gradient: Tensor, tokens: Tensor, trained: Tensor | None, log2e_over_temps: Tensor,
    row_maxima: Tensor, intercepts: Tensor, slopes: Tensor | None, ids: Tensor | None, offsets: Tensor | None,
    candidate_grads: Tensor | None, token_grads: Tensor, token_is_candidate: Tensor | None, width: int, first_id: int,
) -> None:  # fmt: skip
    strides, out_strides = logits.stride(), gradient.stride()
    tiles = tiles_for(width, logits, gradient)
    if len(tokens):
        with on_device_of(logits):
            row_gradient[(len(tokens),)](
                logits, gradient, tokens, trained, log2e_over_temps, row_maxima, intercepts, slopes,
                ids, offsets, candidate_grads, token_grads, token_is_candidate,
                *strides, *out_strides, width, first_id,
                SLOPED=slopes is not None, K_BLOCK=tiles.candidates,
                **tiles.options(logits.dtype, strides[1] == 1 and out_strides[1] == 1),
            )  # fmt: skip


def _fake(*_: object) -> None:
    pass


_ROW_GRADIENT = define(
    "row_gradient",
    "(Tensor logits, Tensor(a!) gradient, Tensor tokens, Tensor? trained, Tensor log2e_over_temps, "
    "Tensor row_maxima, Tensor intercepts, Tensor? slopes, Tensor? ids, Tensor? offsets, Tensor? candidate_grads, "
    "Tensor token_grads, Tensor? token_is_candidate, SymInt width, SymInt first_id) -> ()",
    ("gradient",),
    _launch,
    _fake,
)
