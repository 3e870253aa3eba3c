"""Records from vLLM: Python outputs, and every HTTP shape of 0.32 and 0.33, whole or streamed.

The server's ``--logprobs-mode`` decides what the numbers are and is not echoed, so the spec declares it.
Under filters the whole support is needed: ask for ``logprobs >= top_k`` in ``processed_logprobs`` mode, with
``--max-logprobs -1``; slots beyond the support come back as −inf and tell that the row is complete.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offpolicy_corr.records.assembly import Turn
from offpolicy_corr.records.missing import is_missing
from offpolicy_corr.records.record import SamplerRecord
from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.records.validation import SAME_VALUE
from offpolicy_corr.records.weight_versions import parse_spans

from . import _vllm_rows as vllm_rows
from ._answer import Answer, check_count, check_same_ids, check_spec, read_each, records_of, with_prompt
from ._arrays import DAMAGED, columns, fail, flatten, floats, integers, mapping, sequence
from ._json import parsed
from ._streams import join_vllm_json, join_vllm_objects

TOKEN_ID = re.compile(r"token_id:([0-9]{1,19})\n")
AS_IDS = "Send return_tokens_as_token_ids=true and return_token_ids=true: text cannot be aligned with ids."


def read_output(
    output: Any,
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    top_logprobs: int | None = None,
) -> SamplerRecord | list[SamplerRecord]:
    """Record of a ``CompletionOutput``; a list of them where a ``RequestOutput``, or a list of those, has
    several.

    Args:
        output: vLLM's object, or the list that ``LLM.generate`` returns; dict rows or ``FlatLogprobs``.
        spec: what the server's log-probs mean.
        on_missing: ``"raise"``, or ``"mask"``: tokens without a log-prob hold NaN and `missing_tokens` finds
            them; they must leave the loss mask, and a `RecordWarning` gives their number. A run of exact 0.0 at
            an answer's end that no candidate supports only warns under ``"raise"``, and is masked too under
            ``"mask"``.
        weight_version: the version of all tokens where the engine reports no spans.
        top_logprobs: the number that was requested. Rows usually tell it; saying it settles the size of the
            heads.

    Raises:
        RecordError: anything that is not a trustworthy record.
    """
    turns = read_turns(
        output, spec, on_missing=on_missing, weight_version=weight_version, top_logprobs=top_logprobs
    )
    return records_of(turns, len(turns) > 1)


def read_turns(
    output: Any,
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    top_logprobs: int | None = None,
    prompt: Sequence[int] | None = None,
) -> list[Turn]:
    """As `read_output`, as turns for `assemble`; a ``RequestOutput`` brings its prompt's ids along."""
    check_spec(spec, "vllm", on_missing)
    items = [
        pair for one in (output if isinstance(output, (list, tuple)) else [output]) for pair in _pairs(one)
    ]

    def read(pair: tuple[Any, Any]) -> Answer:
        answer = _from_object(pair[0], spec, top_logprobs)
        return with_prompt(answer, pair[1] if prompt is None else prompt, "prompt_token_ids")

    return read_each(items, "outputs", read, spec, on_missing, weight_version)


def _pairs(output: Any) -> list[tuple[Any, Any]]:
    """Completions with their prompts' ids: a ``RequestOutput`` has several, a ``CompletionOutput`` is one."""
    outputs = getattr(output, "outputs", None)
    context = getattr(output, "prompt_token_ids", None)
    several = [output] if outputs is None else sequence(outputs, "outputs")
    return [(one, context) for one in several]


def read_json(
    response: Any,
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    top_logprobs: int | None = None,
) -> SamplerRecord | list[SamplerRecord]:
    """Record of an HTTP response: ``/inference/v1/generate``, chat or completions, parsed or as bytes.

    Several choices give a list. Arguments and errors as in `read_output`.
    """
    turns = read_json_turns(
        response, spec, on_missing=on_missing, weight_version=weight_version, top_logprobs=top_logprobs
    )
    return records_of(turns, len(turns) > 1)


def read_json_turns(
    response: Any,
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    top_logprobs: int | None = None,
    prompt: Sequence[int] | None = None,
) -> list[Turn]:
    """As `read_json`, as turns for `assemble`."""
    check_spec(spec, "vllm", on_missing)
    response = mapping(parsed(response), "response")
    choices = sequence(response.get("choices"), "choices")

    def read(choice: Any) -> Answer:
        choice = mapping(choice, "choices")
        given = prompt
        for source in (choice, response):
            given = source.get("prompt_token_ids") if given is None else given
        return with_prompt(_from_choice(choice, spec, top_logprobs), given, "prompt_token_ids")

    turns = read_each(choices, "choices", read, spec, on_missing, weight_version)
    _check_usage(response.get("usage"), sum(len(turn.record) for turn in turns))
    return turns


def read_stream(
    chunks: Sequence[Any],
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    top_logprobs: int | None = None,
) -> SamplerRecord | list[SamplerRecord]:
    """Record of a streamed answer, all its chunks in order.

    Args:
        chunks: the JSON chunks of any HTTP route, each parsed or as bytes, of a request with
            ``stream_options={"include_usage": true}`` (or with version spans): only they tell that no chunk was
            lost. Or, from Python, the ``CompletionOutput`` or ``RequestOutput`` deltas of
            ``RequestOutputKind.DELTA``, which only their version spans count, where the engine reports any.

    Other arguments and errors as in `read_output`; also raised where a chunk is missing.
    """
    options: dict[str, Any] = {"weight_version": weight_version, "top_logprobs": top_logprobs}
    chunks = [parsed(chunk) for chunk in sequence(chunks, "chunks")]
    if chunks and all(hasattr(chunk, "outputs") or hasattr(chunk, "token_ids") for chunk in chunks):
        return read_output(join_vllm_objects(chunks), spec, on_missing=on_missing, **options)
    joined = join_vllm_json([mapping(chunk, "chunk") for chunk in chunks])
    return read_json(joined, spec, on_missing=on_missing, **options)


def _from_object(output: Any, spec: SamplerSpec, requested: int | None) -> Answer:
    tokens = integers(_listed(getattr(output, "token_ids", None)), "token_ids")
    value = getattr(output, "logprobs", None)
    if value is None:
        raise fail(
            "no log-probs",
            "logprobs",
            None,
            "Set SamplingParams(logprobs=...): 0 for the sampled token alone.",
        )
    if hasattr(value, "start_indices"):
        rows = vllm_rows.from_flat(value, len(tokens))
    else:
        rows = vllm_rows.from_dicts(value, len(tokens))
    rows = vllm_rows.sampled_first(rows, tokens)
    spans = parse_spans(getattr(output, "weight_versions", None))
    mask, reason = getattr(output, "sampling_mask", None), getattr(output, "finish_reason", None)
    return _answer(tokens, vllm_rows.sampled_values(rows, tokens), rows, mask, spans, reason, spec, requested)


def _listed(value: Any) -> Any:
    """vLLM wraps token ids in sequence types of its own; JSON-like values stay what they are."""
    if value is None or isinstance(value, (list, tuple, np.ndarray, str, bytes, dict)):
        return value
    return list(value) if hasattr(value, "__iter__") else value


def _answer(
    tokens: NDArray[np.int64],
    logprobs: NDArray[np.float32],
    rows: vllm_rows.RawRows | None,
    mask: Any,
    spans: Any,
    reason: Any,
    spec: SamplerSpec,
    requested: int | None,
) -> Answer:
    reason = reason if isinstance(reason, str) else None
    field = "sampling_mask" if mask is not None else "logprobs"
    if mask is not None:
        if spec.logprobs == "raw":
            remedy = "A mask comes only from a server in processed mode: declare logprobs='processed'."
            raise fail("the response has a sampling mask", "spec.logprobs", spec.logprobs, remedy)
        candidates = vllm_rows.join_mask(mask, rows, tokens)
    elif rows is None:
        candidates = None
    else:
        candidates = vllm_rows.candidates(rows, tokens, spec, np.isnan(logprobs), requested)
    if spec.logprobs == "support" and candidates is None and len(tokens):
        remedy = "Ask for logprobs >= top_k, or a server with --return-sampling-mask."
        raise fail("no support in the response", field, None, remedy, 0)
    return Answer(
        tokens, logprobs, "logprobs", candidates, field, spans, None, reason, reason in ("length", "abort")
    )


def _from_choice(choice: dict[str, Any], spec: SamplerSpec, requested: int | None) -> Answer:
    block = choice.get("logprobs")
    if block is None:
        raise fail("no log-probs", "logprobs", None, "Ask for logprobs in the request.")
    block = mapping(block, "logprobs")
    if "token_logprobs" in block:
        ids, values, rows = _from_completions(block)
    else:
        ids, values, rows = _from_content(block)
    given = choice.get("token_ids")
    if given is None and ids is None:
        raise fail("token ids are missing", "token_ids", None, AS_IDS)
    tokens = integers(given, "token_ids") if given is not None else ids
    assert tokens is not None
    check_count(len(values), len(tokens), "logprobs", choice.get("finish_reason"))
    if ids is not None:
        check_same_ids(tokens, ids, "logprobs")
    if rows is not None:
        rows = vllm_rows.sampled_first(rows, tokens)
        own = vllm_rows.sampled_values(rows, tokens)
        rtol, atol = SAME_VALUE
        differ = ~np.isnan(own) & ~(np.abs(own - values) <= atol + rtol * np.abs(values))
        differ &= ~is_missing(values) & (values != 0)  # these, and what 0.0 means, are told by `read_each`
        if differ.any():
            position = int(differ.argmax())
            remedy = "Both must be the token's own value."
            raise fail(
                "the token's value differs from its entry", "logprobs", float(own[position]), remedy, position
            )
    spans = parse_spans(choice.get("weight_versions"))
    mask, reason = choice.get("sampling_mask"), choice.get("finish_reason")
    return _answer(tokens, values, rows, mask, spans, reason, spec, requested)


_Block = tuple["NDArray[np.int64] | None", "NDArray[np.float32]", "vllm_rows.RawRows | None"]


def _from_content(block: dict[str, Any]) -> _Block:
    """The generate shape (integer ids and ranks) and the chat shape (tokens as text)."""
    field = "logprobs.content"
    content = sequence(block.get("content"), field)
    if not set(map(type, content)) <= {dict}:
        raise fail("an entry is no object", field, None, DAMAGED)
    integer_ids = bool(content) and "token_id" in content[0]
    name = "token_id" if integer_ids else "token"
    ids, values = columns(content, field, [itemgetter(name), itemgetter("logprob")])
    lists = [entry.get("top_logprobs") for entry in content]
    entries, _, _ = flatten(lists, field)
    if not entries:
        return _token_ids(ids, integer_ids, field, optional=True), floats(values, field), None
    getters = [itemgetter(name), itemgetter("logprob")] + ([itemgetter("rank")] if integer_ids else [])
    taken = columns(entries, field + ".top_logprobs", getters)
    candidate_ids = _token_ids(taken[0], integer_ids, field + ".top_logprobs", optional=False)
    assert candidate_ids is not None
    ranks = taken[2] if integer_ids else None
    rows = vllm_rows.from_entries(lists, candidate_ids.tolist(), taken[1], ranks, not integer_ids, field)
    return _token_ids(ids, integer_ids, field, optional=True), floats(values, field), rows


def _from_completions(block: dict[str, Any]) -> _Block:
    field = "logprobs.token_logprobs"
    values = floats(sequence(block.get("token_logprobs"), field), field)
    names = sequence(block.get("tokens"), "logprobs.tokens")
    check_count(len(names), len(values), "logprobs.tokens")
    ids = _token_ids(names, False, "logprobs.tokens", optional=True)
    top = block.get("top_logprobs")
    if top is None:
        return ids, values, None
    check_count(len(sequence(top, "logprobs.top_logprobs")), len(values), "logprobs.top_logprobs")
    if not set(map(type, top)) <= {dict, type(None)}:
        raise fail("a row is no object", "logprobs.top_logprobs", None, DAMAGED)
    if not any(top):
        return ids, values, None
    top = [{} if row is None else row for row in top]
    candidate_ids = _token_ids(list(chain.from_iterable(top)), False, "logprobs.top_logprobs", optional=False)
    assert candidate_ids is not None
    lists = [list(row) for row in top]
    numbers = list(chain.from_iterable(map(dict.values, top)))
    return (
        ids,
        values,
        vllm_rows.from_entries(lists, candidate_ids.tolist(), numbers, None, False, "logprobs.top_logprobs"),
    )


def _token_ids(
    names: Sequence[Any], integer_ids: bool, field: str, optional: bool
) -> NDArray[np.int64] | None:
    """Ids of entries; None for texts where the ids may also stand elsewhere."""
    if integer_ids:
        return integers(names, field)
    try:
        text = "\n".join([*names, ""])
    except TypeError:
        raise fail("a token is no text", field, None, DAMAGED) from None
    found = TOKEN_ID.findall(text)
    if len(found) == len(names) and not TOKEN_ID.sub("", text):
        return integers(list(map(int, found)), field)
    if optional and not found:
        return None
    raise fail("tokens are given as text", field, None, AS_IDS)


def _check_usage(usage: Any, count: int) -> None:
    if usage is None:
        return
    declared = mapping(usage, "usage").get("completion_tokens")
    if declared is not None and (type(declared) is not int or declared != count):
        raise fail(
            f"completion_tokens disagrees with the {count} tokens",
            "usage.completion_tokens",
            declared,
            DAMAGED,
        )
