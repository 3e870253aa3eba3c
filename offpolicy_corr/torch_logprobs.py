"""Row passes: the PyTorch path of `selected_logprobs`, log-probs forward and the logits' gradient backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .centering import row_gradient
from .csr import segment_sum
from .loss_inputs import LossInputs, VocabShard
from .numerics import safe_mul
from .replay import trainer_logprobs
from .rows import RowGradient, TrainerLogprobs
from .torch_loss import (
    chunk_scratch,
    gradient_by_blocks,
    row_stats,
    tile_workers,
    trained_rows,
    zero_rows,
)


@dataclass(frozen=True, eq=False)
class Selection:
    """What is selected from ``T`` rows of logits; ``trained`` None means all of them."""

    inputs: LossInputs
    trained: Tensor | None
    shard: VocabShard


# the upstream gradients of (logp, candidate_logp, entropy); None for the entropy saves its part of the backward pass
Upstream = tuple[Tensor, Tensor, "Tensor | None"]


class SavedForBackward(NamedTuple):
    """What the backward pass needs besides the logits: per trained row, and per candidate of those rows."""

    row_max: Tensor
    log_sum_exp: Tensor
    entropy: Tensor
    token_logp: Tensor
    candidate_logp: Tensor


def forward(logits: Tensor, selection: Selection) -> tuple[Tensor, Tensor, Tensor, SavedForBackward]:
    """(logp ``[T]``, candidate_logp ``[nnz]``, entropy ``[T]``, saved); 0 at masked tokens."""
    rows, candidate_positions = _trained_positions(selection)
    inputs = selection.inputs if rows is None else selection.inputs.select(rows)
    stats = row_stats(logits, rows, inputs, selection.shard)
    trainer = trainer_logprobs(stats, inputs.candidates)
    token_logp, candidate_logp = trainer.token_logprob, trainer.candidate_logprobs
    saved = SavedForBackward(stats.row_max, stats.sum_exp.log(), trainer.entropy, token_logp, candidate_logp)
    if rows is None:
        return token_logp, candidate_logp, trainer.entropy, saved
    logp, entropy = (
        v.new_zeros(len(selection.inputs)).index_copy_(0, rows, v) for v in (token_logp, trainer.entropy)
    )
    everywhere = candidate_logp.new_zeros(selection.inputs.num_candidates)
    return logp, everywhere.index_copy_(0, candidate_positions, candidate_logp), entropy, saved


def backward(logits: Tensor, selection: Selection, saved: SavedForBackward, upstream: Upstream) -> Tensor:
    """∂/∂logits of ⟨upstream, (logp, candidate_logp, entropy)⟩, same shape and dtype as ``logits``."""
    rows, candidate_positions = _trained_positions(selection)
    inputs = selection.inputs if rows is None else selection.inputs.select(rows)
    on_token, on_candidates, on_entropy = upstream
    if rows is not None:
        on_token, on_candidates = on_token[rows], on_candidates[candidate_positions]
        on_entropy = None if on_entropy is None else on_entropy[rows]
    whole = upstream_gradient(inputs, saved, (on_token, on_candidates, on_entropy))
    gradient = torch.empty_like(logits)
    zero_rows(gradient, selection.shard, selection.trained if rows is not None else None)
    columns, target = (t[:, : selection.shard.width] for t in (logits, gradient))
    first_id = selection.shard.first_id
    with tile_workers(columns, len(inputs)) as workers:
        scratch = chunk_scratch(columns, workers)
        gradient_by_blocks(columns, rows, inputs, whole, saved.row_max, target, first_id, scratch)
    return gradient


def upstream_gradient(inputs: LossInputs, saved: SavedForBackward, upstream: Upstream) -> RowGradient:
    """The gradient of the trained rows in closed form; ``upstream`` may have any dtype and layout."""
    dtype = saved.entropy.dtype
    on_token, on_candidates = (u.to(dtype).contiguous() for u in upstream[:2])
    entropy_coef = None if upstream[2] is None else -upstream[2].to(dtype).contiguous()
    total, candidate_grads = on_token, None
    if inputs.candidates is not None:
        total = total + segment_sum(on_candidates, inputs.candidates.offsets)
        candidate_probs = saved.candidate_logp.exp()
        candidate_grads = on_candidates - safe_mul(total[inputs.candidates.rows], candidate_probs)
    unused = torch.empty(0, dtype=dtype, device=on_token.device)
    trainer = TrainerLogprobs(saved.token_logp, saved.candidate_logp, saved.entropy, unused, unused, unused)
    return row_gradient(inputs, trainer, -total, candidate_grads, -on_token, entropy_coef, saved.log_sum_exp)


def _trained_positions(selection: Selection) -> tuple[Tensor | None, Tensor]:
    """Trained rows (None: all) and the positions of their candidates."""
    rows = trained_rows(selection.trained)
    candidates = selection.inputs.candidates
    if rows is None or candidates is None:
        return rows, torch.zeros(0, dtype=torch.int64, device=selection.inputs.tokens.device)
    assert selection.trained is not None
    return rows, selection.trained[candidates.rows].nonzero().squeeze(1)
