"""Turns of an agent, retries and partial rollouts, joined into one sequence by their exact token ids.

Nothing is tokenized, cut or aligned by guess: every call to an engine says which ids it was given and which
it drew, and the next call's context must begin with all that came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .candidates import CandidateSet
from .errors import RecordError, within_sample
from .missing import missing_tokens
from .record import SamplerRecord
from .sampler_spec import SamplerSpec, check_fleet
from .validation import is_integer


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
        missing: sampled tokens that were masked for want of a log-prob.
        truncated: the last kept answer hit a limit, and was kept to its end.
        specs: the samplers, one a turn.
    """

    record: SamplerRecord
    loss_mask: Tensor
    turn: Tensor
    missing: int
    truncated: bool
    specs: tuple[SamplerSpec, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """Trajectories in one packed row ``[N]``: record, bool loss mask, int64 sequence ids; tokens masked."""

    record: SamplerRecord
    loss_mask: Tensor
    sequence_ids: Tensor
    missing: int


def assemble(turns: Sequence[Turn], strict: bool = True, sample: int | None = None) -> Trajectory:
    """Join the calls of one trajectory.

    Each call's prompt must begin with the sequence so far, id by id; what follows in it is context that
    nobody trains (tool results, templates). A call aborted half-way and continued by another is two turns
    with nothing between. Temperature, group and weight version stay per token.

    Args:
        turns: in order.
        strict: require that every spec names its group.
        sample: the trajectory's number, for errors.

    Raises:
        RecordError: a prompt that does not continue the sequence (``token`` is the first id that differs),
            samplers that may not be mixed, records that cannot be joined, a ``kept`` beyond the answer.
    """
    if not turns:
        raise ValueError("a trajectory needs at least one turn")
    with within_sample(sample):
        return _assemble(turns, strict)


def _assemble(turns: Sequence[Turn], strict: bool) -> Trajectory:
    specs = tuple(turn.spec for turn in turns)
    check_fleet(specs, strict)
    sequence = torch.zeros(0, dtype=torch.int64)
    parts: list[SamplerRecord] = []
    owners: list[Tensor] = []
    truncated = False
    for index, turn in enumerate(turns):
        answer = _declared(_kept(turn, index), turn.spec)
        if turn.prompt is None:
            remedy = "Pass prompt= to the reader, or ask the engine to return it."
            raise RecordError(
                "a turn's context ids are unknown", field=f"turns[{index}].prompt", remedy=remedy
            )
        if not (isinstance(turn.prompt, Tensor) and turn.prompt.dim() == 1 and is_integer(turn.prompt)):
            value = getattr(turn.prompt, "dtype", type(turn.prompt))
            remedy = "Pass the ids that the call was given, int32 or int64 [P]."
            raise RecordError("no integer ids", field=f"turns[{index}].prompt", value=value, remedy=remedy)
        context = _continuation(sequence, turn.prompt.to(torch.int64), index)
        parts += [_untrained(context, answer), answer]
        owners += [torch.full((len(context),), -1), torch.full((len(answer),), index)]
        sequence = torch.cat([turn.prompt.to(torch.int64), answer.tokens.to(torch.int64)])
        if turn.kept != 0:  # an answer that was thrown away leaves what was before; a cut one lost its end
            truncated = turn.truncated and len(answer) == len(turn.record)
    record = _concat([part for part in parts if len(part)] or parts[:1])
    owner = torch.cat(owners)
    missing = (
        missing_tokens(record) if record.logprobs is not None else torch.zeros_like(owner, dtype=torch.bool)
    )
    loss_mask = (owner >= 0) & ~missing
    vocab_sizes = [turn.spec.vocab_size for turn in turns if turn.spec.vocab_size is not None]
    record.validate(vocab_sizes[0] if vocab_sizes else None, loss_mask)
    return Trajectory(record, loss_mask, owner, int((missing & (owner >= 0)).sum()), truncated, specs)


def pack(trajectories: Sequence[Trajectory], strict: bool = True) -> Batch:
    """All trajectories in one packed row, sequence ids 0, 1, … in order.

    Args:
        strict: require that every sampler names its group.

    Raises:
        RecordError: some have log-probs, groups or versions and others do not; samplers that may not be
            mixed.
    """
    check_fleet([spec for trajectory in trajectories for spec in trajectory.specs], strict)
    lengths = torch.tensor([len(t.loss_mask) for t in trajectories])
    record = _concat([t.record for t in trajectories])
    return Batch(
        record,
        torch.cat([t.loss_mask for t in trajectories]),
        torch.arange(len(trajectories)).repeat_interleave(lengths),
        sum(t.missing for t in trajectories),
    )


def prompt_ids(num_sequences: int, samples_per_prompt: int) -> Tensor:
    """Which prompt each sequence answers, int64 ``[num_sequences]``, where every prompt has the same number
    of them.

    Raises:
        RecordError: the number does not divide. Incomplete groups need explicit ids: a stride would mix
            prompts.
    """
    if samples_per_prompt < 1 or num_sequences % samples_per_prompt:
        problem = f"{num_sequences} sequences do not divide into groups of {samples_per_prompt}"
        remedy = "Some prompts lack a sample: carry explicit prompt ids instead of a stride."
        raise RecordError(problem, field="samples_per_prompt", value=samples_per_prompt, remedy=remedy)
    return torch.arange(num_sequences) // samples_per_prompt


def group_advantages(rewards: Tensor, prompts: Tensor, normalize: bool = True) -> Tensor:
    """Reward minus the mean of its prompt's samples, over their standard deviation: floating ``[S]``.

    Equal rewards give exactly 0: a spread that is only rounding (below 1e-6 of the largest reward) is none,
    and is never divided by. A prompt with one sample gives 0.

    Args:
        rewards: floating ``[S]``, one a sequence.
        prompts: integer ``[S]``, explicit ids; groups may differ in size and need not be contiguous.
        normalize: divide by the (biased) standard deviation.
    """
    if rewards.shape != prompts.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and prompts {tuple(prompts.shape)} must match")
    _, index, counts = torch.unique(prompts, return_inverse=True, return_counts=True)
    values = rewards.double()
    sums = torch.zeros(len(counts), dtype=torch.float64, device=rewards.device)
    centered = values - (sums.index_add(0, index, values) / counts)[index]
    std = (sums.index_add(0, index, centered.square()) / counts).sqrt()[index]
    largest: Tensor = sums.scatter_reduce(0, index, values.abs(), "amax")[index]
    constant = std <= 1e-6 * largest
    centered = centered / torch.where(constant, 1.0, std) if normalize else centered
    result: Tensor = centered.masked_fill(constant, 0.0).to(rewards.dtype)
    return result


def _kept(turn: Turn, index: int) -> SamplerRecord:
    if turn.kept is None:
        return turn.record
    if not 0 <= turn.kept <= len(turn.record):
        problem = f"kept lies outside the {len(turn.record)} sampled tokens"
        remedy = "It counts the answer's tokens that went on; None is all of them."
        raise RecordError(problem, field=f"turns[{index}].kept", value=turn.kept, remedy=remedy)
    return turn.record.select(torch.arange(turn.kept))


def _continuation(sequence: Tensor, prompt: Tensor, index: int) -> Tensor:
    """What ``prompt`` adds to ``sequence``."""
    common = min(len(sequence), len(prompt))
    differ = (sequence[:common] != prompt[:common]).nonzero()
    if len(differ) or len(prompt) < len(sequence):
        token = int(differ[0, 0]) if len(differ) else len(prompt)
        expected = int(sequence[token])
        value = int(prompt[token]) if token < len(prompt) else None
        remedy = (
            f"Id {expected} was expected. The context was tokenized again, or an answer was dropped or cut: keep "
            "the engine's ids, and say kept=0 (retried) or kept=n (cut)."
        )
        field = f"turns[{index}].prompt"
        raise RecordError(
            "the prompt does not continue the sequence", token=token, field=field, value=value, remedy=remedy
        )
    return prompt[len(sequence) :]


def _untrained(context: Tensor, like: SamplerRecord) -> SamplerRecord:
    count = len(context)
    nobody = torch.full((count,), -1, dtype=torch.int64)
    candidates = None if like.candidates is None else CandidateSet.empty(count)
    return SamplerRecord(
        context,
        None if like.logprobs is None else torch.full((count,), torch.nan, dtype=like.logprobs.dtype),
        candidates,
        like.temperature if not isinstance(like.temperature, Tensor) else torch.ones(count),
        None if like.group is None else nobody,
        like.group_names,
        None if like.weight_version is None else nobody,
        like.version_names,
    )


def _declared(record: SamplerRecord, spec: SamplerSpec) -> SamplerRecord:
    """The record with the turn's spec, and the group that it names, where it has none of its own."""
    if not record.specs:
        record = replace(record, specs=(spec,))
    if record.group is not None or spec.group is None:
        return record
    return replace(record, group=torch.zeros(len(record), dtype=torch.int64), group_names=(spec.group,))


def _concat(records: Sequence[SamplerRecord]) -> SamplerRecord:
    try:
        return SamplerRecord.concat(records)
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(str(error), remedy="Record the same fields in every call.") from None
