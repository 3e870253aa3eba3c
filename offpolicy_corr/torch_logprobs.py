"""The PyTorch path of `selected_logprobs`: log-probs forward, the logits' gradient backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .centering import entropy_slope, product
from .csr import segment_sum
from .loss_inputs import Terms
from .replay import from_statistics
from .row_passes import RowBlock, RowGradient
from .torch_loss import chunk_scratch, clear, statistics, take, trained_rows, write
from .vocab_parallel import VocabShard


@dataclass(frozen=True, eq=False)
class Selection:
    """What is selected from ``T`` rows of logits; ``trained`` None means all of them."""

    terms: Terms
    trained: Tensor | None
    shard: VocabShard

    @property
    def candidates(self) -> int:
        """How many candidates all rows have together."""
        return 0 if self.terms.candidates is None else self.terms.candidates.ids.numel()


# what autograd hands over for (logp, candidate_logp, entropy); an entropy that nobody differentiates costs nothing
Upstream = tuple[Tensor, Tensor, "Tensor | None"]


class Saved(NamedTuple):
    """What the backward pass needs besides the logits: per trained row, per candidate of those rows."""

    peak: Tensor
    log_total: Tensor
    entropy: Tensor
    token_logp: Tensor
    candidate_logp: Tensor


def forward(logits: Tensor, selection: Selection) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """(logp ``[T]``, candidate_logp ``[nnz]``, entropy ``[T]``, saved); 0 at masked tokens."""
    terms = selection.terms
    rows, owned = _compact(selection)
    part = terms if rows is None else terms.select(rows)
    stats = statistics(logits, rows, part, selection.shard)
    trainer = from_statistics(stats, part.candidates)
    saved = Saved(stats.peak, stats.total.log(), trainer.entropy, trainer.token, trainer.candidates)
    if rows is None:
        return trainer.token, trainer.candidates, trainer.entropy, saved
    logp, entropy = (
        trainer.token.new_zeros(len(terms)).index_copy_(0, rows, v) for v in (trainer.token, trainer.entropy)
    )
    candidate_logp = trainer.candidates.new_zeros(selection.candidates)
    return logp, candidate_logp.index_copy_(0, owned, trainer.candidates), entropy, saved


def backward(logits: Tensor, selection: Selection, saved: Saved, upstream: Upstream) -> Tensor:
    """∂/∂logits of ⟨upstream, (logp, candidate_logp, entropy)⟩, same shape and dtype as ``logits``."""
    rows, owned = _compact(selection)
    terms = selection.terms if rows is None else selection.terms.select(rows)
    on_token, on_candidates, on_entropy = upstream
    if rows is not None:
        on_token, on_candidates = on_token[rows], on_candidates[owned]
        on_entropy = None if on_entropy is None else on_entropy[rows]
    whole = row_gradient(terms, saved, (on_token, on_candidates, on_entropy))
    gradient = torch.empty_like(logits)
    clear(gradient, selection.shard, selection.trained if rows is not None else None)
    columns, target = (t[:, : selection.shard.width] for t in (logits, gradient))
    scratch = chunk_scratch(logits, selection.shard.width)
    for span, candidates, part in terms.chunks(scratch.rows):
        block = RowBlock(take(columns, rows, span), part, scratch, selection.shard.first_id)
        peak = saved.peak[span]
        block.revisit(peak)
        write(block, whole.narrow(span, candidates), peak, target, rows, span)
    return gradient


def row_gradient(terms: Terms, saved: Saved, upstream: Upstream) -> RowGradient:
    """The gradient of the trained rows in closed form; ``upstream`` may have any dtype and layout."""
    on_token, on_candidates = (u.to(saved.entropy.dtype).contiguous() for u in upstream[:2])
    bonus = None if upstream[2] is None else -upstream[2].to(saved.entropy.dtype).contiguous()
    pull, values, candidates = on_token, saved.candidate_logp, terms.candidates
    if candidates is not None:
        rows = candidates.rows
        pull = pull + segment_sum(on_candidates, candidates.offsets)
        values = on_candidates - product(pull[rows], saved.candidate_logp.exp())
        values = values + torch.where(candidates.ids == terms.tokens[rows], on_token[rows], 0.0)
        if bonus is not None:
            values = values + bonus[rows] * entropy_slope(saved.candidate_logp, saved.entropy[rows])
            bonus = bonus.masked_fill(candidates.complete, 0.0)
        pull = pull.masked_fill(candidates.complete, 0.0)
    token = on_token - product(pull, saved.token_logp.exp())
    if bonus is None:
        return RowGradient(-pull, values, token, saved.log_total)
    token = token + bonus * entropy_slope(saved.token_logp, saved.entropy)
    return RowGradient(-pull, values, token, saved.log_total, bonus, -saved.entropy)


def _compact(selection: Selection) -> tuple[Tensor | None, Tensor]:
    """Trained rows (None: all) and the positions of their candidates."""
    rows = trained_rows(selection.trained)
    candidates = selection.terms.candidates
    if rows is None or candidates is None:
        return rows, torch.zeros(0, dtype=torch.int64, device=selection.terms.tokens.device)
    assert selection.trained is not None
    return rows, selection.trained[candidates.rows].nonzero().squeeze(1)
