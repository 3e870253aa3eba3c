"""Row passes: the PyTorch path over materialized logits, rows in chunks, loss and gradient in one read of each row."""

from __future__ import annotations

from collections.abc import Iterator
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
from .threads import Workers
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
    results = torch.empty(len(FIELDS), len(inputs), dtype=compute_dtype(logits.dtype), device=logits.device)
    with tile_workers(columns, len(inputs)) as workers:
        scratch = chunk_scratch(columns, workers)
        if shard.group is None:
            _pass_by_blocks(columns, rows, inputs, problem.config, scratch, results, gradient)
        else:
            stats = _sharded_row_stats(columns, rows, inputs, shard, scratch)
            token_loss = _evaluate(stats, inputs, problem.config, results)
            if gradient is not None:
                whole = token_loss.gradient
                gradient_by_blocks(
                    columns, rows, inputs, whole, stats.row_max, gradient, shard.first_id, scratch
                )
    if gradient is not None:
        # a dropped sequence gets zero gradient even if its logits are NaN
        dropped = (inputs.scale == 0).nonzero().squeeze(1)
        gradient.index_fill_(0, dropped if rows is None else rows[dropped], 0.0)
    if rows is None:
        return results
    everywhere = results.new_zeros(len(FIELDS), len(problem.inputs))
    return everywhere.index_copy_(1, rows, results)


def _pass_by_blocks(
    logits: Tensor,
    rows: Tensor | None,
    inputs: LossInputs,
    config: LossConfig,
    scratch: Scratch,
    results: Tensor,
    gradient: Tensor | None,
) -> None:
    """Results and gradient of rows that hold the whole vocabulary: a block's gradient directly after its statistics."""
    for row_slice, _, chunk in inputs.chunks(scratch.rows):
        block = RowBlock(logits, rows, row_slice, chunk, scratch)
        stats = block.row_stats()
        token_loss = _evaluate(stats, chunk, config, results[:, row_slice])
        if gradient is not None:
            block.gradient(token_loss.gradient, stats.row_max, gradient)


def gradient_by_blocks(
    logits: Tensor,
    rows: Tensor | None,
    inputs: LossInputs,
    row_gradient: RowGradient,
    row_max: Tensor,
    out: Tensor,
    first_id: int,
    scratch: Scratch,
) -> None:
    """Write ``row_gradient`` to ``rows`` of ``out`` (None: all), in a second read of the logits."""
    for row_slice, candidate_slice, chunk in inputs.chunks(scratch.rows):
        block = RowBlock(logits, rows, row_slice, chunk, scratch, first_id)
        block.recompute_exp(row_max[row_slice])
        block.gradient(row_gradient.narrow(row_slice, candidate_slice), row_max[row_slice], out)


def row_stats(logits: Tensor, rows: Tensor | None, inputs: LossInputs, shard: VocabShard) -> RowStats:
    """`RowStats` of ``rows`` of the logits (None: all), whose constants are ``inputs``; no gradient."""
    columns = logits[:, : shard.width]
    with tile_workers(columns, len(inputs)) as workers:
        scratch = chunk_scratch(columns, workers)
        if shard.group is not None:
            return _sharded_row_stats(columns, rows, inputs, shard, scratch)
        parts = [
            RowBlock(columns, rows, row_slice, chunk, scratch).row_stats()
            for row_slice, _, chunk in inputs.chunks(scratch.rows)
        ]
    return _join(parts, logits)


def _sharded_row_stats(
    columns: Tensor, rows: Tensor | None, inputs: LossInputs, shard: VocabShard, scratch: Scratch
) -> RowStats:
    """`RowStats` of vocabulary-parallel rows: local maxima, a collective, local sums, a collective."""
    dtype = compute_dtype(columns.dtype)
    row_max = torch.full((len(inputs),), -torch.inf, dtype=dtype, device=columns.device)

    def blocks() -> Iterator[tuple[slice, RowBlock]]:
        for row_slice, _, chunk in inputs.chunks(scratch.rows):
            yield row_slice, RowBlock(columns, rows, row_slice, chunk, scratch, shard.first_id)

    if shard.width:
        for row_slice, block in blocks():
            row_max[row_slice] = block.row_max()
    row_max = share_row_max(row_max, shard)
    parts = [block.row_stats(row_max[row_slice]) for row_slice, block in blocks()]
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


def tile_workers(columns: Tensor, num_rows: int) -> Workers:
    """Threads for passes over ``num_rows`` rows of logits ``[T, V]``."""
    tile_rows = max(1, _TILE_ON_CPU // max(columns.shape[1], 1))
    return Workers.for_tiles(columns, -(-num_rows // tile_rows))


def chunk_scratch(columns: Tensor, workers: Workers) -> Scratch:
    """Memory for blocks of rows of logits ``[T, V]``."""
    on_cpu = columns.device.type == "cpu"
    sizes = (_BLOCK_ON_CPU, _TILE_ON_CPU) if on_cpu else (_BLOCK_ON_GPU, _BLOCK_ON_GPU)
    return Scratch(columns, *sizes, workers)


def zero_rows(gradient: Tensor, shard: VocabShard, trained: Tensor | None) -> None:
    """0 on padding columns and on the rows that are not ``trained`` (None: no such rows)."""
    gradient[:, shard.width :].zero_()
    if trained is not None:
        gradient.index_fill_(0, (~trained).nonzero().squeeze(1), 0.0)
