"""Reader: SGLang's ``/generate`` and chat responses of 0.5.23, whole or streamed, and their relatives
(sglang-omni's pairs, slime's patch).

Which field holds log q depends on how the server was asked, and is declared by the spec:

- ``logprobs="temperature"`` (or ``"raw"`` at T = 1): ``output_token_logprobs``, heads from
  ``output_top_logprobs`` in any of its forms (nested, flat, flat base64);
- ``"processed"``: ``output_token_sampling_logprobs`` of mode "selected", ids of the support from the mask;
- ``"support"``: mask and ``output_token_sampling_logprobs`` of mode "support": complete sets with their
  log-probs.

Nothing loops in Python per candidate. At k = 128 the nested form costs about 10 times as much to read as flat
base64, flat lists about 5 times (and 60 and 10 times as much to parse from JSON):
``python -m offpolicy_corr.benchmarks.records`` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offpolicy_corr.records.record import SamplerRecord
from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.records.trajectory import Turn
from offpolicy_corr.records.weight_versions import parse_spans

from ._answer import (
    Answer,
    Rows,
    check_count,
    check_same_ids,
    pick_sampled,
    read_options,
    with_prompt,
)
from ._arrays import DAMAGED, fail, floats, integers, mapping, sequence, tuples
from ._json import parsed, response_object
from ._sglang_rows import flat_head, nested_head, sampling_mask, slime_support, support_logprobs
from ._streams import join_sglang
from ._turns import check_usage, read_each, records_of

TRIPLES = "output_token_logprobs"
FIRST_LOST = (
    "Prefill/decode disaggregation loses the first token's value in some releases. Which token the others belong to "
    "cannot be told: sample again."
)


def read_generate(
    response: Any,
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    partial: bool = False,
    force_keep_sampled: bool = False,
) -> SamplerRecord | list[SamplerRecord]:
    """Record of a ``/generate`` response; a list of them where the response is a list of samples.

    Args:
        response: the parsed JSON, or its bytes.
        spec: what the server's log-probs mean.
        on_missing: ``"raise"``, or ``"mask"``: tokens without a log-prob hold NaN and `missing_tokens` finds
            them; they must leave the loss mask, and a `RecordWarning` gives their number. An exact 0.0 that no
            candidate supports, and that probably stands for a missing value (at an answer's end, or among
            drafted tokens), only warns under ``"raise"``, and is masked too under ``"mask"``.
        weight_version: the version of all tokens where the server sends no spans. The scalar
            ``weight_version`` of a response is the server's at the end and may be newer than the tokens, so
            it is not used.
        partial: also accept an answer that is unfinished (no ``finish_reason``) or aborted, and read what came;
            without it such an answer is refused. Finished answers read the same.
        force_keep_sampled: in the slime dialect, add a sampled token that the recomputed support lacks.

    Raises:
        RecordError: anything that is not a trustworthy record.
    """
    response = parsed(response)
    turns = read_turns(
        response,
        spec,
        on_missing=on_missing,
        weight_version=weight_version,
        partial=partial,
        force_keep_sampled=force_keep_sampled,
    )
    return records_of(turns, isinstance(response, list))


def read_chat(
    response: Any,
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    partial: bool = False,
) -> SamplerRecord | list[SamplerRecord]:
    """Record of a ``/v1/chat/completions`` response with ``return_meta_info``; a list where it has several
    choices.

    Arguments and errors as in `read_generate`.
    """
    turns = read_chat_turns(
        response, spec, on_missing=on_missing, weight_version=weight_version, partial=partial
    )
    return records_of(turns, len(turns) > 1)


def read_stream(
    chunks: Sequence[Any],
    spec: SamplerSpec,
    *,
    incremental: bool,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    partial: bool = False,
) -> SamplerRecord:
    """Record of a streamed ``/generate``.

    Args:
        chunks: all of them, in order; with ``partial`` those that came before the stream was canceled.
        incremental: the server ran with ``--incremental-streaming-output``; otherwise each chunk repeats all
            before.

    Other arguments as in `read_generate`. Spans of weight versions come with the last chunk: for a canceled stream
    ``weight_version`` says which weights drew its tokens.

    Raises:
        RecordError: also when the last chunk is missing or the chunks do not fit together.
    """
    turns = read_stream_turns(
        chunks,
        spec,
        incremental=incremental,
        on_missing=on_missing,
        weight_version=weight_version,
        partial=partial,
    )
    return turns[0].record


def read_turns(
    response: Any,
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    partial: bool = False,
    prompt: Sequence[int] | None = None,
    force_keep_sampled: bool = False,
) -> list[Turn]:
    """As `read_generate`, one turn per sample, for `assemble`; ``prompt`` is the ids that the request sent."""
    options = read_options("sglang", spec, on_missing, weight_version, partial)
    if force_keep_sampled and spec.dialect != "slime":
        remedy = "Only slime's recomputed support may lack the sampled token: declare dialect='slime'."
        raise fail("force_keep_sampled without that dialect", "spec.dialect", spec.dialect, remedy)
    response = parsed(response)

    def read(item: Any) -> Answer:
        item = response_object(item, "response")
        meta = mapping(item.get("meta_info"), "meta_info")
        answer = _answer(meta, item.get("output_ids"), "output_ids", spec, force_keep_sampled)
        return with_prompt(answer, item.get("prompt_ids"), "prompt_ids", prompt, meta.get("prompt_tokens"))

    return read_each(response if isinstance(response, list) else [response], "response", read, options)


def read_chat_turns(
    response: Any,
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    partial: bool = False,
    prompt: Sequence[int] | None = None,
) -> list[Turn]:
    """As `read_chat`, one turn per choice, for `assemble`; ``prompt`` where the server returns no
    ``prompt_token_ids``."""
    options = read_options("sglang", spec, on_missing, weight_version, partial)
    response = response_object(parsed(response), "response")
    choices = sequence(response.get("choices"), "choices")
    turns = read_each(choices, "choices", lambda choice: _from_choice(choice, spec, prompt), options)
    check_usage(response.get("usage"), turns)
    return turns


def read_stream_turns(
    chunks: Sequence[Any],
    spec: SamplerSpec,
    *,
    incremental: bool,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    partial: bool = False,
    prompt: Sequence[int] | None = None,
) -> list[Turn]:
    """As `read_stream`, as a turn for `assemble`; ``prompt`` is the ids that the request sent."""
    parts = [response_object(parsed(chunk), "chunk") for chunk in sequence(chunks, "chunks")]
    joined = join_sglang(parts, incremental, partial)
    return read_turns(
        joined, spec, on_missing=on_missing, weight_version=weight_version, partial=partial, prompt=prompt
    )


def _from_choice(choice: Any, spec: SamplerSpec, prompt: Sequence[int] | None) -> Answer:
    choice = mapping(choice, "choices")
    meta = choice.get("meta_info")
    if meta is None:
        remedy = "Send return_meta_info=true and return_token_ids=true; the text alone cannot be aligned."
        raise fail("the choice carries no meta_info", "choices.meta_info", None, remedy)
    meta = mapping(meta, "choices.meta_info")
    answer = _answer(meta, choice.get("response_token_ids"), "response_token_ids", spec, False)
    returned = choice.get("prompt_token_ids")
    return with_prompt(answer, returned, "prompt_token_ids", prompt, meta.get("prompt_tokens"))


def _answer(meta: dict[str, Any], ids: Any, ids_field: str, spec: SamplerSpec, force_keep: bool) -> Answer:
    reason, message = _finish_reason(meta.get("finish_reason"))
    triples = meta.get(TRIPLES)
    values, triple_ids = (None, None) if triples is None else tuples(sequence(triples, TRIPLES), TRIPLES)
    if ids is None and triple_ids is None:
        remedy = f"The request was aborted: {message}" if message else "Send return_logprob=true."
        raise fail("neither output_ids nor output_token_logprobs", ids_field, None, remedy)
    tokens = triple_ids if ids is None else integers(ids, ids_field)
    assert tokens is not None
    if triple_ids is not None:
        _check_count(len(triple_ids), len(tokens), TRIPLES, meta)
        check_same_ids(tokens, triple_ids, TRIPLES)
    _check_declared_lengths(meta, len(tokens), values is not None)
    spans = parse_spans(meta.get("weight_versions"), "meta_info.weight_versions")
    if not len(tokens) and triples is None:  # canceled before the first token
        return Answer(tokens, floats([], TRIPLES), TRIPLES, None, TRIPLES, spans, None, reason, message)
    field, rows, logprobs = _read_values(meta, tokens, values, spec, force_keep)
    rows_field = "output_token_sampling_mask" if spec.truncates else "output_top_logprobs"
    return Answer(tokens, logprobs, field, rows, rows_field, spans, None, reason, message)


def _read_values(
    meta: dict[str, Any],
    tokens: NDArray[np.int64],
    values: NDArray[np.float32] | None,
    spec: SamplerSpec,
    force_keep: bool,
) -> tuple[str, Rows | None, NDArray[np.float32]]:
    """The field that holds log q under this spec, the candidates, and log q."""
    if spec.logprobs == "support":
        return _read_support(meta, tokens)
    if spec.logprobs == "processed" and spec.dialect != "slime":
        return _read_selected(meta, len(tokens))
    if values is None:
        raise fail("no log-probs", TRIPLES, None, "Send return_logprob=true.")
    if spec.dialect == "slime":
        return TRIPLES, _slime_rows(meta, tokens, force_keep), values
    return TRIPLES, _read_head(meta, len(tokens), spec), values


def _finish_reason(value: Any) -> tuple[str | None, str | None]:
    """The kind, and the engine's message."""
    if value is None or isinstance(value, str):
        return value, None
    value = mapping(value, "finish_reason")
    kind = value.get("type")
    if not isinstance(kind, str):
        raise fail("finish_reason has no type", "finish_reason", value, DAMAGED)
    message = value.get("message")
    return kind, None if message is None else str(message)


def _was_retracted(meta: dict[str, Any]) -> bool:
    count = meta.get("num_retractions")
    return type(count) is int and count > 0


def _check_count(found: int, tokens: int, field: str, meta: dict[str, Any]) -> None:
    """One value per token; the remedies name the reports behind each kind of mismatch."""
    if found == tokens:
        return
    if found > tokens and _was_retracted(meta):
        remedy = (
            "The request was retracted, which repeats values in some releases; neither end may be cut off."
        )
    elif found > tokens and _finish_reason(meta.get("finish_reason"))[0] == "stop":
        remedy = "Stop tokens may be cut from the ids alone: set include_stop_str_in_output or no_stop_trim."
    elif found > tokens:
        remedy = "Cumulative values stand beside incremental ids, or answers were mixed; neither end may be cut off."
    elif found == tokens - 1 and found:
        check_count(found, tokens, field, FIRST_LOST, 0)
        return
    else:
        remedy = (
            "Speculative decoding or grouping may report one value for several tokens: upgrade the engine."
        )
    check_count(found, tokens, field, remedy)


def _check_declared_lengths(meta: dict[str, Any], count: int, has_values: bool) -> None:
    groups = "Entries may stand for groups of tokens (speculative decoding): upgrade the engine."
    lost = "The request was retracted, which loses or repeats tokens in some releases: sample again."
    declared = {"completion_tokens": lost if _was_retracted(meta) else groups}
    if has_values:
        declared[f"{TRIPLES}_length"] = "Chunks of an incremental stream must be joined by read_stream."
    if meta.get("output_token_sampling_mask") is not None:
        declared["output_token_sampling_mask_length"] = (
            "It counts rows; chunks must be joined by read_stream."
        )
    for name, remedy in declared.items():
        value = meta.get(name)
        if value is not None and (type(value) is not int or value != count):
            raise fail(f"{name} disagrees with the {count} tokens", name, value, remedy)


def _read_support(meta: dict[str, Any], tokens: NDArray[np.int64]) -> tuple[str, Rows, NDArray[np.float32]]:
    field = "output_token_sampling_logprobs"
    ids, offsets = sampling_mask(meta, len(tokens))
    logprobs = support_logprobs(meta.get(field), offsets, field)
    rows = Rows(ids, logprobs, offsets, _complete(meta, len(tokens)))
    return field, rows, pick_sampled(tokens, rows, "output_token_sampling_mask")


def _read_selected(meta: dict[str, Any], count: int) -> tuple[str, Rows, NDArray[np.float32]]:
    field = "output_token_sampling_logprobs"
    ids, offsets = sampling_mask(meta, count)
    selected = meta.get(field)
    if selected is None:
        raise fail("no post-filter log-probs", field, None, "Send return_sampling_mask=true.")
    values = sequence(selected, field)
    if any(map(lambda item: isinstance(item, (list, tuple)), values[:1])):
        remedy = "This server ran sampling_logprobs_mode='support': declare logprobs='support'."
        raise fail("rows where one value per token was declared", field, values[0], remedy)
    _check_count(len(values), count, field, meta)
    return field, Rows(ids, None, offsets, _complete(meta, count)), floats(values, field)


def _complete(meta: dict[str, Any], count: int) -> NDArray[np.bool_]:
    """False where a fork says that it cut the support: such a row is a head, whatever its name."""
    cut = meta.get("output_token_sampling_mask_truncated")
    if cut is None or cut is False:
        return np.ones(count, dtype=np.bool_)
    if cut is True:
        return np.zeros(count, dtype=np.bool_)
    cut = sequence(cut, "output_token_sampling_mask_truncated")
    if len(cut) != count or set(map(type, cut)) != {bool}:
        raise fail("expected one flag per token", "output_token_sampling_mask_truncated", cut, DAMAGED)
    return ~np.array(cut, dtype=np.bool_)


def _slime_rows(meta: dict[str, Any], tokens: NDArray[np.int64], force_keep: bool) -> Rows | None:
    support = slime_support(meta, tokens, force_keep)
    if support is None:
        return None
    return Rows(support[0], None, support[1], np.ones(len(tokens), dtype=np.bool_))


def _read_head(meta: dict[str, Any], count: int, spec: SamplerSpec) -> Rows | None:
    if meta.get("output_token_sampling_mask") is not None:
        remedy = "Declare logprobs='support' (or 'processed'): these log-probs are from before the filters."
        raise fail("the response has a sampling mask", "spec.logprobs", spec.logprobs, remedy)
    flat = any(str(name).startswith("output_top_logprobs_") for name in meta)
    nested = meta.get("output_top_logprobs")
    if flat and nested is not None:
        raise fail("both nested and flat candidates", "output_top_logprobs", None, "Keep one form.")
    if flat:
        return flat_head(meta, count)
    return None if nested is None else nested_head(nested, count)
