"""Reader: vLLM's Python outputs, and every HTTP shape of 0.32 and 0.33, whole or streamed.

The server's ``--logprobs-mode`` decides what the numbers are and is not echoed, so the spec declares it.
Under filters the whole support is needed: ask for ``logprobs >= top_k`` in ``processed_logprobs`` mode, with
``--max-logprobs -1``; slots beyond the support come back as −inf and tell that the row is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offpolicy_corr.records.record import SamplerRecord
from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.records.trajectory import Turn

from ._answer import Answer, read_options, with_prompt
from ._arrays import mapping, sequence
from ._json import parsed, response_object
from ._streams import join_vllm_json, join_vllm_objects
from ._turns import check_usage, read_each, records_of
from ._vllm_shapes import answer_of_choice, answer_of_output


def read_output(
    output: Any,
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    partial: bool = False,
    top_logprobs: int | None = None,
) -> SamplerRecord | list[SamplerRecord]:
    """Record of a ``CompletionOutput``; a list of them where a ``RequestOutput``, or a list of those, has
    several.

    Args:
        output: vLLM's object, or the list that ``LLM.generate`` returns; dict rows or ``FlatLogprobs``.
        spec: what the server's log-probs mean.
        on_missing: ``"raise"``, or ``"mask"``: tokens without a log-prob hold NaN and `missing_tokens` finds
            them; they must leave the loss mask, and a `RecordWarning` gives their number. An exact 0.0 that no
            candidate supports, and that probably stands for a missing value (at an answer's end, or among
            drafted tokens), only warns under ``"raise"``, and is masked too under ``"mask"``.
        weight_version: the version of all tokens where the engine reports no spans.
        partial: also accept an answer that is unfinished (no ``finish_reason``) or aborted, and read what came;
            without it such an answer is refused. Finished answers read the same.
        top_logprobs: the number that was requested. Rows usually tell it; saying it settles the size of the
            heads.

    Raises:
        RecordError: anything that is not a trustworthy record.
    """
    turns = read_turns(
        output,
        spec,
        on_missing=on_missing,
        weight_version=weight_version,
        partial=partial,
        top_logprobs=top_logprobs,
    )
    return records_of(turns, len(turns) > 1)


def read_turns(
    output: Any,
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    partial: bool = False,
    top_logprobs: int | None = None,
    prompt: Sequence[int] | None = None,
) -> list[Turn]:
    """As `read_output`, one turn per sample, for `assemble`; a ``RequestOutput`` brings its prompt's ids along."""
    options = read_options("vllm", spec, on_missing, weight_version, partial)
    several = output if isinstance(output, (list, tuple)) else [output]
    items = [(one, context) for request in several for one, context in _completions(request)]

    def read(item: tuple[Any, Any]) -> Answer:
        answer = answer_of_output(item[0], spec, top_logprobs)
        return with_prompt(answer, item[1], "prompt_token_ids", prompt)

    return read_each(items, "outputs", read, options)


def _completions(output: Any) -> list[tuple[Any, Any]]:
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
    partial: bool = False,
    top_logprobs: int | None = None,
) -> SamplerRecord | list[SamplerRecord]:
    """Record of an HTTP response: ``/inference/v1/generate``, chat or completions, parsed or as bytes.

    Several choices give a list. Arguments and errors as in `read_output`.
    """
    turns = read_json_turns(
        response,
        spec,
        on_missing=on_missing,
        weight_version=weight_version,
        partial=partial,
        top_logprobs=top_logprobs,
    )
    return records_of(turns, len(turns) > 1)


def read_json_turns(
    response: Any,
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    partial: bool = False,
    top_logprobs: int | None = None,
    prompt: Sequence[int] | None = None,
) -> list[Turn]:
    """As `read_json`, one turn per choice, for `assemble`; ``prompt`` where the server returns no ids of it."""
    options = read_options("vllm", spec, on_missing, weight_version, partial)
    response = response_object(parsed(response), "response")
    choices = sequence(response.get("choices"), "choices")

    def read(choice: Any) -> Answer:
        choice = mapping(choice, "choices")
        own, common = choice.get("prompt_token_ids"), response.get("prompt_token_ids")
        answer = answer_of_choice(choice, spec, top_logprobs)
        return with_prompt(answer, common if own is None else own, "prompt_token_ids", prompt)

    turns = read_each(choices, "choices", read, options)
    check_usage(response.get("usage"), turns)
    return turns


def read_stream(
    chunks: Sequence[Any],
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    partial: bool = False,
    top_logprobs: int | None = None,
) -> SamplerRecord | list[SamplerRecord]:
    """Record of a streamed answer, from all its chunks in order.

    Args:
        chunks: the JSON chunks of any HTTP route, each parsed or as bytes, of a request with
            ``stream_options={"include_usage": true}`` (or with version spans): only they tell that no chunk was
            lost. Or, from Python, the ``CompletionOutput`` or ``RequestOutput`` deltas of
            ``RequestOutputKind.DELTA``, which only their version spans count, where the engine reports any.
        partial: also accept a stream that was canceled, whose chunks over HTTP must count their tokens:
            ``stream_options={"include_usage": true, "continuous_usage_stats": true}``. Spans of weight versions
            come with the last chunk: ``weight_version`` says which weights drew the tokens of a canceled stream.

    Other arguments and errors as in `read_output`; also raised where a chunk is missing.
    """
    turns = read_stream_turns(
        chunks,
        spec,
        on_missing=on_missing,
        weight_version=weight_version,
        partial=partial,
        top_logprobs=top_logprobs,
    )
    return records_of(turns, len(turns) > 1)


def read_stream_turns(
    chunks: Sequence[Any],
    spec: SamplerSpec,
    *,
    on_missing: str = "raise",
    weight_version: int | str | None = None,
    partial: bool = False,
    top_logprobs: int | None = None,
    prompt: Sequence[int] | None = None,
) -> list[Turn]:
    """As `read_stream`, one turn per sample, for `assemble`; ``prompt`` where the stream does not carry it."""
    keywords: dict[str, Any] = {
        "on_missing": on_missing,
        "weight_version": weight_version,
        "partial": partial,
        "top_logprobs": top_logprobs,
        "prompt": prompt,
    }
    chunks = [parsed(chunk) for chunk in sequence(chunks, "chunks")]
    if chunks and all(hasattr(chunk, "outputs") or hasattr(chunk, "token_ids") for chunk in chunks):
        return read_turns(join_vllm_objects(chunks, partial), spec, **keywords)
    joined = join_vllm_json([response_object(chunk, "chunk") for chunk in chunks], partial)
    return read_json_turns(joined, spec, **keywords)
