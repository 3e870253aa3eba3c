"""Reader: one completion of vLLM, a Python object or a choice of any HTTP shape, as an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offpolicy_corr.records.missing import is_missing
from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.records.validation import SAME_VALUE
from offpolicy_corr.records.weight_versions import parse_spans

from ._answer import Answer, check_count, check_same_ids
from ._arrays import DAMAGED, columns, fail, flatten, floats, integers, mapping, sequence
from ._vllm_candidates import candidate_rows, join_mask
from ._vllm_rows import RawRows, from_dicts, from_entries, from_flat, sampled_first, sampled_values

TOKEN_ID = re.compile(r"token_id:([0-9]{1,19})\n")
AS_IDS = "Send return_tokens_as_token_ids=true and return_token_ids=true: text cannot be aligned with ids."
STOP_CUT = "Stop tokens may be cut from the ids alone: set include_stop_str_in_output."
ASK_TOP_LOGPROBS = (
    "Ask for logprobs. The chat route sends none without top_logprobs: 0 gives the sampled token alone."
)


def answer_of_output(output: Any, spec: SamplerSpec, requested: int | None) -> Answer:
    """A ``CompletionOutput``; ``requested`` is how many candidates were asked for, None where that is unknown."""
    tokens = integers(_as_list(getattr(output, "token_ids", None)), "token_ids")
    value = getattr(output, "logprobs", None)
    spans = parse_spans(getattr(output, "weight_versions", None))
    mask, reason = getattr(output, "sampling_mask", None), getattr(output, "finish_reason", None)
    if value is None and not len(tokens):  # canceled before the first token
        return _answer(tokens, floats([], "logprobs"), None, None, spans, reason, spec, requested)
    if value is None:
        remedy = "Set SamplingParams(logprobs=...): 0 for the sampled token alone."
        raise fail("no log-probs", "logprobs", None, remedy)
    build = from_flat if hasattr(value, "start_indices") else from_dicts
    rows = sampled_first(build(value, len(tokens)), tokens)
    return _answer(tokens, sampled_values(rows, tokens), rows, mask, spans, reason, spec, requested)


def _as_list(value: Any) -> Any:
    """vLLM wraps token ids in sequence types of its own; JSON-like values stay what they are."""
    if value is None or isinstance(value, (list, tuple, np.ndarray, str, bytes, dict)):
        return value
    return list(value) if hasattr(value, "__iter__") else value


def _answer(
    tokens: NDArray[np.int64],
    logprobs: NDArray[np.float32],
    rows: RawRows | None,
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
        heads = join_mask(mask, rows, tokens)
    elif rows is None:
        if spec.truncates and len(tokens):
            remedy = "Ask for top_logprobs >= top_k: without them nothing says what could have been drawn."
            raise fail("log-probs were asked for without top_logprobs", "logprobs", None, remedy, 0)
        heads = None
    else:
        heads = candidate_rows(rows, tokens, spec, np.isnan(logprobs), requested)
    if spec.logprobs == "support" and heads is None and len(tokens):
        remedy = "Ask for logprobs >= top_k, or a server with --return-sampling-mask."
        raise fail("no support in the response", field, None, remedy, 0)
    return Answer(tokens, logprobs, "logprobs", heads, field, spans, None, reason)


def answer_of_choice(choice: dict[str, Any], spec: SamplerSpec, requested: int | None) -> Answer:
    """A choice of the generate, the chat or the completions route; ``requested`` as in `answer_of_output`."""
    block, given = choice.get("logprobs"), choice.get("token_ids")
    spans = parse_spans(choice.get("weight_versions"))
    mask, reason = choice.get("sampling_mask"), choice.get("finish_reason")
    if block is None and given == []:  # canceled before the first token
        return _answer(integers([], ""), floats([], ""), None, None, spans, reason, spec, requested)
    if block is None:
        raise fail("no log-probs", "logprobs", None, ASK_TOP_LOGPROBS)
    block = mapping(block, "logprobs")
    if "token_logprobs" in block:
        ids, values, rows = _from_completions(block)
    else:
        ids, values, rows = _from_content(block)
    if given is None and ids is None:
        raise fail("token ids are missing", "token_ids", None, AS_IDS)
    tokens = integers(given, "token_ids") if given is not None else ids
    assert tokens is not None
    cut = len(values) > len(tokens) and reason == "stop"
    check_count(len(values), len(tokens), "logprobs", STOP_CUT if cut else None)
    if ids is not None:
        check_same_ids(tokens, ids, "logprobs")
    if rows is not None:
        rows = sampled_first(rows, tokens)
        own = sampled_values(rows, tokens)
        rtol, atol = SAME_VALUE
        differ = ~np.isnan(own) & ~(np.abs(own - values) <= atol + rtol * np.abs(values))
        differ &= ~is_missing(values) & (values != 0)  # these, and what 0.0 means, are judged in _missing
        if differ.any():
            position = int(differ.argmax())
            problem = "the token's value differs from its entry"
            remedy = "Both must be the token's own value."
            raise fail(problem, "logprobs", float(own[position]), remedy, position)
    return _answer(tokens, values, rows, mask, spans, reason, spec, requested)


Block = tuple[NDArray[np.int64] | None, NDArray[np.float32], RawRows | None]


def _from_content(block: dict[str, Any]) -> Block:
    """The generate shape (integer ids and ranks) and the chat shape (tokens as text)."""
    field = "logprobs.content"
    if block.get("content") is None:
        raise fail("no log-probs", field, None, ASK_TOP_LOGPROBS)
    content = sequence(block["content"], field)
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
    rows = from_entries(lists, candidate_ids.tolist(), taken[1], ranks, not integer_ids, field)
    return _token_ids(ids, integer_ids, field, optional=True), floats(values, field), rows


def _from_completions(block: dict[str, Any]) -> Block:
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
    rows = from_entries(lists, candidate_ids.tolist(), numbers, None, False, "logprobs.top_logprobs")
    return ids, values, rows


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
