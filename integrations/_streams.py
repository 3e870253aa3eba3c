"""Chunks of a streamed answer, joined into the response that would have come at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._arrays import fail, mapping, sequence

_SGLANG_DELTAS = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)
UNFINISHED = "The stream was cut off before its last chunk: sample again, or read it as a partial rollout."


def join_sglang(chunks: Sequence[dict[str, Any]], incremental: bool) -> dict[str, Any]:
    """One ``/generate`` response. The server's lengths are cumulative in both modes, and are checked."""
    if not chunks:
        raise fail("a stream without chunks", "chunks", None, UNFINISHED)
    last_meta = mapping(chunks[-1].get("meta_info"), "meta_info")
    if last_meta.get("finish_reason") is None:
        raise fail("the stream has no last chunk", "finish_reason", None, UNFINISHED)
    return _join_incremental(chunks) if incremental else _last_cumulative(chunks)


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


def join_vllm_json(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One response from the chunks of vLLM's ``/inference/v1/generate``, chat or completions stream."""
    choices: dict[Any, dict[str, Any]] = {}
    result: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        result.update(
            {name: value for name, value in chunk.items() if name != "choices" and value is not None}
        )
        for part in sequence(chunk.get("choices"), f"chunks[{number}].choices"):
            part = mapping(part, f"chunks[{number}].choices")
            whole = choices.setdefault(part.get("index"), {"index": part.get("index")})
            _add_vllm(whole, part, f"chunks[{number}]")
    if not choices:
        raise fail("a stream without choices", "chunks", None, UNFINISHED)
    for whole in choices.values():
        if whole.get("finish_reason") is None:
            raise fail("the stream has no last chunk", "finish_reason", None, UNFINISHED)
    return {**result, "choices": list(choices.values())}


def _add_vllm(whole: dict[str, Any], part: dict[str, Any], where: str) -> None:
    for name, value in part.items():
        if value is None or name in ("index", "delta"):
            continue
        if name in ("token_ids", "sampling_mask"):
            whole.setdefault(name, []).extend(sequence(value, f"{where}.{name}"))
        elif name == "logprobs":
            target = whole.setdefault("logprobs", {})
            for key, rows in mapping(value, f"{where}.logprobs").items():
                if rows is not None:
                    target.setdefault(key, []).extend(sequence(rows, f"{where}.logprobs.{key}"))
        elif name == "text":
            whole["text"] = whole.get("text", "") + str(value)
        else:
            whole[name] = value
