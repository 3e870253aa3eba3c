"""Reader: chunks of a streamed answer, joined into the response that would have come at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from offpolicy_corr.records.errors import RecordError

from ._answer import RESUME
from ._arrays import DAMAGED, fail, mapping, sequence

_SGLANG_DELTAS = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)
_SGLANG_LENGTHS = (
    "completion_tokens",
    "output_token_logprobs_length",
    "output_token_sampling_mask_length",
    "weight_versions",
)
INCLUDE_USAGE = "Send stream_options={'include_usage': true}."
CONTINUOUS_USAGE = (
    "Send stream_options={'include_usage': true, 'continuous_usage_stats': true}: every chunk of a stream that may "
    "be canceled then counts its tokens."
)


def _check_end(reason: Any, partial: bool) -> None:
    """The last chunk carries a ``finish_reason``; only a canceled stream that is read as such has none."""
    if reason is None and not partial:
        raise fail("the stream has no last chunk", "finish_reason", None, RESUME)


def _no_length(field: str, remedy: str) -> RecordError:
    """Without the answer's length from the server itself, a lost chunk would go unnoticed."""
    return fail("nothing in the stream says how many tokens it had", field, None, remedy)


def join_sglang(chunks: Sequence[dict[str, Any]], incremental: bool, partial: bool = False) -> dict[str, Any]:
    """One ``/generate`` response. The server's lengths are cumulative in both modes, and are checked."""
    if not chunks:
        raise fail("a stream without chunks", "chunks", None, "Nothing came: sample again.")
    _check_end(mapping(chunks[-1].get("meta_info"), "meta_info").get("finish_reason"), partial)
    _one_answer({repr(chunk.get("index")) for chunk in chunks}, "index")
    return _join_incremental(chunks) if incremental else _last_cumulative(chunks)


def _one_answer(found: set[str], field: str) -> None:
    if len(found) > 1:
        remedy = "Several samples and requests share one connection: read each one's chunks by themselves."
        raise fail("chunks of several answers", field, sorted(found)[0], remedy)


def _last_cumulative(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    before: Sequence[Any] = []
    for index, chunk in enumerate(chunks):
        ids = sequence(chunk.get("output_ids"), f"chunks[{index}].output_ids")
        if list(ids[: len(before)]) != list(before):
            remedy = "Each chunk must repeat all before it; for deltas pass incremental=True."
            raise fail("a chunk does not continue the one before", f"chunks[{index}].output_ids", ids, remedy)
        before = ids
    return chunks[-1]


def _join_incremental(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if all(chunks[-1]["meta_info"].get(name) is None for name in _SGLANG_LENGTHS):
        raise _no_length("completion_tokens", "Keep meta_info as the server sent it.")
    ids: list[Any] = []
    joined: dict[str, list[Any]] = {}
    for index, chunk in enumerate(chunks):
        where = f"chunks[{index}]"
        new = sequence(chunk.get("output_ids"), f"{where}.output_ids")
        meta = mapping(chunk.get("meta_info"), f"{where}.meta_info")
        ids.extend(new)
        for name in _SGLANG_DELTAS:
            value = meta.get(name)
            if value is None:
                continue
            rows = sequence(value, f"{where}.{name}")
            if len(rows) != len(new):
                problem = f"{len(rows)} entries beside {len(new)} new tokens"
                remedy = (
                    "Ids are incremental and these are not: fix the server, or stream without increments."
                )
                raise fail(problem, f"{where}.{name}", len(rows), remedy)
            joined.setdefault(name, []).extend(rows)
            declared = meta.get(f"{name}_length")
            if declared is not None and declared != len(ids):
                remedy = "A chunk was lost, or an abort sent the last token again."
                raise fail(
                    f"{name}_length says {declared}, {len(ids)} came",
                    f"{where}.{name}_length",
                    declared,
                    remedy,
                )
    return {**chunks[-1], "output_ids": ids, "meta_info": {**chunks[-1]["meta_info"], **joined}}


def join_vllm_json(chunks: Sequence[dict[str, Any]], partial: bool = False) -> dict[str, Any]:
    """One response from the chunks of vLLM's ``/inference/v1/generate``, chat or completions stream.

    Chunks carry no numbers. The usage at the end, a usage in every chunk (which counts its own choice's tokens so
    far), or version spans say whether all of them came.
    """
    choices: dict[int, dict[str, Any]] = {}
    counted: dict[int, bool] = {}
    result: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        where = f"chunks[{number}]"
        parts = [
            mapping(part, f"{where}.choices") for part in sequence(chunk.get("choices"), f"{where}.choices")
        ]
        result.update(
            {
                n: v
                for n, v in chunk.items()
                if n != "choices" and v is not None and not (n == "usage" and parts)
            }
        )
        for part in parts:
            index = part.get("index", 0)
            if type(index) is not int:
                raise fail("a choice without a number", f"{where}.choices", index, DAMAGED)
            whole = choices.setdefault(index, {"index": index})
            _add_vllm(whole, part, where)
            counted[index] = len(parts) == 1 and _check_running_usage(chunk.get("usage"), whole, where)
    if not choices:
        raise fail("a stream without choices", "chunks", None, "Nothing came: sample again.")
    for whole in choices.values():
        _check_end(whole.get("finish_reason"), partial)
    usage = result.get("usage")
    total = isinstance(usage, dict) and usage.get("completion_tokens") is not None
    for index, whole in choices.items():
        if not (total or counted[index] or whole.get("weight_versions") is not None):
            raise _no_length("usage", INCLUDE_USAGE if whole.get("finish_reason") else CONTINUOUS_USAGE)
    return {**result, "choices": [choices[index] for index in sorted(choices)]}


def _check_running_usage(usage: Any, whole: dict[str, Any], where: str) -> bool:
    """Compare a chunk's own usage with what came so far of its choice; whether there was one to compare."""
    declared = mapping(usage, f"{where}.usage").get("completion_tokens") if usage is not None else None
    if declared is None:
        return False
    ids, block = whole.get("token_ids"), whole.get("logprobs") or {}
    came = len(ids if ids is not None else block.get("content") or block.get("token_logprobs") or [])
    if type(declared) is not int or declared != came:
        remedy = "A chunk was lost on the way: sample again."
        raise fail(f"usage says {declared} tokens so far, {came} came", f"{where}.usage", declared, remedy)
    return True


def _add_vllm(whole: dict[str, Any], part: dict[str, Any], where: str) -> None:
    for name, value in part.items():
        if value is None or name in ("index", "delta", "text"):  # nobody reads a text; joining it costs T²
            continue
        if name in ("token_ids", "sampling_mask"):
            whole.setdefault(name, []).extend(sequence(value, f"{where}.{name}"))
        elif name == "logprobs":
            target = whole.setdefault("logprobs", {})
            for key, rows in mapping(value, f"{where}.logprobs").items():
                if rows is not None:
                    target.setdefault(key, []).extend(sequence(rows, f"{where}.logprobs.{key}"))
        else:
            whole[name] = value


def join_vllm_objects(chunks: Sequence[Any], partial: bool) -> SimpleNamespace:
    """A ``RequestOutput``-like object from Python deltas; each carries new tokens, their rows and their masks."""
    _one_answer({repr(getattr(chunk, "request_id", None)) for chunk in chunks}, "request_id")
    parts: dict[int, list[Any]] = {}
    for chunk in chunks:
        outputs = getattr(chunk, "outputs", None)
        for part in [chunk] if outputs is None else sequence(outputs, "outputs"):
            index = getattr(part, "index", 0)
            if type(index) is not int:
                raise fail("a completion without a number", "outputs.index", index, DAMAGED)
            parts.setdefault(index, []).append(part)
    prompt = getattr(chunks[0], "prompt_token_ids", None)
    outputs = [_join_objects(parts[index], partial) for index in sorted(parts)]
    return SimpleNamespace(outputs=outputs, prompt_token_ids=prompt)


def _join_objects(parts: Sequence[Any], partial: bool) -> SimpleNamespace:
    last = parts[-1]
    reason = getattr(last, "finish_reason", None)
    _check_end(reason, partial)
    rows = [part.logprobs for part in parts if getattr(part, "logprobs", None) is not None]
    masks = [part.sampling_mask for part in parts if getattr(part, "sampling_mask", None) is not None]
    try:
        if getattr(last, "weight_versions", None) is None:  # spans would count the tokens
            _refuse_cumulative([list(part.token_ids) for part in parts])
        return SimpleNamespace(
            token_ids=[token for part in parts for token in part.token_ids],
            logprobs=_join_rows(rows),
            sampling_mask=SimpleNamespace(token_ids=[r for m in masks for r in m.token_ids])
            if masks
            else None,
            finish_reason=reason,
            weight_versions=getattr(last, "weight_versions", None),
        )
    except (AttributeError, TypeError) as error:
        problem = f"a chunk is no completion ({error!r})"
        raise fail(problem, "chunks", None, "Pass CompletionOutput deltas.") from None


def _refuse_cumulative(ids: list[list[Any]]) -> None:
    """vLLM's default stream repeats all before in every output: joined as deltas, tokens would be counted twice."""
    steps = [(before, after) for before, after in pairwise(ids) if before]
    if steps and all(len(after) > len(before) and after[: len(before)] == before for before, after in steps):
        remedy = "Ask for RequestOutputKind.DELTA, or give the last output to read_output."
        raise fail("every chunk repeats the one before: these are no deltas", "token_ids", None, remedy)


def _join_rows(rows: Sequence[Any]) -> Any:
    """Dict rows end to end; flat rows end to end, their indices moved on."""
    if not rows or not hasattr(rows[0], "start_indices"):
        return [row for own in rows for row in own] or None
    joined = SimpleNamespace(start_indices=[], end_indices=[], token_ids=[], logprobs=[], ranks=[])
    for own in rows:
        shift = len(joined.token_ids)
        joined.start_indices += [index + shift for index in own.start_indices]
        joined.end_indices += [index + shift for index in own.end_indices]
        for name in ("token_ids", "logprobs", "ranks"):
            getattr(joined, name).extend(getattr(own, name))
    return joined
