"""SGLang's shapes: every form of one answer gives one record, and damaged forms are refused."""

from __future__ import annotations

import base64
import copy
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from offpolicy_corr.integrations.sglang import (
    read_chat,
    read_chat_turns,
    read_generate,
    read_turns,
)

import offpolicy_corr as oc
from answers import HEAD, SELECTED, SLIME, SUPPORT, as_flat, good_sglang, good_support, log, sglang, slime
from offpolicy_corr.records.sampler_spec import SamplerSpec

FIXTURES = Path(__file__).parent / "fixtures"


def same(left: oc.SamplerRecord, right: oc.SamplerRecord) -> bool:
    a, b = left.candidates, right.candidates
    assert a is not None and b is not None and a.logprobs is not None and b.logprobs is not None
    pairs = [
        (left.tokens, right.tokens),
        (left.logprobs, right.logprobs),
        (a.ids, b.ids),
        (a.offsets, b.offsets),
    ]
    return all(torch.equal(x, y) for x, y in [*pairs, (a.logprobs, b.logprobs), (a.complete, b.complete)])


def as_pairs(response: dict[str, Any]) -> dict[str, Any]:
    """sglang-omni's entries carry no text."""
    response = copy.deepcopy(response)
    meta = response["meta_info"]
    meta["output_token_logprobs"] = [entry[:2] for entry in meta["output_token_logprobs"]]
    meta["output_top_logprobs"] = [[entry[:2] for entry in row] for row in meta["output_top_logprobs"]]
    return response


def as_chat(response: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "message": {}, "meta_info": response["meta_info"], "finish_reason": "stop"}
    return {"choices": [choice | {"response_token_ids": response["output_ids"], "prompt_token_ids": [1, 2]}]}


FORMS = {
    "nested": lambda r: r,
    "pairs": as_pairs,
    "flat": lambda r: as_flat(r, coded=False),
    "base64": lambda r: as_flat(r, coded=True),
    "bytes": lambda r: json.dumps(r).encode(),
    "text": json.dumps,
    "without output_ids": lambda r: {"meta_info": r["meta_info"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_answer_gives_the_same_record(form: str) -> None:
    read = read_generate(FORMS[form](good_sglang()), HEAD)
    assert read.tokens.tolist() == [5, 6, 7]
    assert read.logprobs.tolist() == pytest.approx([-0.5, -0.2, -3.0])
    assert read.candidates.ids.tolist() == [5, 9, 6, 8, 3, 4]
    assert read.candidates.logprobs.tolist() == pytest.approx([-0.5, -2.0, -0.2, -2.5, -0.75, -1.0])
    assert read.candidates.offsets.tolist() == [0, 2, 4, 6] and not read.candidates.complete.any()
    assert read.temperature == 0.8 and read.group_names == ("h100",) and read.group.tolist() == [0, 0, 0]
    assert read.weight_version is None  # the scalar is the server's, and may be newer than the tokens


@pytest.mark.parametrize("form", ["nested", "flat", "base64"])
def test_chat_reads_like_generate_and_brings_its_prompt(form: str) -> None:
    response = FORMS[form](good_sglang())
    assert same(read_chat(as_chat(response), HEAD), read_generate(response, HEAD))
    assert read_chat_turns(as_chat(response), HEAD)[0].prompt.tolist() == [1, 2]


def test_chat_without_meta_info_says_what_to_send() -> None:
    chat = as_chat(good_sglang())
    del chat["choices"][0]["meta_info"]
    with pytest.raises(oc.RecordError, match="return_meta_info"):
        read_chat(chat, HEAD)


def test_several_samples_give_a_list_and_several_choices_too() -> None:
    records = read_generate([good_sglang(), good_sglang()], HEAD)
    assert isinstance(records, list) and same(*records)
    chat = as_chat(good_sglang())
    chat["choices"] *= 2
    assert len(read_chat(chat, HEAD)) == 2
    damaged = good_sglang()
    damaged["meta_info"]["output_token_logprobs"][1][0] = None
    with pytest.raises(oc.RecordError) as caught:
        read_generate([good_sglang(), damaged], HEAD)
    assert (caught.value.sample, caught.value.token) == (1, 1)


def test_support_mode_gives_complete_sets_with_the_sampled_tokens_value() -> None:
    read = read_generate(good_support(), SUPPORT)
    assert read.logprobs.tolist() == pytest.approx([math.log(0.3), 0.0], abs=1e-6)
    assert read.candidates.ids.tolist() == [17, 5, 9, 42] and read.candidates.complete.all()
    assert read.candidates.mass().tolist() == pytest.approx([1, 1])


def test_selected_mode_gives_supports_without_values() -> None:
    response = good_support()
    response["meta_info"]["output_token_sampling_logprobs"] = log([0.3, 1.0])
    read = read_generate(response, SELECTED)
    assert read.candidates.logprobs is None and read.candidates.complete.all()
    assert read.logprobs.tolist() == pytest.approx([math.log(0.3), 0.0], abs=1e-6)


def test_the_declared_mode_must_be_the_servers() -> None:
    with pytest.raises(oc.RecordError, match="declare logprobs='support'"):
        read_generate(good_support(), SELECTED)
    selected = good_support()
    selected["meta_info"]["output_token_sampling_logprobs"] = log([0.3, 1.0])
    with pytest.raises(oc.RecordError, match="declare logprobs='processed'"):
        read_generate(selected, SUPPORT)
    with pytest.raises(oc.RecordError, match="has a sampling mask"):
        read_generate(good_support(), SamplerSpec(engine="sglang", logprobs="temperature"))
    with pytest.raises(oc.RecordError, match="another engine"):
        read_generate(good_support(), SamplerSpec(engine="vllm", logprobs="processed"))


def test_slime_dialect() -> None:
    read = read_generate(slime([1, 2], [1, 4, 2, 7], [0, 2, 4]), SLIME)
    assert read.candidates.ids.tolist() == [1, 4, 2, 7] and read.logprobs.tolist() == [-0.5, -0.5]
    with pytest.raises(oc.RecordError, match="only id of a complete set") as caught:
        read_generate(slime([1, 2], [1, 4, 2], [0, 2, 3]), SLIME)  # what the patch sends for a lost support
    assert (caught.value.token, caught.value.field) == (1, "logprobs")
    with pytest.raises(oc.RecordError, match="truncated sampling without support"):
        read_generate(sglang([1], [-0.5]), SLIME)


def test_spans_become_one_version_per_token() -> None:
    spans = [{"version": "41", "start": 0, "end": 2}, {"version": "42", "start": 2, "end": 3}]
    response = good_sglang()
    response["meta_info"]["weight_versions"] = spans
    assert read_generate(response, HEAD).weight_version.tolist() == [41, 41, 42]
    spans[1]["version"] = "step-42"
    read = read_generate(response, HEAD)
    assert read.weight_version.tolist() == [0, 0, 1] and read.version_names == ("41", "step-42")


@pytest.mark.parametrize(
    "bounds", [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 2)], [(0, 4)], [(1, 3)], [(0, 0), (0, 3)], [(0, 3), (3, 3)], []]
)  # fmt: skip
def test_spans_with_gaps_or_overlaps_are_refused(bounds: list[tuple[int, int]]) -> None:
    response = good_sglang()
    response["meta_info"]["weight_versions"] = [{"version": "1", "start": a, "end": b} for a, b in bounds]
    with pytest.raises(oc.RecordError) as caught:
        read_generate(response, HEAD)
    assert caught.value.field == "weight_versions"


def test_a_version_may_be_declared_where_the_server_sends_none() -> None:
    assert read_generate(good_sglang(), HEAD, weight_version=7).weight_version.tolist() == [7, 7, 7]
    response = good_sglang()
    response["meta_info"]["weight_versions"] = [{"version": "1", "start": 0, "end": 3}]
    with pytest.raises(oc.RecordError, match="declared twice"):
        read_generate(response, HEAD, weight_version=7)


@pytest.mark.parametrize("counted", [True, False])
def test_flat_null_prefix_is_a_missing_head(counted: bool) -> None:
    response = as_flat(good_sglang(), coded=True, null_prefix=1)
    if counted:
        response["meta_info"]["output_top_logprobs_shape"][0] += 1
    with pytest.raises(oc.RecordError, match="candidates are missing") as caught:
        read_generate(response, HEAD)
    assert caught.value.token == 0
    with pytest.warns(oc.RecordWarning):
        read = read_generate(response, HEAD, on_missing="mask")
    assert read.logprobs.isnan().tolist() == [True, False, False]
    assert read.candidates.offsets.tolist() == [0, 0, 2, 4]


@pytest.mark.parametrize("row", [None, []])
def test_a_null_row_is_a_missing_head(row: Any) -> None:
    response = good_sglang()
    response["meta_info"]["output_top_logprobs"][1] = row
    with pytest.raises(oc.RecordError, match="candidates are missing") as caught:
        read_generate(response, HEAD)
    assert caught.value.token == 1


def coded(array: Any, dtype: str) -> str:
    return base64.b64encode(np.array(array, dtype=dtype).tobytes()).decode()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"output_top_logprobs_shape": [3, 3]}, "6 numbers for 3 rows of 3"),
        ({"output_top_logprobs_shape": [2, 3]}, "2 values for 3 tokens"),
        ({"output_top_logprobs_shape": [3]}, "must be"),
        ({"output_top_logprobs_val_flat_b64_dtype": []}, "dtype marker"),
        ({"output_top_logprobs_shape": None}, "expected a list"),
        ({"output_top_logprobs_shape": [3, 0]}, "without candidates"),
        ({"output_top_logprobs_null_prefix": -1}, "null prefix"),
        ({"output_top_logprobs_idx_flat_b64": None}, "expected base64"),
        ({"output_top_logprobs_idx_flat_b64": "AAAA"}, "whole number"),
        ({"output_top_logprobs_idx_flat_b64": "!!!!"}, "not base64"),
        ({"output_top_logprobs_idx_flat_b64": "é"}, "not base64"),
        ({"output_top_logprobs_val_flat": [0.0]}, "both flat and base64"),
        ({"output_top_logprobs": []}, "both nested and flat"),
        ({"output_top_logprobs_idx_flat_b64": coded([5, 5, 6, 8, 3, 4], "<i4")}, "stands twice"),
        ({"output_top_logprobs_val_flat_b64": coded([-0.5, np.nan, -0.2, -2, -1, -1], "<f4")}, "missing"),
        ({"output_top_logprobs_val_flat_b64": coded([-0.5, -2, -0.2, -2, 1, -1], "<f4")}, "above 0"),
    ],
)
def test_damaged_flat_forms_are_refused(change: dict[str, Any], says: str) -> None:
    response = as_flat(good_sglang(), coded=True)
    response["meta_info"].update(change)
    with pytest.raises(oc.RecordError, match=says):
        read_generate(response, HEAD)


def test_flat_form_reads_wide_dtypes_by_their_marker() -> None:
    response = as_flat(good_sglang(), coded=True)
    meta = response["meta_info"]
    meta["output_top_logprobs_idx_flat_b64"] = coded([5, 9, 6, 8, 3, 4], "<i8")
    meta["output_top_logprobs_idx_flat_b64_dtype"] = "int64"
    meta["output_top_logprobs_val_flat_b64"] = coded([-0.5, -2.0, -0.2, -2.5, -0.75, -1.0], "<f8")
    meta["output_top_logprobs_val_flat_b64_dtype"] = "float64"
    assert same(read_generate(response, HEAD), read_generate(good_sglang(), HEAD))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("output_ids",), "567"),
        (("output_ids", 0), 5.0),
        (("output_ids", 0), True),
        (("output_ids", 0), 2**70),
        (("meta_info",), None),
        (("meta_info", "output_token_logprobs", 0), None),
        (("meta_info", "output_token_logprobs", 0), [-0.5]),
        (("meta_info", "output_token_logprobs", 0, 0), "-0.5"),
        (("meta_info", "output_token_logprobs", 0, 0), False),
        (("meta_info", "output_token_logprobs", 0, 1), None),
        (("meta_info", "output_top_logprobs"), 7),
        (("meta_info", "output_top_logprobs", 2), 7),
        (("meta_info", "output_top_logprobs", 2, 0), 7),
        (("meta_info", "output_top_logprobs", 2, 0, 1), 2**40),
        (("meta_info", "finish_reason"), {"matched": 3}),
        (("meta_info", "output_token_logprobs_length"), 9),
        (("meta_info", "completion_tokens"), "3"),
    ],
)
def test_wrong_types_are_refused_never_converted(path: tuple[Any, ...], value: Any) -> None:
    response = good_sglang()
    node: Any = response
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    with pytest.raises(oc.RecordError):
        read_generate(response, HEAD)


def test_a_bool_is_no_token_id_even_where_it_equals_one() -> None:
    response = sglang([1], [-0.5])
    read_generate(response, HEAD)
    response["output_ids"] = [True]
    with pytest.raises(oc.RecordError, match="expected an integer"):
        read_generate(response, HEAD)


@pytest.mark.parametrize("text", [b"", b"{", b'{"output_ids": [5,', b"[" * 100_000, "null", b"[]", b"3"])
def test_text_that_is_no_response_is_refused(text: Any) -> None:
    with pytest.raises(oc.RecordError):
        read_generate(text, HEAD)


@pytest.mark.parametrize(
    ("value", "says"), [(0.0, "candidates say otherwise"), (-0.9, "likelier than the head")]
)
def test_a_value_that_its_head_contradicts_is_refused(value: float, says: str) -> None:
    response = good_sglang()
    response["meta_info"]["output_top_logprobs"][2][1][0] = -2.0
    response["meta_info"]["output_token_logprobs"][2][0] = value
    with pytest.raises(oc.RecordError, match=says) as caught:
        read_generate(response, HEAD)
    assert caught.value.token == 2
    response["meta_info"]["output_token_logprobs"][2][0] = -2.0  # as likely as the last candidate: a tie
    assert read_generate(response, HEAD).logprobs[2] == -2.0


def test_an_aborted_request_without_tokens_gives_the_engines_message() -> None:
    reason = {"type": "abort", "message": "Sampling support exceeds 4096", "status_code": 400}
    with pytest.raises(oc.RecordError, match="support exceeds 4096"):
        read_generate({"meta_info": {"finish_reason": reason}}, SUPPORT)


def test_an_aborted_partial_answer_is_a_truncated_turn() -> None:
    response = good_sglang()
    response["meta_info"]["finish_reason"] = {"type": "abort", "message": "paused"}
    turn = read_turns(response, HEAD, prompt=[1, 2, 3], partial=True)[0]
    assert turn.truncated and turn.finish_reason == "abort" and turn.prompt.tolist() == [1, 2, 3]
    with pytest.raises(oc.RecordError, match=r"'abort' \(paused\).*partial=True"):
        read_turns(response, HEAD, prompt=[1, 2, 3])


def test_an_empty_answer_is_an_empty_record() -> None:
    assert len(read_generate(sglang([], []), HEAD)) == 0


def test_errors_in_long_answers_name_the_token() -> None:
    count, width = 9000, 128
    rng = np.random.default_rng(0)
    values = np.log(rng.dirichlet(np.ones(width + 1), size=count)[:, :width]).astype("<f4")
    ids = np.argsort(rng.random((count, 400)), axis=1)[:, :width].astype("<i4")
    ids[8765, 3] = ids[8765, 90]
    triples = [[float(v), int(i), None] for v, i in zip(values[:, 0], ids[:, 0], strict=True)]
    flat = {
        "finish_reason": {"type": "length"},
        "output_top_logprobs_shape": [count, width],
        "output_top_logprobs_null_prefix": 0,
        "output_top_logprobs_val_flat_b64": coded(values, "<f4"),
        "output_top_logprobs_val_flat_b64_dtype": "float32",
        "output_top_logprobs_idx_flat_b64": coded(ids, "<i4"),
        "output_top_logprobs_idx_flat_b64_dtype": "int32",
    }
    with pytest.raises(oc.RecordError, match="stands twice") as caught:
        read_generate({"meta_info": {"output_token_logprobs": triples} | flat}, SamplerSpec(
            engine="sglang", logprobs="temperature"))  # fmt: skip
    assert caught.value.token == 8765


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("sglang_*.json")), ids=lambda p: p.stem)
def test_handwritten_fixtures(path: Path) -> None:
    fixture = json.loads(path.read_text())
    assert "by hand" in fixture["about"]["origin"]
    spec = SamplerSpec(**fixture["spec"])
    read = {"generate": read_generate, "chat": read_chat}[fixture["about"]["route"]](
        fixture["response"], spec
    )
    expected = fixture["expected"]
    assert read.tokens.tolist() == expected["tokens"]
    assert read.logprobs.tolist() == pytest.approx(expected["logprobs"], abs=1e-6)
    assert read.candidates.ids.tolist() == expected["ids"]
    assert read.candidates.offsets.tolist() == expected["offsets"]
    assert read.candidates.complete.tolist() == expected["complete"]
    versions = None if read.weight_version is None else read.weight_version.tolist()
    assert versions == expected["weight_version"]


@pytest.mark.parametrize("module", ["pybase64", "orjson"])
def test_the_records_extra_is_faster_and_not_needed(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    text = json.dumps(as_flat(good_sglang(), coded=True)).encode()
    assert same(read_generate(text, HEAD), read_generate(good_sglang(), HEAD))
    for damaged in (text[:-3], text.replace(b"AAAAv", b"AA~Av"), b"[" * 100_000):
        with pytest.raises(oc.RecordError):
            read_generate(damaged, HEAD)


@pytest.mark.parametrize("token", [-1, 100])
def test_a_token_without_a_log_prob_still_has_an_id(token: int) -> None:
    with (
        pytest.warns(oc.RecordWarning),
        pytest.raises(oc.RecordError, match=r"outside \[0, 100\)") as caught,
    ):
        read_generate(sglang([5, token], [-0.5, None]), HEAD, on_missing="mask")
    assert caught.value.token == 1


def test_a_head_of_fillers_alone_is_missing() -> None:
    head = [[[-0.5, 5, None]], [[-3.4028234663852886e38, 8, None], [-math.inf, 9, None]]]
    with pytest.raises(oc.RecordError, match="candidates are missing") as caught:
        read_generate(sglang([5, 6], [-0.5, -0.25], head), HEAD)
    assert (caught.value.token, caught.value.field) == (1, "output_top_logprobs")
    with pytest.warns(oc.RecordWarning, match="1 of 2 tokens"):
        read = read_generate(sglang([5, 6], [-0.5, -0.25], head), HEAD, on_missing="mask")
    assert oc.missing_tokens(read).tolist() == [False, True]
