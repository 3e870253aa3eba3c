"""One engine answer as arrays, and how it becomes a validated record: what all readers share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offpolicy_corr.records.assembly import Turn
from offpolicy_corr.records.candidates import CandidateSet
from offpolicy_corr.records.errors import within_sample
from offpolicy_corr.records.inspection import RecordWarning, unwitnessed_zero_runs, warn_unwitnessed_zeros
from offpolicy_corr.records.missing import SENTINEL, is_missing
from offpolicy_corr.records.record import SamplerRecord
from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.records.validation import SAME_VALUE
from offpolicy_corr.records.weight_versions import Span, versions_from_spans

from ._arrays import DAMAGED, fail, integers, offsets_of

MISSING_REMEDY = (
    "Sample again, mask the token with on_missing='mask', or see why the engine returned no number."
)
FIRST_MISSING = "Prefill/decode disaggregation loses the first token's value in some releases. "


@dataclass(frozen=True, eq=False)
class Rows:
    """Candidates in CSR form. ``logprobs`` None: ids alone. ``absent`` marks rows that did not come."""

    ids: NDArray[Any]
    logprobs: NDArray[np.float32] | None
    offsets: NDArray[np.int64]
    complete: NDArray[np.bool_]
    absent: NDArray[np.bool_] | None = None


@dataclass(frozen=True, eq=False)
class Answer:
    """One completion. ``logprobs`` is NaN where nothing came; ``field``, ``rows_field`` name it in errors."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    field: str
    rows: Rows | None = None
    rows_field: str = "candidates"
    spans: Sequence[Span] | None = None
    prompt: NDArray[np.int64] | None = None
    finish_reason: str | None = None
    truncated: bool = False


def check_spec(spec: SamplerSpec, engine: str, on_missing: str) -> None:
    """Refuse a spec of another engine and ids that no engine drew."""
    if on_missing not in ("raise", "mask"):
        raise ValueError(f"on_missing must be 'raise' or 'mask', got {on_missing!r}")
    if spec.engine != engine:
        remedy = f"This reader knows {engine}'s shapes; use the reader of {spec.engine}, or correct the spec."
        raise fail("the spec names another engine", "spec.engine", spec.engine, remedy)
    if spec.token_ids != "engine":
        remedy = "Ask the engine for ids: a text can be tokenized in more than one way."
        raise fail("token ids were rebuilt from text", "spec.token_ids", spec.token_ids, remedy)


def check_count(found: int, tokens: int, field: str, finish_reason: str | None = None) -> None:
    """One value per token; the remedies name the reports behind each kind of mismatch."""
    if found == tokens:
        return
    if tokens == 0:
        remedy = "A value without a token (max_new_tokens=0?) is a phantom: it is no sample."
    elif found > tokens and finish_reason == "stop":
        remedy = "Stop tokens may be cut from the ids alone: set include_stop_str_in_output or no_stop_trim."
    elif found > tokens:
        remedy = (
            "A retracted request or cumulative chunks beside incremental ids; neither end may be cut off."
        )
    elif found == tokens - 1:
        remedy = FIRST_MISSING + "Which token it belongs to cannot be told: sample again."
    else:
        remedy = (
            "Speculative decoding or grouping may report one value for several tokens: upgrade the engine."
        )
    problem = f"{found} values for {tokens} tokens"
    raise fail(problem, field, found, remedy, 0 if found == tokens - 1 else min(found, tokens))


def check_same_ids(tokens: NDArray[np.int64], others: NDArray[np.int64], field: str) -> None:
    """The ids beside the log-probs must be the sampled ids."""
    differ = tokens != others
    if differ.any():
        position = int(differ.argmax())
        remedy = f"The token is {int(tokens[position])}: text was tokenized again, or two answers were mixed."
        raise fail("id differs from the sampled id", field, int(others[position]), remedy, position)


def pick_sampled(tokens: NDArray[np.int64], rows: Rows, field: str) -> NDArray[np.float32]:
    """Each token's own value in its row, float32 ``[T]``; a token that its row lacks is an error."""
    assert rows.logprobs is not None
    owner = np.repeat(np.arange(len(tokens)), np.diff(rows.offsets))
    at = np.flatnonzero(rows.ids == tokens[owner])
    values = np.full(len(tokens), np.nan, dtype=np.float32)
    found = np.zeros(len(tokens), dtype=np.bool_)
    values[owner[at]] = rows.logprobs[at]
    found[owner[at]] = True
    if not found.all():
        position = int((~found).argmax())
        remedy = "The support was not taken from the sampler itself: upgrade the engine, or sample again."
        problem = "the sampled token is absent from its row"
        raise fail(problem, field, int(tokens[position]), remedy, position)
    return values


def drop_fillers(rows: Rows) -> Rows:
    """Without the slots that engines fill with −inf or a sentinel: they were no candidates. NaN stays.

    A row of nothing else is marked absent: its candidates did not come.
    """
    if rows.logprobs is None:
        return rows
    filler = rows.logprobs <= SENTINEL
    if not filler.any():
        return rows
    owner = np.repeat(np.arange(len(rows.complete)), np.diff(rows.offsets))
    counts = np.bincount(owner[~filler], minlength=len(rows.complete))
    absent = (counts == 0) & (np.diff(rows.offsets) > 0)
    absent = absent if rows.absent is None else absent | rows.absent
    ids, logprobs = rows.ids[~filler], rows.logprobs[~filler]
    return replace(rows, ids=ids, logprobs=logprobs, offsets=offsets_of(counts), absent=absent)


def with_prompt(answer: Answer, ids: Any, field: str) -> Answer:
    """The answer with its call's context ids, where they are known."""
    return answer if ids is None else replace(answer, prompt=integers(ids, field))


def read_each(
    items: Sequence[Any],
    field: str,
    read: Callable[[Any], Answer],
    spec: SamplerSpec,
    on_missing: str,
    weight_version: int | str | None,
) -> list[Turn]:
    """The samples of one response, each read and finished; errors say which one they are in."""
    if not items:
        raise fail("a response without samples", field, None, DAMAGED)
    turns = []
    for index, item in enumerate(items):
        with within_sample(index if len(items) > 1 else None):
            turns.append(_finish(read(item), spec, on_missing, weight_version))
    return turns


def records_of(turns: Sequence[Turn], several: bool) -> SamplerRecord | list[SamplerRecord]:
    """Their records: a list where there are ``several``."""
    records = [turn.record for turn in turns]
    return records if several else records[0]


def _finish(answer: Answer, spec: SamplerSpec, on_missing: str, weight_version: int | str | None) -> Turn:
    """The validated record of one answer, as a turn."""
    rows = None if answer.rows is None else drop_fillers(answer.rows)
    answer = replace(answer, rows=rows)
    if spec.truncates and rows is None:
        remedy = "Ask for the support: see request_parameters(spec). An aborted request can come without it."
        raise fail("truncated sampling without support", answer.rows_field, None, remedy, 0)
    count = len(answer.tokens)
    spans = answer.spans
    if weight_version is not None:
        if spans is not None:
            remedy = "The answer has per-token spans: leave weight_version out."
            raise fail("weight version declared twice", "weight_version", weight_version, remedy)
        spans = [(str(weight_version), 0, count)] if count else []
    version, names = versions_from_spans(spans, count)
    record = SamplerRecord(
        torch.from_numpy(answer.tokens),
        torch.from_numpy(answer.logprobs),
        None if rows is None else _candidates(rows),
        float(spec.temperature),
        None if spec.group is None else torch.zeros(count, dtype=torch.int64),
        () if spec.group is None else (spec.group,),
        version,
        names,
        (spec,),
    )
    missing = _missing(answer, record, on_missing)
    mask = torch.from_numpy(~missing) if missing.any() else None
    if mask is not None:
        record = replace(record, logprobs=torch.from_numpy(answer.logprobs).masked_fill(~mask, torch.nan))
    record.validate(spec.vocab_size, mask)
    if mask is not None:  # a token without a log-prob is still context of those after it: its id must be one
        SamplerRecord(record.tokens).validate(spec.vocab_size)
    if rows is not None:
        _check_outside(
            answer.tokens, np.where(missing, np.float32(np.nan), answer.logprobs), rows, answer.rows_field
        )
    warn_unwitnessed_zeros(record, mask, stacklevel=5)
    prompt = None if answer.prompt is None else torch.from_numpy(answer.prompt)
    return Turn(record, prompt, spec, finish_reason=answer.finish_reason, truncated=answer.truncated)


def _candidates(rows: Rows) -> CandidateSet:
    logprobs = None if rows.logprobs is None else torch.from_numpy(rows.logprobs)
    offsets, complete = torch.from_numpy(rows.offsets), torch.from_numpy(rows.complete)
    return CandidateSet(torch.from_numpy(rows.ids), logprobs, offsets, complete)


def _missing(answer: Answer, record: SamplerRecord, on_missing: str) -> NDArray[np.bool_]:
    """bool [T]. Raises for the first missing value, or warns with their number."""
    rows, own = answer.rows, answer.logprobs
    found: list[tuple[NDArray[np.bool_], str, str, NDArray[np.float32] | None]]
    found = [(is_missing(own), answer.field, "log-prob is missing", own)]
    if rows is not None and rows.absent is not None:
        found.append((rows.absent, answer.rows_field, "candidates are missing", None))
    if rows is not None and rows.logprobs is not None:
        if np.isnan(rows.logprobs).any():
            owner = np.repeat(np.arange(len(own)), np.diff(rows.offsets))
            broken = np.zeros(len(own), dtype=np.bool_)
            broken[owner[np.isnan(rows.logprobs)]] = True
            found.append((broken, answer.rows_field, "a candidate's log-prob is missing", None))
        problem = "log-prob is missing: 0.0 stands for it, and the token's candidates say otherwise"
        found.append((_contradicted_zeros(answer.tokens, own, rows), answer.field, problem, own))
    missing: NDArray[np.bool_] = np.logical_or.reduce([mask for mask, *_ in found])
    if on_missing == "mask":  # a mere suspicion, which only warns by default
        missing |= unwitnessed_zero_runs(record, torch.from_numpy(~missing)).numpy()
    if not missing.any():
        return missing
    for mask, field, problem, values in found:
        if on_missing == "raise" and mask.any():
            position = int(mask.argmax())
            remedy = (FIRST_MISSING if position == 0 else "") + MISSING_REMEDY
            value = None if values is None else float(values[position])
            raise fail(problem, field, value, remedy, position)
    problem = f"{int(missing.sum())} of {len(missing)} tokens have no log-prob and must be masked"
    warnings.warn(RecordWarning(problem + ": see offpolicy_corr.missing_tokens"), stacklevel=6)
    return missing


def _contradicted_zeros(
    tokens: NDArray[np.int64], logprobs: NDArray[np.float32], rows: Rows
) -> NDArray[np.bool_]:
    """bool [T]: log-probs of exactly 0.0 in whose rows the token is not (nearly) certain."""
    assert rows.logprobs is not None
    found = np.zeros(len(tokens), dtype=np.bool_)
    zero = np.flatnonzero((logprobs == 0) & (np.diff(rows.offsets) > 0))
    counts = np.diff(rows.offsets)[zero]
    starts = offsets_of(counts)
    at = np.arange(starts[-1]) + np.repeat(rows.offsets[:-1][zero] - starts[:-1], counts)
    owner = np.repeat(zero, counts)
    certain = (rows.ids[at] == tokens[owner]) & ~(rows.logprobs[at] < -SAME_VALUE[1])
    found[zero] = True
    found[owner[certain]] = False
    return found


def _check_outside(tokens: NDArray[np.int64], logprobs: NDArray[np.float32], rows: Rows, field: str) -> None:
    """A token outside its head cannot be likelier than the head's least: 0.0 in place of a lost value often is."""
    if rows.logprobs is None or not len(rows.ids) or rows.complete.all():
        return
    counts = np.diff(rows.offsets)
    outside = ~_in_own_row(tokens, rows, counts) & ~rows.complete & (counts > 0) & ~np.isnan(logprobs)
    if not outside.any():
        return
    least = np.full(len(tokens), np.inf, dtype=np.float32)
    least[counts > 0] = np.minimum.reduceat(rows.logprobs, rows.offsets[:-1][counts > 0])
    likelier = outside & (logprobs > least + SAME_VALUE[1] + SAME_VALUE[0] * np.abs(least))
    if likelier.any():
        position = int(likelier.argmax())
        remedy = (
            f"The least of it has {least[position]}: the values belong to different tokens, or are filler."
        )
        problem = "a token outside its head is likelier than the head"
        raise fail(problem, field, float(logprobs[position]), remedy, position)


def _in_own_row(tokens: NDArray[np.int64], rows: Rows, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    if (counts == counts[0]).all():
        own: NDArray[np.bool_] = (rows.ids.reshape(len(tokens), -1) == tokens[:, None]).any(1)
        return own
    found = np.zeros(len(tokens), dtype=np.bool_)
    at = np.flatnonzero(rows.ids == np.repeat(tokens, counts))
    found[np.searchsorted(rows.offsets, at, side="right") - 1] = True
    return found
