"""Records: one call to an engine, a whole sequence of calls, and many sequences in one packed row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .record import SamplerRecord, missing_tokens
from .sampler_spec import SamplerSpec


@dataclass(frozen=True, eq=False)
class Turn:
    """One call to an engine.

    Args:
        record: what it sampled, ``[T]``; a reader's result.
        prompt: the ids that the call was given, integer ``[P]``: the whole context.
        spec: the sampler that answered.
        kept: how many of the sampled tokens went on into the context; None is all. 0 is a retried call whose
            answer was thrown away; a smaller number is an answer that was cut (a stop string, a tool call).
        finish_reason: the engine's word.
        truncated: the answer hit a length limit or was aborted. No end-of-sequence token is ever added.
    """

    record: SamplerRecord
    prompt: Tensor | None
    spec: SamplerSpec
    kept: int | None = None
    finish_reason: str | None = None
    truncated: bool = False


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A whole sequence: prompt, sampled tokens, tool and template tokens.

    Attributes:
        record: all tokens ``[N]``. Tokens that nobody sampled hold NaN log-probs, empty candidates, group and
            weight version −1.
        loss_mask: bool ``[N]``: sampled, kept, and with a log-prob.
        turn: int64 ``[N]``, index of the turn that sampled the token, −1 for context.
        missing: number of sampled tokens that are masked because their log-prob is missing.
        truncated: the last kept answer hit a limit, and was kept to its end.
        specs: the samplers, one per turn.
    """

    record: SamplerRecord
    loss_mask: Tensor
    turn: Tensor
    missing: int
    truncated: bool
    specs: tuple[SamplerSpec, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences in one packed row of ``N`` tokens: what is trained on, saved and loaded.

    Args:
        record: all tokens ``[N]``.
        loss_mask: bool ``[N]``.
        sequence_ids: int64 ``[N]``.
        missing: number of sampled tokens that are masked because their log-prob is missing.
    """

    record: SamplerRecord
    loss_mask: Tensor
    sequence_ids: Tensor
    missing: int = 0

    @classmethod
    def of(cls, data: SamplerRecord | Trajectory | Batch) -> Batch:
        """``data`` as a batch.

        A record alone is one sequence, 0, in which every token is trained that has a log-prob (every token, where the
        record has none at all). A trajectory is one sequence with its mask.

        Raises:
            TypeError: ``data`` is something else.
        """
        if isinstance(data, Batch):
            return data
        if isinstance(data, Trajectory):
            return cls(data.record, data.loss_mask, torch.zeros_like(data.turn), data.missing)
        if not isinstance(data, SamplerRecord):
            raise TypeError(f"expected a SamplerRecord, a Trajectory or a Batch, got {type(data).__name__}")
        sequence_ids = torch.zeros(len(data), dtype=torch.int64, device=data.tokens.device)
        absent = torch.zeros_like(sequence_ids, dtype=torch.bool)
        if data.logprobs is not None:
            absent = missing_tokens(data)
        return cls(data, ~absent, sequence_ids, int(absent.sum()))

    def validate(self, vocab_size: int | None = None) -> Batch:
        """`SamplerRecord.validate` where the mask trains; returns self."""
        self.record.validate(vocab_size, self.loss_mask, self.sequence_ids)
        return self
