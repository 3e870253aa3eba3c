"""`selected_logprobs` on the device: one read of the logits forward, one read and one write backward."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from offpolicy_corr.replay import from_statistics
from offpolicy_corr.torch_logprobs import Saved, Selection, Upstream
from offpolicy_corr.torch_logprobs import row_gradient as closed_form

from .launch import contiguous, define, on_device_of, sharpness, tiles_for
from .single_pass import row_gradient
from .vocab_parallel import local_statistics, shared_statistics

_LN2 = math.log(2.0)


def forward(logits: Tensor, selection: Selection) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """`offpolicy_corr.pair.forward`, without compaction: ``saved`` has all rows, masked ones hold anything."""
    terms, trained, shard = selection.terms, selection.trained, selection.shard
    heat = sharpness(terms, logits.device)
    statistics = local_statistics if shard.group is None else shared_statistics
    stats = statistics(logits, terms, trained, shard, heat)
    stats = replace(
        stats, moment=stats.moment * _LN2, token=stats.token * _LN2, candidates=stats.candidates * _LN2
    )
    trainer = from_statistics(stats, terms.candidates)
    saved = Saved(stats.peak, stats.total.log(), trainer.entropy, trainer.token, trainer.candidates)
    logp, candidate_logp, entropy = trainer.token, trainer.candidates, trainer.entropy
    if trained is not None:
        logp, entropy = torch.where(trained, logp, 0.0), torch.where(trained, entropy, 0.0)
        if terms.candidates is not None:
            candidate_logp = torch.where(trained[terms.candidates.rows], candidate_logp, 0.0)
    return logp, candidate_logp, entropy, saved


def backward(logits: Tensor, selection: Selection, saved: Saved, upstream: Upstream) -> Tensor:
    """`offpolicy_corr.pair.backward`."""
    terms, trained, shard = selection.terms, selection.trained, selection.shard
    gradient = torch.empty_like(logits)
    gradient[:, shard.width :].zero_()
    whole = closed_form(terms, saved, upstream)
    heat = sharpness(terms, logits.device)
    cooling = heat * _LN2
    scale = cooling * (-whole.log_total).exp()
    level, slope = scale * whole.dense, None
    if whole.entropy is not None:
        level = scale * (whole.dense + whole.entropy * (saved.entropy - whole.log_total))
        slope = scale * whole.entropy * _LN2
    ids = offsets = values = listed = None
    candidates = terms.candidates
    if candidates is not None:
        rows = candidates.rows
        ids, offsets = candidates.ids.contiguous(), candidates.offsets.contiguous()
        values = whole.candidates * cooling[rows]
        hits = torch.where(candidates.ids == terms.tokens[rows], rows, len(terms))
        listed = torch.zeros(len(terms) + 1, dtype=torch.bool, device=logits.device).index_fill_(
            0, hits, True
        )
    _GRADIENT(
        logits, gradient, terms.tokens.contiguous(), contiguous(trained), heat, saved.peak, level, slope,
        ids, offsets, values, whole.token * cooling, listed, shard.width, shard.first_id,
    )  # fmt: skip
    return gradient


def _launch(
    logits: Tensor, gradient: Tensor, tokens: Tensor, trained: Tensor | None, heat: Tensor, peak: Tensor,
    level: Tensor, slope: Tensor | None, ids: Tensor | None, offsets: Tensor | None, on_candidates: Tensor | None,
    on_token: Tensor, listed: Tensor | None, width: int, first_id: int,
) -> None:  # fmt: skip
    strides, out_strides = logits.stride(), gradient.stride()
    tiles = tiles_for(width, logits, gradient)
    if len(tokens):
        with on_device_of(logits):
            row_gradient[(len(tokens),)](
                logits, gradient, tokens, trained, heat, peak, level, slope,
                ids, offsets, on_candidates, on_token, listed, *strides, *out_strides, width, first_id,
                SLOPED=slope is not None, K_BLOCK=tiles.candidates,
                **tiles.options(logits.dtype, strides[1] == 1 and out_strides[1] == 1),
            )  # fmt: skip


def _fake(*_: object) -> None:
    pass


_GRADIENT = define(
    "row_gradient",
    "(Tensor logits, Tensor(a!) gradient, Tensor tokens, Tensor? trained, Tensor heat, Tensor peak, Tensor level, "
    "Tensor? slope, Tensor? ids, Tensor? offsets, Tensor? on_candidates, Tensor on_token, Tensor? listed, "
    "SymInt width, SymInt first_id) -> ()",
    ("gradient",),
    _launch,
    _fake,
)
