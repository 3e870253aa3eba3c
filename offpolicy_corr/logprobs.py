"""Public: `selected_logprobs`, the log-probs a loss needs, as autograd tensors, without a softmax of size [T, V]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend as backends
from .loss_inputs import LossInputs, VocabShard
from .prepare import check_matrix, refuse_capture
from .records.candidates import CandidateSet
from .records.record import SamplerRecord
from .records.validation import as_mask, check_lengths, check_values
from .torch_logprobs import SavedForBackward, Selection


def selected_logprobs(
    logits: Tensor,
    tokens: Tensor,
    candidates: CandidateSet | None = None,
    temperature: float | Tensor = 1.0,
    loss_mask: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    backend: str = "auto",
    copy: bool = False,
    validate: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the sampled tokens and of the candidates, and the entropy, differentiable in ``logits``.

    On complete rows all three are over the recorded set, elsewhere over the vocabulary. One read of the logits
    forward, one read and one write backward, without the entropy's part where nobody differentiates it; nothing
    of size ``[T, V]`` is kept but the logits themselves.

    Args:
        logits: raw ``[T, V]``, before temperature. They must not be written to before the backward pass;
            autograd raises where they were (except through ``.data``). See ``copy``.
        tokens: sampled ids ``[T]``.
        candidates: `CandidateSet` of ``T`` rows, or None.
        temperature: float or ``[T]``.
        loss_mask: bool or {0, 1} ``[T]``; masked rows are not read, give 0 and receive no gradient.
        process_group, vocab_size, backend: as in `policy_loss`.
        copy: keep a copy of the logits for the backward pass, so that others may write over them.
        validate: check tokens, candidates and temperature, at the cost of a host sync. False skips only that.

    Returns:
        ``(logp [T], candidate_logp [nnz], entropy [T])`` in fp32 (fp64 for fp64), nats; −inf where a logit is.

    Raises:
        RecordError: ids outside the vocabulary, a token absent from its complete set, lengths that disagree.
            ``validate=False`` leaves only the last.
        RuntimeError: validation while a CUDA graph is captured.
    """
    check_matrix("logits", logits, "[T, V]")
    shard = VocabShard.of(logits.shape[1], vocab_size, process_group)
    ids_only = None if candidates is None else replace(candidates, logprobs=None)
    record = SamplerRecord(tokens, None, ids_only, temperature)
    check_lengths(record)
    trained = as_mask(loss_mask, tokens)
    if tokens.shape != logits.shape[:1]:
        raise ValueError(f"tokens must be [T] = ({logits.shape[0]},), got {tuple(tokens.shape)}")
    if validate:
        refuse_capture(logits)
        check_values(record, shard.vocab_size, loss_mask, None)
    backend_name = backends.choose(backend, logits)
    unused = torch.zeros(tokens.shape, device=logits.device)
    inputs = LossInputs(tokens, unused, unused, unused, temperature, ids_only)
    selection = Selection(inputs, trained, shard)
    result: tuple[Tensor, Tensor, Tensor] = _SelectedLogprobs.apply(logits, selection, backend_name, copy)  # type: ignore[no-untyped-call]
    return result


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, selection: Selection, backend_name: str, copy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(logits.device.type, enabled=False):
            logp, candidate_logp, entropy, saved = backends.logprob_passes(backend_name).forward(
                logits.detach(), selection
            )
        # autograd notices writes to what is saved, unless it is a copy that nobody else has
        ctx.save_for_backward(logits.detach().clone() if copy else logits, *saved)
        ctx.selection, ctx.backend_name = selection, backend_name
        ctx.set_materialize_grads(False)
        return logp, candidate_logp, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, on_token: Tensor | None, on_candidates: Tensor | None, on_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, *rest = ctx.saved_tensors
        selection, saved = ctx.selection, SavedForBackward(*rest)
        if on_token is None:
            on_token = saved.entropy.new_zeros(len(selection.inputs))
        if on_candidates is None:
            on_candidates = saved.entropy.new_zeros(selection.inputs.num_candidates)
        with torch.autocast(logits.device.type, enabled=False):
            gradient = backends.logprob_passes(ctx.backend_name).backward(
                logits.detach(), selection, saved, (on_token, on_candidates, on_entropy)
            )
        return gradient, None, None, None
