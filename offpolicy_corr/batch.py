"""Public: `flatten_batch`, from a model's logits and samplers' records to a loss, and GRPO's `group_advantages`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .batch_layout import BatchLayout, mask_on_host
from .csr import offsets_from_counts
from .records.candidates import CandidateSet, is_integer
from .records.errors import RecordError
from .records.record import SamplerRecord
from .records.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class FlatBatch:
    """The arguments of `policy_loss` under their own names: ``oc.policy_loss(**vars(batch), correction="sc+mis")``.

    Args:
        logits: ``[T, V]``, a view of the model's; row ``t`` is the distribution that ``record.tokens[t]`` was drawn
            from. The last row of every sequence has no such token and is masked.
        record: of all ``T`` rows; rows that no record covers hold NaN log-probs and no candidates.
        advantages: ``[T]``.
        loss_mask: bool ``[T]``.
        sequence_ids: int64 ``[T]``, the index of the sequence in the batch; −1 behind the last packed sequence.
    """

    logits: Tensor
    record: SamplerRecord
    advantages: Tensor
    loss_mask: Tensor
    sequence_ids: Tensor


def flatten_batch(
    logits: Tensor,
    input_ids: Tensor,
    records: Sequence[SamplerRecord | Trajectory],
    advantages: Tensor,
    *,
    attention_mask: Tensor | None = None,
    response_mask: Tensor | None = None,
    loss_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
    logits_to_keep: int = 0,
) -> FlatBatch:
    """A padded or packed batch as the row of tokens that the losses take; the shift of logits to tokens is made here.

    ``logits[b, i]`` predicts ``input_ids[b, i + 1]``. Tokens and masks are moved to the logits, never the logits to the
    tokens: all ``B·L`` rows stay, as a view, and the last of each sequence is masked.

    A record's tokens are the last ones of its sequence, as many as it has: the response behind a prompt, or all of a
    `Trajectory`. Where they stand elsewhere, ``response_mask`` says so.

    Args:
        logits: ``model(input_ids).logits``, whole: floating ``[B, L, V]``. Hidden states ``[B, L, D]`` may stand in,
            for `policy_loss_from_hidden`.
        input_ids: integer ``[B, L]``, as the model was given them; padded left, right or on both sides.
        records: one per sequence in the batch's order: the reader's `SamplerRecord` of the response, or the
            `Trajectory` of `assemble`, which brings its own loss mask.
        advantages: floating ``[B]``, one per sequence, repeated over its tokens; or ``[B, L]``, beside ``input_ids``.
        attention_mask: bool or {0, 1} ``[B, L]``, False on padding. None: there is none.
        response_mask: bool or {0, 1} ``[B, L]``: where the records' tokens stand, for example without tool results.
        loss_mask: bool or {0, 1} ``[B, L]``: which tokens are trained. None: all that the records cover.
        cu_seqlens: integer ``[S + 1]``, the bounds of ``S`` sequences packed into one row (``B = 1``), as
            variable-length attention takes them. Then records and advantages are per sequence, ``S`` of them.
        position_ids: integer ``[1, L]``, in place of ``cu_seqlens``: a 0 starts a sequence.
        logits_to_keep: as the model was called: logits are ``[B, logits_to_keep, V]``, of the last positions; 0 is all.

    Returns:
        `FlatBatch` on the device of ``logits``. Everything else is arranged on the host: ids and masks that lie on a
        GPU are copied from there, which waits for it.

    Raises:
        RecordError: naming the sample, and the token within its record: a trained token that differs from ``input_ids``
            at its position, that has no logits because nothing precedes it, a record longer than its sequence, a
            ``loss_mask`` that trains what no record covers, records that cannot be joined.
        ValueError, TypeError: shapes and options that contradict each other.
    """
    _check_logits(logits, input_ids, logits_to_keep)
    ids, shape = input_ids.cpu(), input_ids.shape
    layout = BatchLayout.of(ids, attention_mask, cu_seqlens, position_ids, logits_to_keep)
    record, lengths, trained = _join(records, layout)
    response = mask_on_host("response_mask", response_mask, shape)
    position = _positions(layout, lengths, response)
    trained = _select_trained(trained, position, mask_on_host("loss_mask", loss_mask, shape), layout)
    _check_trained(record, trained, position, lengths, ids, layout)
    row = layout.row[position]
    with_row = row >= 0
    if not bool(with_row.all()):
        record, row, trained = record.select(with_row), row[with_row], trained[with_row]
    tokens = layout.of_next_token(ids)
    mask = torch.zeros(len(tokens), dtype=torch.bool).index_copy(0, row, trained)
    return FlatBatch(
        logits.flatten(0, 1),
        _scatter(record, row, tokens).to(logits.device),
        _per_row(advantages, layout, logits),
        mask.to(logits.device),
        layout.sequence_ids.to(logits.device),
    )


def group_advantages(rewards: Tensor, prompt_ids: Tensor, normalize: bool = True) -> Tensor:
    """Advantages of GRPO: ``A_i = (R_i − mean) / std`` over the responses to one prompt, floating ``[B]``.

    Equal rewards give exactly 0: a deviation that is only rounding (below 1e-6 of the largest reward) counts as none
    and is never divided by. A prompt with one response gives 0.

    Args:
        rewards: floating ``[B]``, one per response, finite.
        prompt_ids: integer ``[B]``, the prompt that each one answers; groups may differ in size, in any order.
        normalize: divide by the standard deviation (the biased one, 1/n). False is Dr. GRPO.

    Raises:
        ValueError: shapes that differ, dtypes, rewards that are not finite.

    Source: GRPO https://arxiv.org/abs/2402.03300; Dr. GRPO https://arxiv.org/abs/2503.20783.
    """
    if rewards.shape != prompt_ids.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards and prompt_ids must both be [B], got {tuple(rewards.shape)} and {tuple(prompt_ids.shape)}"
        )
    if not rewards.dtype.is_floating_point or not is_integer(prompt_ids):
        raise ValueError(
            f"rewards must be floating and prompt_ids int32 or int64, got {rewards.dtype} and {prompt_ids.dtype}"
        )
    if not bool(rewards.isfinite().all()):
        sample = int((~rewards.isfinite()).nonzero()[0, 0])
        raise ValueError(f"the reward of sample {sample} is {float(rewards[sample])}: leave the sample out")
    _, index, counts = torch.unique(prompt_ids, return_inverse=True, return_counts=True)
    values = rewards.double()
    zeros = torch.zeros(len(counts), dtype=torch.float64, device=rewards.device)
    centered = values - (zeros.index_add(0, index, values) / counts)[index]
    std = (zeros.index_add(0, index, centered.square()) / counts).sqrt()[index]
    largest: Tensor = zeros.scatter_reduce(0, index, values.abs(), "amax")[index]
    constant = std <= 1e-6 * largest
    centered = centered / torch.where(constant, 1.0, std) if normalize else centered
    result: Tensor = centered.masked_fill(constant, 0.0).to(rewards.dtype)
    return result


def _check_logits(logits: Tensor, input_ids: Tensor, logits_to_keep: int) -> None:
    if not isinstance(logits, Tensor) or not isinstance(input_ids, Tensor):
        raise TypeError("logits and input_ids must be tensors: pass model(input_ids).logits")
    if input_ids.dim() != 2 or not is_integer(input_ids):
        raise ValueError(f"input_ids must be integer [B, L], got {input_ids.dtype} {tuple(input_ids.shape)}")
    if logits.dim() != 3 or not logits.dtype.is_floating_point:
        remedy = ": policy_loss takes [T, V] as it is" if logits.dim() == 2 else ""
        raise ValueError(
            f"logits must be floating [B, L, V], got {logits.dtype} {tuple(logits.shape)}{remedy}"
        )
    batch, length = input_ids.shape
    if not 0 <= logits_to_keep <= length:
        raise ValueError(f"logits_to_keep must lie in [0, {length}], got {logits_to_keep}")
    expected = (batch, logits_to_keep or length)
    if logits.shape[:2] != expected:
        remedy = "pass the model's logits whole, the shift by one token is made here"
        if logits.shape[0] == batch and logits.shape[1] < length:
            remedy += "; if the model was called with logits_to_keep, pass it on"
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit input_ids {(batch, length)}, "
            f"[{expected[0]}, {expected[1]}, V] was expected: {remedy}"
        )


def _join(
    records: Sequence[SamplerRecord | Trajectory], layout: BatchLayout
) -> tuple[SamplerRecord, list[int], Tensor]:
    """All records in one, their lengths, and which of their tokens may be trained, bool."""
    if isinstance(records, (SamplerRecord, Trajectory)):
        raise TypeError("records must be a sequence with one SamplerRecord per sequence, got a single one")
    for sample, record in enumerate(records):
        if not isinstance(record, (SamplerRecord, Trajectory)):
            raise TypeError(
                f"records[{sample}] must be a SamplerRecord or a Trajectory, got {type(record).__name__}: "
                "the readers of integrations make one of an engine's answer"
            )
    if len(records) != layout.num_sequences:
        raise ValueError(
            f"{len(records)} records for {layout.num_sequences} sequences: pass one per sequence, in order"
        )
    plain = [given.record if isinstance(given, Trajectory) else given for given in records]
    trained = [
        given.loss_mask.cpu() if isinstance(given, Trajectory) else torch.ones(len(given), dtype=torch.bool)
        for given in records
    ]
    try:
        joined = SamplerRecord.concat([record.to("cpu") for record in plain])
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(str(error), remedy="Record the same fields of every sample.") from None
    return joined, [len(record) for record in plain], torch.cat(trained)


def _positions(layout: BatchLayout, lengths: list[int], response: Tensor | None) -> Tensor:
    """The flat position of every record's token, int64 and rising."""
    eligible = layout.sequence >= 0
    if response is not None:
        if bool((response & ~eligible).any()):
            sample, column = layout.sample_and_column(int((response & ~eligible).nonzero()[0, 0]))
            raise ValueError(f"response_mask is set on padding, in column {column}: align it with input_ids")
        eligible = response
    positions = eligible.nonzero().squeeze(1)
    counts = torch.bincount(layout.sequence[positions], minlength=layout.num_sequences).tolist()
    parts = []
    for sample, (own, length) in enumerate(zip(positions.split(counts), lengths, strict=True)):
        if length > len(own) or (response is not None and length != len(own)):
            where = "response_mask marks" if response is not None else "its sequence has"
            raise RecordError(
                f"the record has {length} tokens and {where} {len(own)}",
                sample=sample,
                field="tokens",
                remedy="Cut the record as the sequence was cut, record.select(torch.arange(n)), or look at the mask.",
            )
        parts.append(own[len(own) - length :])
    return torch.cat(parts)


def _select_trained(
    trained: Tensor, position: Tensor, loss_mask: Tensor | None, layout: BatchLayout
) -> Tensor:
    """Which of the records' tokens are trained: all that may be, or those of the caller's ``loss_mask``."""
    if loss_mask is None:
        return trained
    uncovered = loss_mask.clone()
    uncovered[position] &= ~trained
    if bool(uncovered.any()):
        sample, column = layout.sample_and_column(int(uncovered.nonzero()[0, 0]))
        raise RecordError(
            f"loss_mask trains the token in column {column}, which no record covers",
            sample=sample,
            field="loss_mask",
            remedy="Only tokens that a sampler drew can be trained: prompts, padding and tool results are 0.",
        )
    return trained & loss_mask[position]


def _check_trained(
    record: SamplerRecord,
    trained: Tensor,
    position: Tensor,
    lengths: list[int],
    ids: Tensor,
    layout: BatchLayout,
) -> None:
    """Trained tokens are those of ``input_ids`` and have logits."""
    given = ids.flatten()[position]
    differs = trained & (record.tokens != given)
    if bool(differs.any()):
        sample, token, index = _first(differs, lengths)
        raise RecordError(
            f"the record's token is not the one in input_ids, {int(given[index])}",
            sample=sample,
            token=token,
            field="tokens",
            value=int(record.tokens[index]),
            remedy="Build input_ids from the engine's own token ids; pass attention_mask for padding, and "
            "response_mask where the response is not the end of its sequence.",
        )
    missing = trained & (layout.row[position] < 0)
    if bool(missing.any()):
        sample, token, index = _first(missing, lengths)
        column = int(position[index]) % layout.shape[1]
        raise RecordError(
            f"no logits predict the trained token in column {column}",
            sample=sample,
            token=token,
            field="loss_mask",
            remedy="The first token of a sequence, or after padding, has no logits: mask it. With logits_to_keep keep "
            "one position more than the response has tokens.",
        )


def _first(bad: Tensor, lengths: list[int]) -> tuple[int, int, int]:
    """Sample, token within its record, and index of the first offender."""
    index = int(bad.nonzero()[0, 0])
    ends = torch.tensor(lengths).cumsum(0)
    sample = int(torch.searchsorted(ends, index, right=True))
    return sample, index - int(ends[sample]) + lengths[sample], index


def _scatter(record: SamplerRecord, row: Tensor, tokens: Tensor) -> SamplerRecord:
    """The record's tokens at the rows ``row`` (rising) of a longer record, with nothing recorded between them."""
    size = len(tokens)

    def at_rows(values: Tensor | None, filler: float | int | bool) -> Tensor | None:
        return None if values is None else values.new_full((size,), filler).index_copy(0, row, values)

    candidates, temperature = record.candidates, record.temperature
    if candidates is not None:
        counts, complete = at_rows(candidates.offsets.diff(), 0), at_rows(candidates.complete, False)
        assert counts is not None and complete is not None
        offsets = offsets_from_counts(counts)
        candidates = CandidateSet(candidates.ids, candidates.logprobs, offsets, complete)
    if isinstance(temperature, Tensor):
        temperatures = at_rows(temperature, 1.0)
        assert temperatures is not None
        temperature = temperatures
    return replace(
        record,
        tokens=tokens,
        logprobs=at_rows(record.logprobs, torch.nan),
        candidates=candidates,
        temperature=temperature,
        group=at_rows(record.group, -1),
        weight_version=at_rows(record.weight_version, -1),
    )


def _per_row(advantages: Tensor, layout: BatchLayout, logits: Tensor) -> Tensor:
    """Advantages per row of the logits, from one per sequence or one per token."""
    if not isinstance(advantages, Tensor) or not advantages.dtype.is_floating_point:
        got = advantages.dtype if isinstance(advantages, Tensor) else type(advantages).__name__
        raise TypeError(f"advantages must be a floating tensor, got {got}")
    advantages = advantages.to(logits.device)
    if advantages.shape == layout.shape:
        return layout.of_next_token(advantages)
    if advantages.shape == (layout.num_sequences,):
        return advantages[layout.sequence_ids.clamp(min=0).to(logits.device)]
    raise ValueError(
        f"advantages must be [{layout.num_sequences}], one per sequence, or {tuple(layout.shape)}, one per token of "
        f"input_ids, got {tuple(advantages.shape)}"
    )
