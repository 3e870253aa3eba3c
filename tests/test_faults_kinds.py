"""The kinds of fault behind the reports, each in every form that an answer comes in."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from offpolicy_corr.integrations import sglang, vllm

import answers
import offpolicy_corr as oc
from answers import HEAD, PLAIN, SUPPORT, log

Parts = SimpleNamespace
WIDTH = 3
THIRD = log([1 / 3])[0]


def good(complete: bool = False) -> Parts:
    """Three tokens: ``ids`` as sampled, ``entries`` the ids beside the ``values``, ``rows`` of (id, log-prob).

    The second token is none of its candidates, unless the rows are ``complete``.
    """
    rows = [
        [(5, -0.5), (9, -2.0), (12, -3.0)],
        [(11, -1.2), (6, -1.5), (13, -2.5)],
        [(6, -0.2), (8, -2.5), (14, -4.0)],
    ]
    values = [-0.5, -4.0, -0.2]
    if complete:
        rows = [[(token, THIRD), (token + 20, THIRD), (token + 40, THIRD)] for token in (5, 7, 6)]
        values = [THIRD] * 3
    return Parts(ids=[5, 7, 6], entries=[5, 7, 6], values=values, rows=rows, spans=[("4", 0, 1), ("5", 1, 3)])


def spans(parts: Parts) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in parts.spans]


def sglang_nested(parts: Parts, width: int = 3) -> dict[str, Any]:
    triples = [[value, token, None][:width] for value, token in zip(parts.values, parts.entries, strict=True)]
    head = [[[value, token, None][:width] for token, value in row] for row in parts.rows]
    return answers.sglang(
        parts.ids, parts.values, head, output_token_logprobs=triples, weight_versions=spans(parts)
    )


def sglang_support(parts: Parts) -> dict[str, Any]:
    mask = [[token for token, _ in row] for row in parts.rows]
    values = [[value for _, value in row] for row in parts.rows]
    return answers.sglang_support(parts.ids, mask, values, weight_versions=spans(parts))


def sglang_chat(parts: Parts) -> dict[str, Any]:
    generated = sglang_nested(parts)
    choice = {"response_token_ids": generated["output_ids"], "meta_info": generated["meta_info"]}
    return {"choices": [choice]}


def vllm_rows(parts: Parts) -> list[list[tuple[Any, Any, Any]]]:
    """The token's own entry, then its candidates, ranked as the engine ranks them."""
    rows = []
    for index, (value, token) in enumerate(zip(parts.values, parts.entries, strict=True)):
        row = parts.rows[index] if index < len(parts.rows) else []
        ranks = {candidate: rank for rank, (candidate, _) in enumerate(row, 1)}
        own = (token, value, ranks.get(token, 9))
        rows.append([own, *((c, v, r) for r, (c, v) in enumerate(row, 1) if c != token or r > 1)])
    return rows


def vllm_generate(parts: Parts) -> dict[str, Any]:
    return answers.vllm_generate(parts.ids, vllm_rows(parts), weight_versions=spans(parts))


def vllm_chat(parts: Parts) -> dict[str, Any]:
    response = vllm_generate(parts)
    for entry in response["choices"][0]["logprobs"]["content"]:
        entry["top_logprobs"] = entry["top_logprobs"][:WIDTH]  # this shape cuts rows to the request
        for item in (entry, *entry["top_logprobs"]):
            item["token"] = f"token_id:{item.pop('token_id')}"
    return response


def vllm_completions(parts: Parts) -> dict[str, Any]:
    rows = vllm_rows(parts)
    block = {
        "tokens": [f"token_id:{token}" for token in parts.entries],
        "token_logprobs": parts.values,
        "top_logprobs": [{f"token_id:{token}": value for token, value, _ in row} for row in rows],
    }
    choice = {
        "token_ids": parts.ids,
        "logprobs": block,
        "finish_reason": "stop",
        "weight_versions": spans(parts),
    }
    return {"choices": [choice]}


def vllm_object(parts: Parts, flat: bool) -> SimpleNamespace:
    versions = [SimpleNamespace(**span) for span in spans(parts)]
    if flat:
        return answers.vllm_flat(parts.ids, vllm_rows(parts), weight_versions=versions)
    rows = [{token: (value, rank) for token, value, rank in row} for row in vllm_rows(parts)]
    return answers.vllm_dicts(parts.ids, rows, weight_versions=versions)


Form = tuple[Callable[[Parts], Any], Callable[[Any], Any]]
FORMS: dict[str, Form] = {
    "sglang nested": (sglang_nested, lambda r: sglang.read_generate(r, HEAD)),
    "sglang pairs": (lambda p: sglang_nested(p, 2), lambda r: sglang.read_generate(r, HEAD)),
    "sglang flat": (
        lambda p: answers.as_flat(sglang_nested(p), coded=False), lambda r: sglang.read_generate(r, HEAD)),
    "sglang base64": (
        lambda p: answers.as_flat(sglang_nested(p), coded=True), lambda r: sglang.read_generate(r, HEAD)),
    "sglang chat": (sglang_chat, lambda r: sglang.read_chat(r, HEAD)),
    "sglang support": (sglang_support, lambda r: sglang.read_generate(r, SUPPORT)),
    "vllm dicts": (lambda p: vllm_object(p, flat=False), lambda r: vllm.read_output(r, PLAIN, top_logprobs=WIDTH)),
    "vllm flat": (lambda p: vllm_object(p, flat=True), lambda r: vllm.read_output(r, PLAIN, top_logprobs=WIDTH)),
    "vllm generate": (vllm_generate, lambda r: vllm.read_json(r, PLAIN, top_logprobs=WIDTH)),
    "vllm chat": (vllm_chat, lambda r: vllm.read_json(r, PLAIN)),
    "vllm completions": (vllm_completions, lambda r: vllm.read_json(r, PLAIN, top_logprobs=WIDTH)),
}  # fmt: skip


def at(name: str, index: int, value: Any) -> Callable[[Parts], None]:
    return lambda parts: getattr(parts, name).__setitem__(index, value)


def both(*changes: Callable[[Parts], Any]) -> Callable[[Parts], None]:
    return lambda parts: [change(parts) for change in changes] and None


def lose(index: int, *names: str) -> Callable[[Parts], None]:
    return both(*(lambda parts, name=name: getattr(parts, name).pop(index) for name in names))


def value_of(index: int, value: Any) -> Callable[[Parts], None]:
    """A value and its entry among the candidates."""
    return both(
        at("values", index, value),
        lambda parts: parts.rows[index].__setitem__(0, (parts.rows[index][0][0], value)),
    )


KINDS: dict[str, Callable[[Parts], Any]] = {
    "a value too many": both(
        lambda p: p.values.append(-0.1), lambda p: p.entries.append(5), lambda p: p.rows.append(p.rows[0])
    ),
    "the last value lost": lose(-1, "values", "entries", "rows"),
    "the first value lost": lose(0, "values", "entries", "rows"),
    "the last id lost": lose(-1, "ids"),
    "another id sampled": at("ids", 1, 50),
    "a value above 0": value_of(0, 0.7),
    "a value null": value_of(0, None),
    "a value is a sentinel": value_of(0, -9999.0),
    "a value is text": value_of(0, "-0.3"),
    "an id beyond the vocabulary": both(at("ids", 1, 2**31), at("entries", 1, 2**31)),
    "an id is a placeholder": both(at("ids", 1, -1), at("entries", 1, -1)),
    "an id is a float": both(at("ids", 1, 7.0), at("entries", 1, 7.0)),
    "a row empty": at("rows", 1, []),
    "a candidate twice": lambda p: p.rows[1].__setitem__(1, p.rows[1][0]),
    "a candidate is a placeholder": lambda p: p.rows[0].__setitem__(1, (-1, p.rows[0][1][1])),
    "a row holds more than all": both(
        value_of(0, -0.05), lambda p: p.rows[0].__setitem__(1, (p.rows[0][1][0], -0.05))
    ),
    "a gap between versions": at("spans", 1, ("5", 2, 3)),
    "versions overlap": at("spans", 1, ("5", 0, 3)),
    "versions end early": at("spans", 1, ("5", 1, 2)),
    "versions go on": at("spans", 1, ("5", 1, 4)),
}
# what a form cannot show: dicts name a candidate once, flat rows are rectangular
CANNOT = {(form, "a candidate twice") for form in ("vllm completions", "vllm dicts")}
CANNOT |= {(form, "a row empty") for form in ("sglang flat", "sglang base64")}
# Grid: every form has a parser of its own, so that a kind refused in one may pass in another; each case takes 2 ms.
CASES = [(form, kind) for form in FORMS for kind in KINDS if (form, kind) not in CANNOT]


@pytest.mark.parametrize("form", FORMS)
def test_the_undamaged_answer_is_read(form: str) -> None:
    build, read = FORMS[form]
    record = read(build(good(complete=form == "sglang support")))
    assert record.tokens.tolist() == [5, 7, 6] and record.weight_version.tolist() == [4, 5, 5]
    assert record.candidates is not None and record.specs


@pytest.mark.parametrize(("form", "kind"), CASES)
def test_every_kind_of_fault_is_refused_in_every_form(form: str, kind: str) -> None:
    build, read = FORMS[form]
    parts = good(complete=form == "sglang support")
    KINDS[kind](parts)
    answer = build(parts)
    with pytest.raises(oc.RecordError) as caught:
        read(answer)
    assert caught.value.field
