"""Records: turns of an agent, retries and partial rollouts, joined into one sequence by their exact token ids.

Nothing is tokenized, cut or aligned by guess: every call to an engine says which ids it was given and which
it drew, and the next call's context must begin with all that came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .candidates import CandidateSet, is_integer
from .errors import RecordError, within_sample
from .record import SamplerRecord, missing_tokens
from .sampler_spec import SamplerSpec, check_fleet
from .trajectory import Batch, Trajectory, Turn


def assemble(turns: Sequence[Turn], strict: bool = True, sample: int | None = None) -> Trajectory:
    """Join the calls of one trajectory.

    Each call's prompt must begin with the sequence so far, id by id; what follows in it is context that
    nobody trains (tool results, templates). A partial rollout, canceled and resumed later under newer weights, is two
    turns with nothing between: read the first with the reader's ``partial=True``. Temperature, group and weight version
    stay per token. Several samples of one prompt are separate trajectories: call this once per sample.

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
            remedy = "Give the turn its prompt ids: Turn(prompt=…), or prompt= of the reader."
            raise RecordError(
                "a turn's context ids are unknown", field=f"turns[{index}].prompt", remedy=remedy
            )
        if not (isinstance(turn.prompt, Tensor) and turn.prompt.dim() == 1 and is_integer(turn.prompt)):
            value = getattr(turn.prompt, "dtype", type(turn.prompt))
            remedy = "Pass the ids that the call was given, int32 or int64 [P]."
            raise RecordError("no integer ids", field=f"turns[{index}].prompt", value=value, remedy=remedy)
        context = _continuation(sequence, turns, index)
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


def _kept(turn: Turn, index: int) -> SamplerRecord:
    if turn.kept is None:
        return turn.record
    if not 0 <= turn.kept <= len(turn.record):
        problem = f"kept lies outside the {len(turn.record)} sampled tokens"
        remedy = "It counts the answer's tokens that went on; None is all of them."
        raise RecordError(problem, field=f"turns[{index}].kept", value=turn.kept, remedy=remedy)
    return turn.record.select(torch.arange(turn.kept))


def _continuation(sequence: Tensor, turns: Sequence[Turn], index: int) -> Tensor:
    """What the prompt of turn ``index`` adds to ``sequence``."""
    prompt = turns[index].prompt
    assert prompt is not None
    prompt = prompt.to(torch.int64)
    common = min(len(sequence), len(prompt))
    differ = (sequence[:common] != prompt[:common]).nonzero()
    if not len(differ) and len(prompt) >= len(sequence):
        return prompt[len(sequence) :]
    token = int(differ[0, 0]) if len(differ) else len(prompt)
    value = int(prompt[token]) if token < len(prompt) else None
    before = turns[index - 1].prompt
    if before is not None and torch.equal(before.to(torch.int64), prompt):
        problem = f"turns {index - 1} and {index} have one prompt: they are samples of it, not a conversation"
        remedy = (
            "Call assemble once per sample; where the first was thrown away and asked again, give it kept=0."
        )
    else:
        problem = "the prompt does not continue the sequence"
        remedy = (
            f"Id {int(sequence[token])} was expected. If the context was tokenized again, keep the engine's ids; if an "
            "answer was dropped or cut, say kept=0 (retried) or kept=n (cut); if the chat template leaves out earlier "
            "thinking, the sequence ends here: the turns before and from this one are separate trajectories."
        )
    raise RecordError(problem, token=token, field=f"turns[{index}].prompt", value=value, remedy=remedy)


def _untrained(context: Tensor, answer: SamplerRecord) -> SamplerRecord:
    count = len(context)
    nobody = torch.full((count,), -1, dtype=torch.int64)
    candidates = None if answer.candidates is None else CandidateSet.empty(count)
    return SamplerRecord(
        context,
        None if answer.logprobs is None else torch.full((count,), torch.nan, dtype=answer.logprobs.dtype),
        candidates,
        answer.temperature if not isinstance(answer.temperature, Tensor) else torch.ones(count),
        None if answer.group is None else nobody,
        answer.group_names,
        None if answer.weight_version is None else nobody,
        answer.version_names,
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
