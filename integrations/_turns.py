"""Reader: answers to validated records and turns, one per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offpolicy_corr.records.candidates import CandidateSet
from offpolicy_corr.records.errors import within_sample
from offpolicy_corr.records.missing import SENTINEL
from offpolicy_corr.records.record import SamplerRecord
from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.records.trajectory import Turn
from offpolicy_corr.records.weight_versions import versions_from_spans

from ._answer import RESUME, UNFINISHED_REASONS, Answer, ReadOptions, Rows, check_declared
from ._arrays import DAMAGED, fail, mapping, offsets_of
from ._missing import find_missing, warn_suspected_zeros


def read_each(
    items: Sequence[Any], field: str, read: Callable[[Any], Answer], options: ReadOptions
) -> list[Turn]:
    """The samples of one response, each read and finished; errors say which one they are in."""
    if not items:
        raise fail("a response without samples", field, None, DAMAGED)
    several = len(items) > 1
    answers = []
    for index, item in enumerate(items):
        with within_sample(index if several else None):
            answers.append(read(item))
    lacking = [index for index, one in enumerate(answers) if one.spans is None and len(one.tokens)]
    if lacking and any(one.spans is not None for one in answers) and options.weight_version is None:
        remedy = "The engine lost the spans of one sample: its tokens have no version. Sample again."
        with within_sample(lacking[0]):
            raise fail("version spans in some samples and not in others", "weight_versions", None, remedy)
    turns = []
    for index, answer in enumerate(answers):
        with within_sample(index if several else None):
            turns.append(_finish(answer, options))
    return turns


def records_of(turns: Sequence[Turn], several: bool) -> SamplerRecord | list[SamplerRecord]:
    """Their records: a list where there are ``several``."""
    records = [turn.record for turn in turns]
    return records if several else records[0]


def check_usage(usage: Any, turns: Sequence[Turn]) -> None:
    """The ``usage`` of a chat or completions response: all samples' tokens, and every prompt once."""
    if usage is None:
        return
    usage = mapping(usage, "usage")
    sampled = sum(len(turn.record) for turn in turns)
    check_declared(usage.get("completion_tokens"), "usage.completion_tokens", sampled, "tokens")
    prompt_tokens = usage.get("prompt_tokens")
    known = [len(turn.prompt) for turn in turns if turn.prompt is not None]
    check_declared(prompt_tokens, "usage.prompt_tokens", None, "")
    if prompt_tokens is not None and known and len(known) == len(turns):
        # n samples per prompt: how many is not said, so any n that divides the choices may be it
        totals = [sum(known[::n]) for n in range(1, len(known) + 1) if len(known) % n == 0]
        if prompt_tokens not in totals:
            check_declared(prompt_tokens, "usage.prompt_tokens", totals[-1], "ids of the prompt")
    total = usage.get("total_tokens")
    if prompt_tokens is not None:
        check_declared(total, "usage.total_tokens", prompt_tokens + sampled, "tokens of prompt and answer")


def _finish(answer: Answer, options: ReadOptions) -> Turn:
    """The validated record of one answer, as a turn."""
    spec = options.spec
    rows = None if answer.rows is None else _drop_fillers(answer.rows)
    answer = replace(answer, rows=rows)
    if spec.truncates and rows is None and len(answer.tokens):
        remedy = "Ask for the support: see request_parameters(spec)."
        if answer.finish_reason == "abort":
            remedy = "A request that was aborted in the queue comes without it: sample again."
        raise fail("truncated sampling without support", answer.rows_field, None, remedy, 0)
    _check_finished(answer, options.partial)
    record = _as_record(answer, options)
    missing = find_missing(answer, record, options)
    _check_padding(answer, spec, missing)
    mask = torch.from_numpy(~missing) if missing.any() else None
    if mask is not None:
        record = replace(record, logprobs=torch.from_numpy(answer.logprobs).masked_fill(~mask, torch.nan))
    record.validate(spec.vocab_size, mask)
    if mask is not None:  # a token without a log-prob is still context of those after it: its id must be one
        SamplerRecord(record.tokens).validate(spec.vocab_size)
    if options.on_missing == "raise":
        warn_suspected_zeros(answer, record, spec)
    prompt = None if answer.prompt is None else torch.from_numpy(answer.prompt)
    return Turn(record, prompt, spec, finish_reason=answer.finish_reason, truncated=answer.truncated)


def _drop_fillers(rows: Rows) -> Rows:
    """Without the slots that engines fill with −inf or a sentinel: they were no candidates. NaN stays.

    A row of nothing else is marked absent: its candidates did not come.
    """
    if rows.logprobs is None:
        return rows
    filler = rows.logprobs <= SENTINEL
    if not filler.any():
        return rows
    counts = np.bincount(rows.row_index[~filler], minlength=len(rows.complete))
    absent = (counts == 0) & (np.diff(rows.offsets) > 0)
    absent = absent if rows.absent is None else absent | rows.absent
    ids, logprobs = rows.ids[~filler], rows.logprobs[~filler]
    return replace(rows, ids=ids, logprobs=logprobs, offsets=offsets_of(counts), absent=absent)


def _check_finished(answer: Answer, partial: bool) -> None:
    if partial or answer.finish_reason not in UNFINISHED_REASONS:
        return
    reason = answer.finish_reason
    problem = "the answer is unfinished: it has no finish_reason"
    if reason is not None:
        problem = f"the answer is unfinished: it ended with {reason!r}"
        problem += f" ({answer.finish_message[:200]})" if answer.finish_message else ""
    raise fail(problem, "finish_reason", reason, RESUME)


def _as_record(answer: Answer, options: ReadOptions) -> SamplerRecord:
    spec, rows, count = options.spec, answer.rows, len(answer.tokens)
    version, names = _versions(answer, options.weight_version)
    return SamplerRecord(
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


def _versions(answer: Answer, declared: int | str | None) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Per-token versions from the spans or the caller's word. Within an answer weights only become newer."""
    count, spans = len(answer.tokens), answer.spans
    if declared is not None:
        if spans is not None:
            remedy = "The answer has per-token spans: leave weight_version out."
            raise fail("weight version declared twice", "weight_version", declared, remedy)
        spans = [(str(declared), 0, count)] if count else []
    version, names = versions_from_spans(spans, count)
    if version is None or names is not None:
        return version, names
    numbered = (version >= 0).nonzero().squeeze(1)
    falls = (version[numbered].diff() < 0).nonzero().squeeze(1)
    if len(falls):
        before, after = (int(version[numbered[int(falls[0]) + step]]) for step in (0, 1))
        problem = f"the weight version falls inside one answer, from {before} to {after}"
        remedy = "Spans were mixed up. Weights that were rolled back need a version of their own."
        raise fail(problem, "weight_versions", after, remedy, int(numbered[int(falls[0]) + 1]))
    return version, names


def _candidates(rows: Rows) -> CandidateSet:
    logprobs = None if rows.logprobs is None else torch.from_numpy(rows.logprobs)
    offsets, complete = torch.from_numpy(rows.offsets), torch.from_numpy(rows.complete)
    return CandidateSet(torch.from_numpy(rows.ids), logprobs, offsets, complete)


def _check_padding(answer: Answer, spec: SamplerSpec, missing: NDArray[np.bool_]) -> None:
    """Ids of the columns by which the logits are wider than the tokenizer, named as such."""
    if spec.vocab_size is None or spec.logits_width is None:
        return
    remedy = (
        f"The tokenizer knows {spec.vocab_size} ids and the logits have {spec.logits_width} columns; those between "
        "are padding with weights nobody trains. Set their logits to -inf in the engine, and sample again."
    )
    problem = "an id of the padded vocabulary"
    padded = np.flatnonzero((answer.tokens >= spec.vocab_size) & (answer.tokens < spec.logits_width))
    if len(padded):
        token = int(padded[0])
        raise fail(problem, "tokens", int(answer.tokens[token]), remedy, token)
    if answer.rows is None:
        return
    ids = answer.rows.ids
    padded = np.flatnonzero((ids >= spec.vocab_size) & (ids < spec.logits_width))
    tokens = np.searchsorted(answer.rows.offsets, padded, side="right") - 1
    padded, tokens = padded[~missing[tokens]], tokens[~missing[tokens]]
    if len(padded):
        raise fail(problem, "candidates.ids", int(ids[padded[0]]), remedy, int(tokens[0]))
