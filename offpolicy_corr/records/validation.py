"""Records: the checks behind `SamplerRecord.validate`, vectorized, evaluated together, reported one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from ..csr import row_index, row_mass, segment_max
from .candidates import CandidateSet, is_integer
from .errors import RecordError
from .missing import SENTINEL
from .sampler_spec import SamplerSpec

_NO_GREEDY = "Greedy decoding has no sampling distribution: use temperature > 0."
LOGPROB_ABOVE_ZERO = 1e-6  # rounding of a log-softmax in float32
HEAD_MASS_ABOVE_ONE = 1e-3
COMPLETE_MASS_OFF_ONE = 1e-4
SAME_VALUE = (
    1e-4,
    1e-5,
)  # relative, absolute: the token's log-prob against its own entry among the candidates
CHECKED_AT_ONCE = 1 << 19  # candidates: the checks' temporaries stay in cache, far below the record's size


class Record(Protocol):
    """What is checked: the fields of `SamplerRecord`, which is defined above this module and imports it."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def logprobs(self) -> Tensor | None: ...
    @property
    def candidates(self) -> CandidateSet | None: ...
    @property
    def temperature(self) -> float | Tensor: ...
    @property
    def group(self) -> Tensor | None: ...
    @property
    def group_names(self) -> tuple[str, ...]: ...
    @property
    def weight_version(self) -> Tensor | None: ...
    @property
    def version_names(self) -> tuple[str, ...] | None: ...
    @property
    def specs(self) -> tuple[SamplerSpec, ...]: ...
    def __len__(self) -> int: ...
    def narrow(self, row_slice: slice) -> Record: ...


@dataclass(frozen=True)
class Check:
    """``bad`` [T] or [nnz] marks offenders; ``rows`` maps an entry to its token, None where it is the token."""

    bad: Tensor
    field: str
    values: Tensor
    problem: str
    remedy: str
    rows: Tensor | None = None


def as_mask(loss_mask: Tensor | None, tokens: Tensor, check: bool = False) -> Tensor | None:
    """A bool view of ``loss_mask``, bool or {0, 1} ``[T]``; None stays None (everything is trained).

    With ``check`` other values raise here, at the cost of a host sync; `check_record` does it otherwise.
    """
    if loss_mask is None:
        return None
    if loss_mask.shape != tokens.shape:
        raise ValueError(f"loss_mask must be [T] = {tuple(tokens.shape)}, got {tuple(loss_mask.shape)}")
    if loss_mask.device != tokens.device:
        raise ValueError(f"loss_mask is on {loss_mask.device}, the tokens on {tokens.device}")
    if check:
        for one in _mask_checks(loss_mask):
            if bool(one.bad.any()):
                raise_first(one, None)
    return loss_mask if loss_mask.dtype == torch.bool else loss_mask != 0


def check_lengths(record: Record) -> None:
    """Everything that types, shapes, dtypes and devices alone can tell; never waits for a device."""
    tokens = record.tokens
    _require(isinstance(tokens, Tensor), "tokens must be a tensor", "tokens", type(tokens), "Pass [T] ids.")
    _require(
        tokens.dim() == 1, "tokens must be one packed row", "tokens", tuple(tokens.shape), "Flatten to [T]."
    )
    _require(
        is_integer(tokens), "tokens must be int32 or int64", "tokens", tokens.dtype, "Pass the sampled ids."
    )
    _check_field(record, "logprobs", precise=True)
    _check_field(record, "group", precise=False)
    _check_field(record, "weight_version", precise=False)
    if isinstance(record.temperature, Tensor):
        _check_field(record, "temperature", precise=True)
    else:
        number = isinstance(record.temperature, (int, float)) and 0.0 < record.temperature < float("inf")
        problem = "temperature must be positive and finite"
        _require(
            number,
            problem,
            "temperature",
            record.temperature,
            "Greedy decoding has no sampling distribution: use temperature > 0.",
        )
    declared = isinstance(record.specs, tuple) and all(isinstance(spec, SamplerSpec) for spec in record.specs)
    _require(
        declared,
        "specs must be a tuple of SamplerSpec",
        "specs",
        record.specs,
        "Pass one SamplerSpec per sampler, or ().",
    )
    if record.candidates is not None:
        _check_candidate_lengths(record)


def _require(ok: bool, problem: str, field: str, value: Any, remedy: str) -> None:
    if not ok:
        raise RecordError(problem, field=field, value=value, remedy=remedy)


def _check_field(record: Record, name: str, precise: bool) -> None:
    """One value per token, None, on the tokens' device; floating fields in fp32 or fp64."""
    given = getattr(record, name)
    if given is None:
        return
    _require(
        isinstance(given, Tensor), f"{name} must be a tensor", name, type(given), "Pass one value per token."
    )
    want = f"Give one value for each of the {len(record)} tokens."
    _require(given.shape == record.tokens.shape, "lengths disagree", name, tuple(given.shape), want)
    if precise:
        right = given.dtype in (torch.float32, torch.float64)
        remedy = "Half precision is too coarse for a ratio."
        _require(right, f"{name} must be float32 or float64", name, given.dtype, remedy)
    else:
        _require(is_integer(given), f"{name} must be int32 or int64", name, given.dtype, "Convert it.")
    same = given.device == record.tokens.device
    _require(
        same, "devices differ", name, given.device, f"tokens are on {record.tokens.device}: use record.to."
    )


def _check_candidate_lengths(record: Record) -> None:
    candidates = record.candidates
    assert candidates is not None
    rows = (candidates.offsets.numel() - 1, candidates.complete.numel())
    want = f"Candidates need T + 1 offsets and T flags for {len(record)} tokens."
    _require(rows == (len(record), len(record)), "lengths disagree", "candidates.offsets", rows, want)
    if candidates.logprobs is not None:
        shapes = (tuple(candidates.ids.shape), tuple(candidates.logprobs.shape))
        want = "Give one log-prob for every candidate id."
        _require(shapes[0] == shapes[1], "lengths disagree", "candidates.logprobs", shapes, want)
    for name in ("ids", "logprobs", "offsets", "complete"):
        part = getattr(candidates, name)
        if part is not None:
            remedy = f"tokens are on {record.tokens.device}: use record.to."
            same = part.device == record.tokens.device
            _require(same, "devices differ", f"candidates.{name}", part.device, remedy)


def check_record(
    record: Record, vocab_size: int | None, loss_mask: Tensor | None, sequence_ids: Tensor | None
) -> None:
    """Run every check and raise `RecordError` for the first that fails: `check_lengths`, then `check_values`."""
    check_lengths(record)
    check_values(record, vocab_size, loss_mask, sequence_ids)


def check_values(
    record: Record,
    vocab_size: int | None,
    loss_mask: Tensor | None,
    sequence_ids: Tensor | None,
    also: Sequence[Check] = (),
) -> None:
    """Run the checks that read values, and those of ``also`` behind them, on a record whose lengths are right.

    On a CPU a long record is checked some tokens at a time, in bounded memory; elsewhere at once, with one
    host sync for all of them.
    """
    if sequence_ids is not None and sequence_ids.shape != record.tokens.shape:
        raise ValueError(f"sequence_ids must be [T] = ({len(record)},), got {tuple(sequence_ids.shape)}")
    as_mask(loss_mask, record.tokens)
    candidates = record.candidates
    if candidates is None or candidates.ids.device.type != "cpu" or len(candidates.ids) <= CHECKED_AT_ONCE:
        raise_failed([*_checks(record, vocab_size, loss_mask), *also], sequence_ids)
        return
    raise_failed(_safe_offsets(candidates.offsets, len(candidates.ids))[1], sequence_ids)
    begin, total = 0, len(record)
    while begin < total:
        reach = candidates.offsets[begin] + CHECKED_AT_ONCE
        end = max(begin + 1, int(torch.searchsorted(candidates.offsets, reach, right=True)) - 1)
        own = [None if field is None else field[begin:end] for field in (loss_mask, sequence_ids)]
        try:
            raise_failed(_checks(record.narrow(slice(begin, end)), vocab_size, own[0]), own[1])
        except RecordError as error:
            assert error.token is not None, "every check of values names its token"
            raise error.at(token=error.token + begin) from None
        begin = end
    if also:
        raise_failed(list(also), sequence_ids)


def _checks(record: Record, vocab_size: int | None, loss_mask: Tensor | None) -> list[Check]:
    trained = as_mask(loss_mask, record.tokens)
    checks = _mask_checks(loss_mask) + _token_checks(record, vocab_size, trained)
    if record.candidates is not None:
        checks += _candidate_checks(record, vocab_size, trained)
    return checks


def raise_failed(checks: list[Check], sequence_ids: Tensor | None, tokens: Tensor | None = None) -> None:
    """Raise the `RecordError` of the first check that fails, if one does. One host sync.

    ``tokens`` maps positions to the caller's own numbering.
    """
    failed = torch.stack([check.bad.any() for check in checks]).tolist()
    for check, hit in zip(checks, failed, strict=True):
        if hit:
            raise_first(check, sequence_ids, tokens)


def raise_first(check: Check, sequence_ids: Tensor | None, tokens: Tensor | None = None) -> NoReturn:
    """Raise the `RecordError` of the first offender. ``tokens`` maps to the caller's own numbering."""
    position = int(check.bad.nonzero()[0, 0])
    token = position if check.rows is None else int(check.rows[position])
    raise RecordError(
        check.problem,
        sample=None if sequence_ids is None or token >= len(sequence_ids) else int(sequence_ids[token]),
        token=token if tokens is None else int(tokens[token]),
        field=check.field,
        value=check.values[position].item(),
        remedy=check.remedy,
    )


def _mask_checks(loss_mask: Tensor | None) -> list[Check]:
    if loss_mask is None or loss_mask.dtype == torch.bool:
        return []
    bad = (loss_mask != 0) & (loss_mask != 1)
    return [
        Check(
            bad,
            "loss_mask",
            loss_mask,
            "loss_mask must be bool, 0 or 1",
            "Multiply per-token weights into advantages; loss_mask holds 0 and 1.",
        )
    ]


def _token_checks(record: Record, vocab_size: int | None, trained: Tensor | None) -> list[Check]:
    tokens = record.tokens
    outside, problem = _outside_vocabulary(tokens, vocab_size)
    checks = [Check(outside, "tokens", tokens, "token " + problem, "Mask padding out of the loss.")]
    logprobs = record.logprobs
    if logprobs is not None:
        remedy = "A missing log-prob cannot be trained on: mask the token or record it."
        missing = ~(logprobs > SENTINEL)
        checks.append(
            Check(
                missing,
                "logprobs",
                logprobs,
                "log-prob is not a finite number, or stands for a missing one",
                remedy,
            )
        )
        positive = logprobs > LOGPROB_ABOVE_ZERO
        remedy = "Logits, or probabilities, were recorded in place of log-probs."
        checks.append(Check(positive, "logprobs", logprobs, "log-prob is above 0", remedy))
    temperature = record.temperature
    if isinstance(temperature, Tensor):
        bad = ~((temperature > 0) & temperature.isfinite())
        problem = "temperature must be positive and finite"
        checks.append(Check(bad, "temperature", temperature, problem, _NO_GREEDY))
    if record.group is not None:
        bad = record.group < 0
        if record.group_names:
            bad = bad | (record.group >= len(record.group_names))
        problem = f"group outside [0, {len(record.group_names)})"
        checks.append(Check(bad, "group", record.group, problem, "Index group_names."))
    if record.weight_version is not None:
        bad = record.weight_version < -1
        if record.version_names:
            bad = bad | (record.weight_version >= len(record.version_names))
        problem = "weight version outside what is declared"
        checks.append(Check(bad, "weight_version", record.weight_version, problem, "Use -1 for undeclared."))
    return checks if trained is None else [_only(check, trained) for check in checks]


def _outside_vocabulary(ids: Tensor, vocab_size: int | None) -> tuple[Tensor, str]:
    if vocab_size is None:
        return ids < 0, "id is negative"
    return (ids < 0) | (ids >= vocab_size), f"id outside [0, {vocab_size})"


def _only(check: Check, trained: Tensor) -> Check:
    where = trained if check.rows is None else trained[check.rows]
    return Check(check.bad & where, check.field, check.values, check.problem, check.remedy, check.rows)


def _candidate_checks(record: Record, vocab_size: int | None, trained: Tensor | None) -> list[Check]:
    candidates = record.candidates
    assert candidates is not None
    ids, complete, nnz = candidates.ids, candidates.complete, candidates.ids.numel()
    offsets, structure = _safe_offsets(candidates.offsets, nnz)
    rows = row_index(offsets, nnz)
    outside, problem = _outside_vocabulary(ids, vocab_size)
    is_token = ids == record.tokens[rows]
    present = _row_any(is_token, rows, len(record))
    checks = [
        Check(outside, "candidates.ids", ids, "candidate " + problem, "Leave padding out of the set.", rows),
        Check(
            _row_has_duplicates(ids, offsets, rows),
            "candidates.ids",
            offsets.diff(),
            "a candidate id stands twice in this token's set",
            "Merge duplicates at ingestion: each would be counted.",
        ),
        Check(
            complete & ~present,
            "candidates.ids",
            record.tokens,
            "the sampled token is absent from its complete set",
            "Record the support that was really sampled from, or mark the row as a head.",
        ),
    ]
    if candidates.logprobs is not None:
        checks += _logprob_checks(record, offsets, rows, is_token)
        if record.logprobs is not None:
            checks += _outside_head_checks(record, offsets, ~complete & ~present)
    elif record.logprobs is not None:
        alone = complete & (offsets.diff() == 1) & (record.logprobs < -COMPLETE_MASS_OFF_ONE)
        problem = "the only id of a complete set has a log-prob below 0"
        remedy = "The support was lost (slime's patch then sends the sampled id), or the value is pre-filter."
        checks.append(Check(alone, "logprobs", record.logprobs, problem, remedy))
    if trained is not None:
        checks = [_only(check, trained) for check in checks]
    return structure + checks


def _logprob_checks(record: Record, offsets: Tensor, rows: Tensor, is_token: Tensor) -> list[Check]:
    candidates = record.candidates
    assert candidates is not None and candidates.logprobs is not None
    logq, complete = candidates.logprobs, candidates.complete
    remedy = "Record log q: after temperature and filters, in float32."
    bad = ~(logq <= LOGPROB_ABOVE_ZERO)
    checks = [Check(bad, "candidates.logprobs", logq, "candidate log-prob is NaN or above 0", remedy, rows)]
    mass = row_mass(logq, offsets)
    head = ~complete & (mass > 1.0 + HEAD_MASS_ABOVE_ONE)
    problem = "the head's probabilities sum to more than 1"
    checks.append(
        Check(head, "candidates.logprobs", mass, problem, "Ids are duplicated or q is not normalized.")
    )
    off = complete & ((mass - 1.0).abs() > COMPLETE_MASS_OFF_ONE)
    problem = "the probabilities of a complete set do not sum to 1"
    remedy = "Record post-filter log-probs of the whole support, or mark the row as a head."
    checks.append(Check(off, "candidates.logprobs", mass, problem, remedy))
    if record.logprobs is not None:
        # few entries are a token's own: where that costs no host sync, only they are looked at
        at = is_token.nonzero().squeeze(1) if logq.device.type == "cpu" else slice(None)
        entry, owner = logq[at], rows[at]
        own = record.logprobs.to(logq.dtype)[owner]
        rtol, atol = SAME_VALUE
        differs = is_token[at] & ~((entry - own).abs() <= atol + rtol * own.abs())
        problem = "the sampled token's log-prob differs from its entry among the candidates"
        remedy = "Both must be log q: one was recorded before temperature or a filter."
        checks.append(Check(differs, "candidates.logprobs", entry, problem, remedy, owner))
    return checks


def _outside_head_checks(record: Record, offsets: Tensor, outside: Tensor) -> list[Check]:
    """A sampled token ``outside`` its head is one of the tail: no likelier than the head's least entry, and head
    and token together have no more than all of the mass."""
    candidates, logprobs = record.candidates, record.logprobs
    assert candidates is not None and candidates.logprobs is not None and logprobs is not None
    outside = outside & (offsets.diff() > 0)
    total = row_mass(candidates.logprobs, offsets) + logprobs.double().exp()
    above = outside & (total > 1.0 + HEAD_MASS_ABOVE_ONE)
    problem = "the sampled token is outside its head, and their probabilities sum to more than 1"
    remedy = "Head and log-prob are of different tokens, requests or settings: record both from one answer."
    mass = Check(above, "candidates.logprobs", total, problem, remedy)
    logq = candidates.logprobs
    least = -segment_max(
        torch.where(logq == -torch.inf, logq, -logq), offsets
    )  # an impossible entry is no measure
    rtol, atol = SAME_VALUE
    likelier = outside & (logprobs > least.to(logprobs.dtype) + atol + rtol * least.abs().to(logprobs.dtype))
    problem = "the sampled token is outside its head, and likelier than the head's least entry"
    remedy = "A head holds the sampler's likeliest ids, from the same answer as the log-prob."
    return [Check(likelier, "logprobs", logprobs, problem, remedy), mass]


def _safe_offsets(offsets: Tensor, nnz: int) -> tuple[Tensor, list[Check]]:
    """Offsets that no later operation can stumble over, and the checks that say whether they were changed."""
    safe = offsets.clamp(0, nnz).cummax(0).values
    safe[:1].fill_(0)
    safe[-1:].fill_(nnz)
    remedy = "Offsets start at 0, never fall, and end at the number of ids."
    # there are T + 1 offsets: a fault of the last one is reported at the last token
    tokens = torch.arange(offsets.numel(), device=offsets.device).clamp(max=max(offsets.numel() - 2, 0))
    return safe, [
        Check(offsets != safe, "candidates.offsets", offsets, "offsets are not CSR", remedy, tokens)
    ]


def _row_any(flags: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    found = torch.zeros(num_rows + 1, dtype=torch.bool, device=flags.device)
    found[rows[flags] if flags.device.type == "cpu" else torch.where(flags, rows, num_rows)] = True
    return found[:-1]


def _row_has_duplicates(ids: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    """bool [T]. On a GPU one sort of (row, id) keys, free of syncs; on a CPU dense sorts of rows of like length."""
    num_rows = offsets.numel() - 1
    if ids.device.type != "cpu":
        # the id's place within the key is 33 bits wide: any int32 id, negative ones included, stays in its row
        keys = ((rows << 33) + ids.to(torch.int64).clamp(-(2**31), 2**31)).sort().values
        twice = keys[1:] == keys[:-1]
        return _row_any(twice, (keys[1:] + 2**32) >> 33, num_rows)
    found = torch.zeros(num_rows, dtype=torch.bool)
    counts = offsets.diff()
    width = 2
    while bool((counts > width // 2).any()):
        of_width = ((counts > width // 2) & (counts <= width)).nonzero().squeeze(1)
        if of_width.numel():
            found[of_width] = _dense_duplicates(ids, offsets[of_width], counts[of_width], width)
        width *= 2
    return found


def _dense_duplicates(ids: Tensor, start: Tensor, counts: Tensor, width: int) -> Tensor:
    column = torch.arange(width)
    if int(counts.min()) == width and start.numel() * width == ids.numel():
        dense = ids.view(-1, width)
    else:
        position = (start[:, None] + column).clamp(max=ids.numel() - 1)
        # padding takes values of its own, so that it equals neither an id nor other padding
        filler = (torch.iinfo(ids.dtype).min + column).to(ids.dtype)
        dense = torch.where(column < counts[:, None], ids[position], filler)
    ordered = np.sort(dense.numpy(), axis=1)
    return torch.from_numpy((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
