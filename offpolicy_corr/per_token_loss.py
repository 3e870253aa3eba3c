"""Public: `token_losses`, the loss per token with its log-probs and entropy, for frameworks that reduce themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from .autograd import TokenLossesFromLogits
from .correction import Correction
from .loss_inputs import VocabShard
from .prepare import LossOptions, check_matrix, prepare
from .records.record import SamplerRecord
from .result import TokenDiagnostics


@dataclass(frozen=True, eq=False)
class TokenLosses:
    """All ``[T]`` and 0 at masked positions.

    Args:
        loss: the policy term of each token; no denominator, no entropy bonus, no KL. Differentiable.
        logprobs: the trainer's log p of the sampled token, nats (on complete rows over the set). Differentiable.
        entropy: of the distribution the loss uses, nats. Differentiable.
        diagnostics: detached, as in `PolicyLoss`.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    diagnostics: TokenDiagnostics


def token_losses(
    logits: Tensor,
    record: SamplerRecord,
    advantages: Tensor,
    *,
    correction: Correction | str | None = None,
    loss_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    sequence_keep: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    backend: str = "auto",
    validate: bool = True,
) -> TokenLosses:
    """The corrected loss of every token, with log-probs and entropy for whatever else the framework computes.

    Equals ``policy_loss(reduction="none")`` with `selected_logprobs` beside it, validated once and read once in the
    forward pass. Backward reads the logits once for the loss, and twice more only where log-probs or entropy are
    differentiated too. Nothing of size ``[T, V]`` is kept but the logits, which must not be written to until then.

    Args:
        logits: raw ``[T, V]``, before temperature. The only differentiable input.

    Everything else, and what is raised, is as in `policy_loss`.
    """
    check_matrix("logits", logits, "[T, V]")
    options = LossOptions(
        correction,
        loss_mask,
        "none",
        sequence_ids,
        sequence_keep,
        None,
        0.0,
        0.0,
        "k3",
        None,
        backend,
        validate,
    )
    shard = VocabShard.of(logits.shape[1], vocab_size, process_group)
    prepared = prepare(record, advantages, options, shard, logits, shard.vocab_size)
    loss, logprobs, entropy, results = TokenLossesFromLogits.apply(  # type: ignore[no-untyped-call]
        logits, prepared.problem, prepared.backend
    )
    finished = prepared.finish(loss, results)
    return TokenLosses(loss, logprobs, entropy, finished.diagnostics)
