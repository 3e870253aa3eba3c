"""Row passes: the PyTorch path over materialized logits, rows in chunks, loss and gradient in one read of each row."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from .centering import TokenLoss, closed_form, pack_results
from .loss_inputs import LossConfig, LossInputs, LossProblem, VocabShard
from .numerics import compute_dtype
from .replay import trainer_logprobs
from .result import FIELDS
from .row_passes import RowBlock, Scratch
from .rows import RowGradient, RowStats
from .vocab_parallel import share_row_max, share_sums

# elements: a tile stays in a core's cache, a block is large enough that per-row arithmetic does not count
_TILE_ON_CPU = 2**18
_BLOCK_ON_CPU = 2**23
_BLOCK_ON_GPU = 2**26


def loss_and_grad(logits: Tensor, problem: LossProblem, gradient: Tensor | None) -> Tensor:
    """Loss and diagnostics of every token, ``[len(FIELDS), T]`` in the order of `FIELDS`, 0 on masked tokens.

    The gradient of Σ scale·loss with respect to ``logits`` is written to ``gradient`` where one is given, a
    tensor of the same shape, possibly ``logits`` itself. Masked rows and padding columns get 0; their contents
    are never read.
    """
    rows = trained_rows(problem.trained)
    inputs = problem.inputs if rows is None else problem.inputs.select(rows)
    shard = problem.shard
    columns = logits[:, : shard.width]
    if gradient is not None:
        zero_rows(gradient, shard, None if rows is None else problem.trained)
        gradient = gradient[:, : shard.width]
    scratch = chunk_scratch(logits, shard.width)
    results = torch.empty(len(FIELDS), len(inputs), dtype=compute_dtype(logits.dtype), device=logits.device)
    if shard.group is None:
        for row_slice, _, chunk in inputs.chunks(scratch.rows):
            block = RowBlock(gather_rows(columns, rows, row_slice), chunk, scratch)
            stats = block.row_stats()
            token_loss = _evaluate(stats, chunk, problem.config, results[:, row_slice])
            if gradient is not None:
                scatter_rows(block, token_loss.gradient, stats.row_max, gradient, rows, row_slice)
    else:
        stats = sharded_row_stats(columns, rows, inputs, shard)
        token_loss = _evaluate(stats, inputs, problem.config, results)
        if gradient is not None:
            whole = token_loss.gradient
            for row_slice, candidate_slice, chunk in inputs.chunks(scratch.rows):
                block = RowBlock(gather_rows(columns, rows, row_slice), chunk, scratch, shard.first_id)
                row_max = stats.row_max[row_slice]
                block.recompute_exp(row_max)
                scatter_rows(
                    block, whole.narrow(row_slice, candidate_slice), row_max, gradient, rows, row_slice
                )
    if gradient is not None:
        # a dropped sequence gets zero gradient even if its logits are NaN
        dropped = (inputs.scale == 0).nonzero().squeeze(1)
        gradient.index_fill_(0, dropped if rows is None else rows[dropped], 0.0)
    if rows is None:
        return results
    everywhere = results.new_zeros(len(FIELDS), len(problem.inputs))
    return everywhere.index_copy_(1, rows, results)


def row_stats(logits: Tensor, rows: Tensor | None, inputs: LossInputs, shard: VocabShard) -> RowStats:
    """`RowStats` of ``rows`` of the logits (None: all), whose constants are ``inputs``; no gradient."""
    columns = logits[:, : shard.width]
    if shard.group is not None:
        return sharded_row_stats(columns, rows, inputs, shard)
    scratch = chunk_scratch(logits, shard.width)
    parts = [
        RowBlock(gather_rows(columns, rows, row_slice), chunk, scratch).row_stats()
        for row_slice, _, chunk in inputs.chunks(scratch.rows)
    ]
    return _join(parts, logits)


def sharded_row_stats(
    columns: Tensor, rows: Tensor | None, inputs: LossInputs, shard: VocabShard
) -> RowStats:
    """`RowStats` of vocabulary-parallel rows: local maxima, a collective, local sums, a collective."""
    scratch = chunk_scratch(columns, shard.width)
    dtype = compute_dtype(columns.dtype)
    row_max = torch.full((len(inputs),), -torch.inf, dtype=dtype, device=columns.device)
    if shard.width:
        for row_slice, _, _ in inputs.chunks(scratch.rows):
            row_max[row_slice] = gather_rows(columns, rows, row_slice).amax(1).to(dtype)
    row_max = share_row_max(row_max, shard)
    parts = [
        RowBlock(gather_rows(columns, rows, row_slice), chunk, scratch, shard.first_id).row_stats(
            row_max[row_slice]
        )
        for row_slice, _, chunk in inputs.chunks(scratch.rows)
    ]
    return share_sums(_join(parts, columns), inputs, shard)


def _evaluate(stats: RowStats, inputs: LossInputs, config: LossConfig, out: Tensor) -> TokenLoss:
    trainer = trainer_logprobs(stats, inputs.candidates)
    token_loss = closed_form(config, inputs, trainer, stats.sum_exp.log())
    out.copy_(pack_results(token_loss.loss, token_loss.centering_term, token_loss.coefficients, trainer))
    return token_loss


def _join(parts: list[RowStats], logits: Tensor) -> RowStats:
    empty = torch.zeros(0, dtype=compute_dtype(logits.dtype), device=logits.device)
    names = [field.name for field in fields(RowStats)]
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


def gather_rows(columns: Tensor, rows: Tensor | None, row_slice: slice) -> Tensor:
    """The logits of consecutive trained rows: a view where all rows are trained."""
    return columns[row_slice] if rows is None else columns.index_select(0, rows[row_slice])


def scatter_rows(
    block: RowBlock,
    row_gradient: RowGradient,
    row_max: Tensor,
    gradient: Tensor,
    rows: Tensor | None,
    row_slice: slice,
) -> None:
    """Write a block's gradient to the rows that `gather_rows` took."""
    if rows is None:
        block.gradient(row_gradient, row_max, gradient[row_slice])
    else:
        values = gradient.new_empty(block.logits.shape)
        block.gradient(row_gradient, row_max, values)
        gradient.index_copy_(0, rows[row_slice], values)


def zero_rows(gradient: Tensor, shard: VocabShard, trained: Tensor | None) -> None:
    """0 on padding columns and on the rows that are not ``trained`` (None: no such rows)."""
    gradient[:, shard.width :].zero_()
    if trained is not None:
        gradient.index_fill_(0, (~trained).nonzero().squeeze(1), 0.0)
