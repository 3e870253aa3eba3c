"""Reader: one engine answer as arrays, and the checks that every engine's answer passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.records.weight_versions import Span

from ._arrays import DAMAGED, fail, integers

UNFINISHED_REASONS = (None, "abort", "error")
RESUME = (
    "Sample again; or pass partial=True to the reader, which reads what came as the first part of a rollout, and "
    "assemble it with the call that continues it."
)


@dataclass(frozen=True)
class ReadOptions:
    """How a response is to be read: the keywords that all readers have, checked."""

    spec: SamplerSpec
    on_missing: str = "raise"
    weight_version: int | str | None = None
    partial: bool = False


@dataclass(frozen=True, eq=False)
class Rows:
    """Candidates in CSR form. ``logprobs`` None: ids alone. ``absent`` marks rows that did not come."""

    ids: NDArray[Any]
    logprobs: NDArray[np.float32] | None
    offsets: NDArray[np.int64]
    complete: NDArray[np.bool_]
    absent: NDArray[np.bool_] | None = None

    @property
    def row_index(self) -> NDArray[np.int64]:
        """The row of every candidate, int64 ``[nnz]``."""
        return np.repeat(np.arange(len(self.complete)), np.diff(self.offsets))


@dataclass(frozen=True, eq=False)
class Answer:
    """One completion. ``logprobs`` is NaN where nothing came; ``field``, ``rows_field`` name it in errors.

    ``finish_reason`` is the engine's word (None: it has not finished), ``finish_message`` what it said besides.
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    field: str
    rows: Rows | None = None
    rows_field: str = "candidates"
    spans: Sequence[Span] | None = None
    prompt: NDArray[np.int64] | None = None
    finish_reason: str | None = None
    finish_message: str | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length" or self.finish_reason in UNFINISHED_REASONS


def read_options(
    engine: str, spec: SamplerSpec, on_missing: str, weight_version: int | str | None, partial: bool
) -> ReadOptions:
    """The readers' keywords. Refuses a spec of another engine."""
    if on_missing not in ("raise", "mask"):
        raise ValueError(f"on_missing must be 'raise' or 'mask', got {on_missing!r}")
    if spec.engine != engine:
        remedy = f"This reader knows {engine}'s shapes; use the reader of {spec.engine}, or correct the spec."
        raise fail("the spec names another engine", "spec.engine", spec.engine, remedy)
    return ReadOptions(spec, on_missing, weight_version, partial)


def check_count(
    found: int, tokens: int, field: str, remedy: str | None = None, token: int | None = None
) -> None:
    """One value per token. ``remedy`` and ``token``: what the engine's reader knows of this kind of mismatch."""
    if found == tokens:
        return
    if tokens == 0:
        remedy = "A value without a token (max_new_tokens=0?) is a phantom: it is no sample."
    elif remedy is None:
        remedy = "Values were lost or repeated; neither end may be cut off or filled: sample again."
    token = min(found, tokens) if token is None else token
    raise fail(f"{found} values for {tokens} tokens", field, found, remedy, token)


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
    row_index = rows.row_index
    at = np.flatnonzero(rows.ids == tokens[row_index])
    values = np.full(len(tokens), np.nan, dtype=np.float32)
    found = np.zeros(len(tokens), dtype=np.bool_)
    values[row_index[at]] = rows.logprobs[at]
    found[row_index[at]] = True
    if not found.all():
        position = int((~found).argmax())
        remedy = "The support was not taken from the sampler itself: upgrade the engine, or sample again."
        problem = "the sampled token is absent from its row"
        raise fail(problem, field, int(tokens[position]), remedy, position)
    return values


def with_prompt(
    answer: Answer, returned: Any, field: str, given: Sequence[int] | None, declared: Any = None
) -> Answer:
    """The answer with its call's context ids, where the server returned them or the caller gave them.

    ``declared`` is the server's count of them (``prompt_tokens``). Where no ids are known there is nothing to
    compare it with: a record does not need them, and `assemble` refuses a turn without.
    """
    prompt = None if returned is None else integers(returned, field)
    if given is not None:
        own = integers(given, "prompt")
        if prompt is not None and not np.array_equal(prompt, own):
            remedy = "Pass the ids that were sent; the server may have applied a template or cut them."
            raise fail(f"prompt= differs from the {field} of the response", "prompt", None, remedy)
        prompt, field = own, "prompt"
    check_declared(
        declared, "meta_info.prompt_tokens", None if prompt is None else len(prompt), f"ids in {field}"
    )
    return answer if prompt is None else replace(answer, prompt=prompt)


def check_declared(declared: Any, name: str, count: int | None, what: str) -> None:
    """A count that the server declares (or None) is that of what came (or None: unknown)."""
    if declared is None:
        return
    if type(declared) is not int or declared < 0:
        raise fail(f"{name} is no count", name, declared, DAMAGED)
    if count is not None and declared != count:
        remedy = "Something was lost, cut or mixed up on the way: sample again."
        raise fail(f"{name} disagrees with the {count} {what}", name, declared, remedy)
