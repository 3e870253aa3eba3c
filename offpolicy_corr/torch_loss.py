"""The PyTorch path over materialized logits: rows in chunks, loss and gradient in one visit to each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .centering import TokenLoss, closed_form
from .loss_inputs import Settings, Terms
from .replay import from_statistics
from .result import FIELDS, pack
from .row_passes import RowBlock, RowGradient, RowStats, Scratch, compute_dtype
from .vocab_parallel import VocabShard, share_peak, share_sums

# elements: a tile stays in a core's cache, a block is large enough that per-row arithmetic does not count
_TILE_ON_CPU = 2**18
_BLOCK_ON_CPU = 2**23
_BLOCK_ON_GPU = 2**26


@dataclass(frozen=True, eq=False)
class Job:
    """A loss over ``T`` rows of logits: constants, which tokens are trained (None: all), and the shard."""

    terms: Terms
    trained: Tensor | None
    settings: Settings
    shard: VocabShard


def visit(logits: Tensor, job: Job, gradient: Tensor | None) -> Tensor:
    """Loss and diagnostics of every token, ``[len(FIELDS), T]`` in the order of `FIELDS`, 0 on masked tokens.

    The gradient of Σ scale·loss with respect to ``logits`` is written to ``gradient`` where one is given, a
    tensor of the same shape, possibly ``logits`` itself. Masked rows and padding columns get 0; their contents
    are never read.
    """
    rows = trained_rows(job.trained)
    terms = job.terms if rows is None else job.terms.select(rows)
    columns = logits[:, : job.shard.width]
    if gradient is not None:
        clear(gradient, job.shard, None if rows is None else job.trained)
        gradient = gradient[:, : job.shard.width]
    scratch = chunk_scratch(logits, job.shard.width)
    results = torch.empty(len(FIELDS), len(terms), dtype=compute_dtype(logits.dtype), device=logits.device)
    if job.shard.group is None:
        for span, _, part in terms.chunks(scratch.rows):
            block = RowBlock(take(columns, rows, span), part, scratch)
            stats = block.statistics()
            token = _evaluate(stats, part, job.settings, results[:, span])
            if gradient is not None:
                write(block, token.gradient, stats.peak, gradient, rows, span)
    else:
        stats = sharded_statistics(columns, rows, terms, job.shard)
        token = _evaluate(stats, terms, job.settings, results)
        if gradient is not None:
            for span, owned, part in terms.chunks(scratch.rows):
                block = RowBlock(take(columns, rows, span), part, scratch, job.shard.first_id)
                block.revisit(stats.peak[span])
                write(block, token.gradient.narrow(span, owned), stats.peak[span], gradient, rows, span)
    if gradient is not None:
        # a dropped sequence is silent even where its logits are not numbers
        dropped = (terms.scale == 0).nonzero().squeeze(1)
        gradient.index_fill_(0, dropped if rows is None else rows[dropped], 0.0)
    if rows is None:
        return results
    everywhere = results.new_zeros(len(FIELDS), len(job.terms))
    return everywhere.index_copy_(1, rows, results)


def statistics(logits: Tensor, rows: Tensor | None, terms: Terms, shard: VocabShard) -> RowStats:
    """`RowStats` of ``rows`` of the logits (None: all), whose terms are ``terms``; no gradient."""
    columns = logits[:, : shard.width]
    if shard.group is not None:
        return sharded_statistics(columns, rows, terms, shard)
    scratch = chunk_scratch(logits, shard.width)
    parts = [
        RowBlock(take(columns, rows, span), part, scratch).statistics()
        for span, _, part in terms.chunks(scratch.rows)
    ]
    return _join(parts, logits)


def sharded_statistics(columns: Tensor, rows: Tensor | None, terms: Terms, shard: VocabShard) -> RowStats:
    """`RowStats` of vocabulary-parallel rows: local maxima, a collective, local sums, a collective."""
    scratch = chunk_scratch(columns, shard.width)
    dtype = compute_dtype(columns.dtype)
    peak = torch.full((len(terms),), -torch.inf, dtype=dtype, device=columns.device)
    if shard.width:
        for span, _, _ in terms.chunks(scratch.rows):
            peak[span] = take(columns, rows, span).amax(1).to(dtype)
    peak = share_peak(peak, shard)
    parts = [
        RowBlock(take(columns, rows, span), part, scratch, shard.first_id).statistics(peak[span])
        for span, _, part in terms.chunks(scratch.rows)
    ]
    return share_sums(_join(parts, columns), terms, shard)


def _evaluate(stats: RowStats, terms: Terms, settings: Settings, out: Tensor) -> TokenLoss:
    trainer = from_statistics(stats, terms.candidates)
    token = closed_form(settings, terms, trainer, stats.total.log())
    out.copy_(pack(token.loss, token.correction, token.coefficients, trainer))
    return token


def _join(parts: list[RowStats], logits: Tensor) -> RowStats:
    empty = torch.zeros(0, dtype=compute_dtype(logits.dtype), device=logits.device)
    names = ("peak", "total", "tail", "moment", "token", "candidates")
    return RowStats(*(torch.cat([empty, *(getattr(part, name) for part in parts)]) for name in names))


def trained_rows(trained: Tensor | None) -> Tensor | None:
    """Positions of trained tokens, or None where that is all of them."""
    if trained is None:
        return None
    rows = trained.nonzero().squeeze(1)
    return None if rows.numel() == trained.numel() else rows


def chunk_scratch(logits: Tensor, width: int) -> Scratch:
    """Memory for blocks of rows of ``width`` columns."""
    on_cpu = logits.device.type == "cpu"
    return Scratch(logits, width, *((_BLOCK_ON_CPU, _TILE_ON_CPU) if on_cpu else (_BLOCK_ON_GPU,) * 2))


def take(columns: Tensor, rows: Tensor | None, span: slice) -> Tensor:
    """The logits of a run of trained rows: a view where all rows are trained."""
    return columns[span] if rows is None else columns.index_select(0, rows[span])


def write(
    block: RowBlock,
    row_gradient: RowGradient,
    peak: Tensor,
    gradient: Tensor,
    rows: Tensor | None,
    span: slice,
) -> None:
    """Write a block's gradient to the rows that `take` took."""
    if rows is None:
        block.gradient(row_gradient, peak, gradient[span])
    else:
        values = gradient.new_empty(block.logits.shape)
        block.gradient(row_gradient, peak, values)
        gradient.index_copy_(0, rows[span], values)


def clear(gradient: Tensor, shard: VocabShard, trained: Tensor | None) -> None:
    """0 on padding columns and on the rows that are not ``trained`` (None: no such rows)."""
    gradient[:, shard.width :].zero_()
    if trained is not None:
        gradient.index_fill_(0, (~trained).nonzero().squeeze(1), 0.0)
