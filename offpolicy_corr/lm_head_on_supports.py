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
from .threads import Workers

# elements of the LM head's rows gathered at a time
_GATHERED = 2**22
_TILE = 2**18
_GATHERED_ON_GPU = 2**27


def loss_on_supports(
    lm_head: LMHead, inputs: LossInputs, config: LossConfig, rows: Tensor, gradients: LMHeadGradients
) -> Tensor:
    """Results ``[len(FIELDS), R]`` of complete rows; ``rows`` are their positions in ``lm_head.hidden``.

    ``trainer_head_mass`` is NaN: the rest of the vocabulary is never read.
    """
    width = lm_head.weight.shape[1]
    on_cpu = lm_head.weight.device.type == "cpu"
    chunk_size, tile_size = (_GATHERED, _TILE) if on_cpu else (_GATHERED_ON_GPU, _GATHERED_ON_GPU)
    max_candidates, tile_candidates = (max(1, size // width) for size in (chunk_size, tile_size))
    chunks = list(inputs.chunks(len(inputs), max_candidates))
    size = max(of.stop - of.start for _, of, _ in chunks)
    buffer = lm_head.weight.new_empty(size, width, dtype=compute_dtype(lm_head.weight.dtype))
    parts = []
    with Workers.for_tiles(lm_head.hidden, -(-size // tile_candidates)) as workers:
        for row_slice, _, chunk in chunks:
            tiles = [(tile, of) for tile, of, _ in chunk.chunks(len(chunk), tile_candidates)]
            gathered = _GatheredRows(lm_head, chunk, rows[row_slice], buffer, tiles, workers)
            parts.append(_loss_of_chunk(gathered, chunk, config, gradients))
    return torch.cat(parts, 1)


class _GatheredRows:
    """The candidates' rows of the LM head ``[nnz, D]``, gathered tile by tile, and the dot products with the hidden
    states.

    A tile is a slice of rows and the slice of their candidates.
    """

    def __init__(
        self,
        lm_head: LMHead,
        inputs: LossInputs,
        rows: Tensor,
        buffer: Tensor,
        tiles: list[tuple[slice, slice]],
        workers: Workers,
    ) -> None:
        candidates = inputs.candidates
        assert candidates is not None
        self.lm_head, self.rows, self.tiles, self.workers = lm_head, rows, tiles, workers
        self.ids, self.owner = candidates.ids.to(torch.int64), candidates.rows
        self.weight = buffer[: len(self.ids)]

    def dot_products(self) -> Tensor:
        """``weight · hidden`` of every candidate, ``[nnz]``."""
        products = self.weight.new_empty(len(self.ids))

        def multiply(_: int, tile: tuple[slice, slice]) -> None:
            of = tile[1]
            self.weight[of] = self.lm_head.weight.index_select(0, self.ids[of])
            products[of] = torch.linalg.vecdot(self.weight[of], self._hidden(of))

        self.workers.run(multiply, self.tiles)
        return products

    def accumulate(self, gradients: LMHeadGradients, dot_grads: Tensor) -> None:
        """Add the gradients of the dot products, ``[nnz]``, to those of hidden states, weight and bias.

        Afterwards ``weight`` holds what was added to the weight's gradient.
        """

        def multiply(_: int, tile: tuple[slice, slice]) -> None:
            row_slice, of = tile
            grads, weight = dot_grads[of, None], self.weight[of]
            if gradients.hidden is not None:
                rows = self.rows[row_slice]
                per_row = weight.new_zeros(len(rows), weight.shape[1])
                per_row.index_add_(0, self.owner[of] - row_slice.start, grads * weight)
                gradients.hidden.index_copy_(0, rows, per_row.to(gradients.hidden.dtype))
            if gradients.weight is not None:
                torch.mul(grads, self._hidden(of), out=weight)

        self.workers.run(multiply, self.tiles)
        # several tiles hold the same ids
        if gradients.weight is not None:
            gradients.weight.index_add_(0, self.ids, self.weight)
        if gradients.bias is not None:
            gradients.bias.index_add_(0, self.ids, dot_grads)

    def _hidden(self, of: slice) -> Tensor:
        return self.lm_head.hidden.index_select(0, self.rows[self.owner[of]]).to(self.weight.dtype)


def _loss_of_chunk(
    gathered: _GatheredRows, inputs: LossInputs, config: LossConfig, gradients: LMHeadGradients
) -> Tensor:
    candidates = inputs.candidates
    assert candidates is not None
    lm_head, ids, owner, dtype = gathered.lm_head, gathered.ids, gathered.owner, gathered.weight.dtype
    logits = gathered.dot_products()
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
        gathered.accumulate(gradients, token_loss.gradient.candidate_grads * logit_slope)
    return pack_results(token_loss.loss, token_loss.centering_term, token_loss.coefficients, trainer)
