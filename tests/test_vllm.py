"""vLLM's shapes: dict rows, flat rows, masks and every HTTP form; what a head may hold, and when a row is complete."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from offpolicy_corr.integrations._streams import join_vllm_json
from offpolicy_corr.integrations.vllm import read_json, read_json_turns, read_output, read_stream, read_turns

import offpolicy_corr as oc
from answers import FILTERED, PLAIN, good_rows, log, vllm_dicts, vllm_flat, vllm_generate
from offpolicy_corr.records.sampler_spec import SamplerSpec

FIXTURES = Path(__file__).parent / "fixtures"
TOKENS = [5, 7]


def as_dicts(rows: list[list[tuple[int, float, int]]]) -> list[dict[int, tuple[float, int]]]:
    return [{token: (value, rank) for token, value, rank in row} for row in rows]


def repeated(rows: list[list[tuple[int, float, int]]]) -> list[list[tuple[int, float, int]]]:
    """As FlatLogprobs holds them: the sampled entry in front, and again at its rank if it is a candidate."""
    return [[row[0], *sorted(row, key=lambda item: item[2])] if row[0][2] <= 2 else row for row in rows]


def chat(
    tokens: list[int], rows: list[list[tuple[int, float, int]]], as_text: bool = False
) -> dict[str, Any]:
    name = (lambda t: f"word{t}") if as_text else (lambda t: f"token_id:{t}")
    content = [
        {
            "token": name(row[0][0]),
            "logprob": row[0][1],
            "bytes": None,
            "top_logprobs": [{"token": name(i), "logprob": v, "bytes": None} for i, v, _ in row[:2]],
        }
        for row in rows
    ]
    choice = {"index": 0, "message": {}, "finish_reason": "stop", "token_ids": tokens}
    return {"choices": [choice | {"logprobs": {"content": content}}], "prompt_token_ids": [1, 2]}


def completions(tokens: list[int], rows: list[list[tuple[int, float, int]]]) -> dict[str, Any]:
    block = {
        "text_offset": [0] * len(rows),
        "token_logprobs": [row[0][1] for row in rows],
        "tokens": [f"token_id:{row[0][0]}" for row in rows],
        "top_logprobs": [{f"token_id:{i}": v for i, v, _ in row} for row in rows],
    }
    return {
        "choices": [{"index": 0, "text": "", "finish_reason": "stop", "logprobs": block, "token_ids": tokens}]
    }


FORMS = {
    "dicts": lambda: read_output(vllm_dicts(TOKENS, as_dicts(good_rows())), PLAIN),
    "flat": lambda: read_output(vllm_flat(TOKENS, repeated(good_rows())), PLAIN),
    "generate": lambda: read_json(vllm_generate(TOKENS, good_rows()), PLAIN),
    "bytes": lambda: read_json(json.dumps(vllm_generate(TOKENS, good_rows())).encode(), PLAIN),
    "completions": lambda: read_json(completions(TOKENS, good_rows()), PLAIN),
}


def sets(record: oc.SamplerRecord) -> list[set[int]]:
    ids, offsets = record.candidates.ids.tolist(), record.candidates.offsets.tolist()
    return [set(ids[a:b]) for a, b in pairwise(offsets)]


@pytest.mark.parametrize("form", FORMS)
def test_a_head_is_the_k_most_likely_whatever_was_drawn(form: str) -> None:
    read = FORMS[form]()
    assert read.tokens.tolist() == TOKENS and read.logprobs.tolist() == pytest.approx([-0.5, -3.0])
    assert sets(read) == [{5, 9}, {6, 8}]  # 7 was drawn, and is no candidate: it may not enter its own head
    assert not read.candidates.complete.any() and read.group_names == ("b200",)


def test_chat_rows_are_cut_to_the_request_so_their_heads_are_one_shorter() -> None:
    read = read_json(chat(TOKENS, good_rows()), PLAIN)
    assert sets(read) == [{5}, {6}]
    assert read_json_turns(chat(TOKENS, good_rows()), PLAIN)[0].prompt.tolist() == [1, 2]


def test_the_cut_generate_shape_of_032_gives_one_shorter_heads_too() -> None:
    cut = [good_rows()[0], good_rows()[1][:2]]
    assert sets(read_json(vllm_generate(TOKENS, cut), PLAIN)) == [{5}, {6}]


def test_ties_inflate_the_sampled_tokens_rank_and_change_no_head() -> None:
    tied = [[(5, -1.0, 2), (5, -1.0, 1), (9, -1.0, 2)], [(7, -3.0, 4), (6, -0.5, 1), (8, -2.5, 2)]]
    assert sets(read_output(vllm_flat(TOKENS, tied), PLAIN)) == [{5, 9}, {6, 8}]


def test_undecided_rows_give_the_smaller_head_unless_the_request_is_known() -> None:
    undecided = [{9: (-2.0, 2), 5: (-0.5, 1)}]
    assert sets(read_output(vllm_dicts([9], undecided), PLAIN)) == [{5}]
    assert sets(read_output(vllm_dicts([9], undecided), PLAIN, top_logprobs=2)) == [{5, 9}]


@pytest.mark.parametrize("kept", [(1,), (0,), ()])
def test_a_row_that_lost_entries_does_not_cost_the_others_theirs(kept: tuple[int, ...]) -> None:
    wide = [good_rows()[0], good_rows()[1], good_rows()[1]]
    for build in (vllm_generate, lambda t, r, **_: completions(t, r)):
        response = build([5, 7, 7], wide)
        block = response["choices"][0]["logprobs"]
        if "content" in block:
            row = block["content"][0]["top_logprobs"]
            block["content"][0]["top_logprobs"] = [row[index] for index in kept]
        else:
            row = list(block["top_logprobs"][0].items())
            block["top_logprobs"][0] = dict(row[index] for index in kept)
        with pytest.raises(oc.RecordError) as caught:
            read_json(response, PLAIN)
        assert caught.value.token == 0 and caught.value.remedy


def test_a_sampled_value_alone_beside_heads_is_refused() -> None:
    for rank in (1, 2, 5):  # the last said that there are no candidates at all
        with pytest.raises(oc.RecordError, match="different length") as caught:
            read_output(vllm_dicts([5, 7], [{5: (-0.5, rank)}, {7: (-0.2, 1), 6: (-2.5, 2)}]), PLAIN)
        assert caught.value.token == 0


def test_sampled_values_alone_are_a_record_without_candidates() -> None:
    read = read_output(vllm_dicts([5, 7], [{5: (-0.5, 1)}, {7: (-3.0, 4)}]), PLAIN)
    assert read.candidates is None and read.logprobs.tolist() == pytest.approx([-0.5, -3.0])


def test_ragged_heads_are_refused() -> None:
    rows = [
        [(5, -0.5, 1), (9, -2.0, 2), (8, -3.0, 3)],
        [(6, -0.2, 1)],
        [(5, -0.5, 1), (9, -2.0, 2), (8, -3.0, 3)],
    ]
    with pytest.raises(oc.RecordError, match="different length") as caught:
        read_output(vllm_dicts([5, 6, 5], as_dicts(rows)), PLAIN, top_logprobs=3)
    assert caught.value.token == 1


HALVES = log([0.5, 0.3, 0.2])


@pytest.mark.parametrize("filler", [-math.inf, -9999.0])
def test_fillers_mark_a_row_as_complete_and_are_no_candidates(filler: float) -> None:
    rows = [
        {5: (HALVES[0], 1), 9: (HALVES[1], 2), 8: (HALVES[2], 3), 4: (filler, 4)},
        {7: (0.0, 1), 1: (filler, 2), 2: (filler, 3), 3: (filler, 4)},
    ]
    read = read_output(vllm_dicts([5, 7], rows), FILTERED)
    assert sets(read) == [{5, 9, 8}, {7}] and read.candidates.complete.all()


def test_a_row_without_filler_is_complete_when_its_mass_is_one() -> None:
    full = {i: (v, i) for i, v in enumerate(log([0.4, 0.3, 0.2, 0.1]), start=1)}
    assert read_output(vllm_dicts([2], [full]), FILTERED).candidates.complete.all()


@pytest.mark.parametrize("mass", [0.9, 0.999])
def test_a_row_with_a_part_of_the_support_is_refused(mass: float) -> None:
    part = {i: (v, i) for i, v in enumerate(log([0.5 * mass, 0.5 * mass]), start=1)}
    with pytest.raises(oc.RecordError, match="part of the support") as caught:
        read_output(vllm_dicts([1], [part]), FILTERED)
    assert caught.value.value == pytest.approx(mass, rel=1e-6)


def test_a_missing_candidate_is_told_as_missing_and_can_be_masked() -> None:
    rows = [{5: (HALVES[0], 1), 9: (math.nan, 2), 8: (HALVES[2], 3)}, {7: (0.0, 1), 1: (-math.inf, 2)}]
    with pytest.raises(oc.RecordError, match="candidate's log-prob is missing"):
        read_output(vllm_dicts([5, 7], rows), FILTERED)
    with pytest.warns(oc.RecordWarning):
        read = read_output(vllm_dicts([5, 7], rows), FILTERED, on_missing="mask")
    assert read.logprobs.isnan().tolist() == [True, False]


def test_zeros_without_a_row_are_no_supports() -> None:
    with pytest.raises(oc.RecordError, match="without support"):
        read_output(vllm_dicts([5, 6], [{5: (0.0, 1)}, {6: (0.0, 1)}]), FILTERED)


MASKS = {
    "nested": SimpleNamespace(token_ids=[[5, 8, 9], [7]]),
    "csr": SimpleNamespace(token_ids=[5, 8, 9, 7], offsets=[0, 3, 4]),
    "csr arrays": SimpleNamespace(token_ids=np.array([5, 8, 9, 7], np.int32), offsets=np.array([0, 3, 4])),
}
MASKED_ROWS = [
    {5: (HALVES[0], 1), 9: (HALVES[1], 2), 8: (HALVES[2], 3), 4: (-math.inf, 4)},
    {7: (0.0, 1), 1: (-math.inf, 2), 2: (-math.inf, 3), 3: (-math.inf, 4)},
]


@pytest.mark.parametrize("form", MASKS)
def test_mask_and_log_probs_are_joined_by_id(form: str) -> None:
    read = read_output(vllm_dicts([5, 7], MASKED_ROWS, sampling_mask=MASKS[form]), FILTERED)
    assert read.candidates.ids.tolist() == [5, 8, 9, 7] and read.candidates.complete.all()
    assert read.candidates.logprobs.tolist() == pytest.approx([HALVES[0], HALVES[2], HALVES[1], 0.0])


def test_mask_without_rows_gives_ids_alone() -> None:
    rows = [{5: (HALVES[0], 1)}, {7: (0.0, 1)}]
    read = read_output(vllm_dicts([5, 7], rows, sampling_mask=MASKS["nested"]), FILTERED)
    assert read.candidates.logprobs is None and read.candidates.complete.all()


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        ([[5, 8, 9, 3], [7]], "has no log-prob"),
        ([[5, 8], [7]], "outside the mask"),
        ([[5, 8, 9]], "values for 2 tokens"),
        ([[5, 8, 9], []], "empty support"),
        ([[5, 8, 9], None], "empty support"),
        ([[5, 8, 9.0], [7]], "expected an integer"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask: Any, says: str) -> None:
    with pytest.raises(oc.RecordError, match=says):
        read_output(vllm_dicts([5, 7], MASKED_ROWS, sampling_mask=SimpleNamespace(token_ids=mask)), FILTERED)


def test_generate_masks_over_http() -> None:
    rows = [[(t, *pair) for t, pair in row.items()] for row in MASKED_ROWS]
    rows = [[(t, max(v, -9999.0), r) for t, v, r in row] for row in rows]
    read = read_json(vllm_generate([5, 7], rows, sampling_mask=[[5, 8, 9], [7]]), FILTERED)
    assert sets(read) == [{5, 8, 9}, {7}]


def test_text_instead_of_ids_is_refused_with_the_flags_to_send() -> None:
    with pytest.raises(oc.RecordError, match="return_tokens_as_token_ids"):
        read_json(chat(TOKENS, good_rows(), as_text=True), PLAIN)
    without = chat(TOKENS, good_rows(), as_text=True)
    del without["choices"][0]["token_ids"]
    for entry in without["choices"][0]["logprobs"]["content"]:
        entry["top_logprobs"] = []
    with pytest.raises(oc.RecordError, match="token ids are missing"):
        read_json(without, PLAIN)


def test_spans_in_both_forms() -> None:
    spans = [("3", 0, 1), ("4", 1, 2)]
    objects = [SimpleNamespace(version=v, start=a, end=b) for v, a, b in spans]
    assert read_output(
        vllm_dicts(TOKENS, as_dicts(good_rows()), weight_versions=objects), PLAIN
    ).weight_version.tolist() == [3, 4]  # fmt: skip
    plain = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    read = read_json(vllm_generate(TOKENS, good_rows(), weight_versions=plain), PLAIN)
    assert read.weight_version.tolist() == [3, 4]


def test_usage_must_count_the_same_tokens() -> None:
    response = vllm_generate(TOKENS, good_rows()) | {"usage": {"completion_tokens": 3}}
    with pytest.raises(oc.RecordError, match="completion_tokens"):
        read_json(response, PLAIN)


def test_several_outputs_give_a_list_with_their_prompt() -> None:
    output = vllm_dicts(TOKENS, as_dicts(good_rows()))
    request = SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[output, output])
    assert len(read_output(request, PLAIN)) == 2 and len(read_output([request, request], PLAIN)) == 4
    assert read_turns(request, PLAIN)[0].prompt.tolist() == [1, 2, 3]
    request.outputs[1] = vllm_dicts([5, 100], as_dicts(good_rows()))
    with pytest.raises(oc.RecordError) as caught:
        read_output(request, PLAIN)
    assert caught.value.sample == 1


def stream() -> list[dict[str, Any]]:
    parts = [
        vllm_generate([t], [row], finish_reason=None) for t, row in zip(TOKENS, good_rows(), strict=True)
    ]
    parts[-1]["choices"][0]["finish_reason"] = "stop"
    return [*parts, {"choices": [], "usage": {"completion_tokens": len(parts)}}]


def test_a_stream_that_nobody_counted_is_refused_and_a_lost_chunk_is_noticed() -> None:
    with pytest.raises(oc.RecordError, match="include_usage") as caught:
        read_stream(stream()[:-1], PLAIN)
    assert caught.value.field == "usage"
    for lost in (0, 1):
        with pytest.raises(oc.RecordError):
            read_stream([part for index, part in enumerate(stream()) if index != lost], PLAIN)
    spans = [{"version": "default", "start": 0, "end": 2}]
    counted = stream()[:-1]
    counted[1]["choices"][0]["weight_versions"] = spans
    assert read_stream(counted, PLAIN).tokens.tolist() == TOKENS
    with pytest.raises(oc.RecordError, match="version spans"):
        read_stream(counted[1:], PLAIN)


def test_chunks_give_the_record_of_the_whole() -> None:
    read = read_stream(stream(), PLAIN)
    assert read.tokens.tolist() == TOKENS and sets(read) == [{5, 9}, {6, 8}]


def test_a_completions_stream_is_read_without_its_text() -> None:
    parts = [completions([t], [row]) for t, row in zip(TOKENS, good_rows(), strict=True)]
    parts[0]["choices"][0] |= {"text": "one ", "finish_reason": None}
    parts[1]["choices"][0]["text"] = "two"
    assert "text" not in join_vllm_json(parts + stream()[-1:])["choices"][0]
    assert sets(read_stream(parts + stream()[-1:], PLAIN)) == [{5, 9}, {6, 8}]


def test_a_stream_without_its_end_and_a_chunk_without_log_probs_are_refused() -> None:
    with pytest.raises(oc.RecordError, match="no last chunk"):
        read_stream(stream()[:1], PLAIN)
    lost = stream()
    lost[0]["choices"][0]["logprobs"] = None
    with pytest.raises(oc.RecordError):
        read_stream(lost, PLAIN)


@pytest.mark.parametrize(
    "build", [lambda t, r: vllm_dicts(t, as_dicts(r)), lambda t, r: vllm_flat(t, repeated(r))]
)
def test_python_deltas_give_the_record_of_the_whole(build: Any) -> None:
    parts = [build([t], [row]) for t, row in zip(TOKENS, good_rows(), strict=True)]
    parts[0].finish_reason = None
    read = read_stream(parts, PLAIN)
    assert read.tokens.tolist() == TOKENS and sets(read) == [{5, 9}, {6, 8}]
    requests = [SimpleNamespace(outputs=[part], prompt_token_ids=[1]) for part in parts]
    assert sets(read_stream(requests, PLAIN)) == [{5, 9}, {6, 8}]
    with pytest.raises(oc.RecordError, match="no last chunk"):
        read_stream(parts[:1], PLAIN)
    parts[0].logprobs = None
    with pytest.raises(oc.RecordError):
        read_stream(parts, PLAIN)


def python_stream(*ids: list[int], **last: Any) -> list[SimpleNamespace]:
    """Outputs of sampled values alone."""
    parts = [vllm_dicts(own, [{token: (-0.5, 1)} for token in own]) for own in ids]
    for part in parts[:-1]:
        part.finish_reason = None
    vars(parts[-1]).update(last)
    return parts


def test_outputs_that_repeat_all_before_are_no_deltas() -> None:
    with pytest.raises(oc.RecordError, match="no deltas"):
        read_stream(python_stream([5], [5, 6], [5, 6, 7]), PLAIN)
    assert read_stream(python_stream([5], [5], [5]), PLAIN).tokens.tolist() == [5, 5, 5]
    assert read_stream(python_stream([], [5], [6]), PLAIN).tokens.tolist() == [5, 6]
    spans = [{"version": "1", "start": 0, "end": 3}]
    counted = python_stream([5], [5, 6], weight_versions=spans)
    assert read_stream(counted, PLAIN).tokens.tolist() == [5, 5, 6]


def test_outputs_of_two_requests_are_not_one_answer() -> None:
    parts = [
        SimpleNamespace(request_id=name, outputs=[part])
        for name, part in zip("ab", python_stream([5], [6]), strict=True)
    ]
    with pytest.raises(oc.RecordError, match="several answers") as caught:
        read_stream(parts, PLAIN)
    assert caught.value.field == "request_id"


def test_streamed_choices_come_back_in_their_order() -> None:
    first, second = (vllm_generate([t], [row]) for t, row in zip(TOKENS, good_rows(), strict=True))
    second["choices"][0]["index"] = 1
    counted = {"choices": [], "usage": {"completion_tokens": 2}}
    read = read_stream([second, first, counted], PLAIN)
    assert [record.tokens.tolist() for record in read] == [[5], [7]]
    parts = python_stream([7], [5])
    parts[0].index, parts[0].finish_reason = 1, "stop"
    assert [record.tokens.tolist() for record in read_stream(parts, PLAIN)] == [[5], [7]]


def test_minus_one_asks_for_all_candidates() -> None:
    read = read_json(vllm_generate(TOKENS, good_rows()), PLAIN, top_logprobs=-1)
    assert sets(read) == [{5, 9}, {6, 8}]


def test_a_mask_lost_in_one_chunk_is_refused() -> None:
    parts = stream()
    parts[0]["choices"][0]["sampling_mask"] = [[5, 9]]
    with pytest.raises(oc.RecordError, match="1 values for 2 tokens"):
        read_stream(parts, SamplerSpec(engine="vllm", logprobs="processed", top_k=2))


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [5]},
        {"token_ids": [5, "7"]},
        {"token_ids": [5, -1]},
        {"token_ids": [5, 100]},
        {"logprobs": None},
        {"logprobs": []},
        {"logprobs": {"content": None}},
        {"logprobs": {"content": [1, 2]}},
        {"logprobs": {"content": [{"token_id": 5}, {"token_id": 7}]}},
        {"weight_versions": [{"version": 3, "start": 0, "end": 2}]},
        {"weight_versions": "3"},
    ],
)
def test_damaged_json_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(oc.RecordError):
        read_json(vllm_generate(TOKENS, good_rows(), **change), PLAIN)


NO_INDICES = SimpleNamespace(start_indices=[0, 1])


@pytest.mark.parametrize("outputs", [3, [3], [None]])
def test_damaged_requests_are_refused(outputs: Any) -> None:
    for read in (read_output, lambda output, spec: read_stream([output], spec)):
        with pytest.raises(oc.RecordError):
            read(SimpleNamespace(outputs=outputs), PLAIN)


@pytest.mark.parametrize("rows", [None, 3, [None, None], [{}, {}], [{5: None}, {7: None}], NO_INDICES])
def test_damaged_objects_are_refused(rows: Any) -> None:
    with pytest.raises(oc.RecordError):
        read_output(SimpleNamespace(token_ids=TOKENS, logprobs=rows, finish_reason="stop"), PLAIN)


@pytest.mark.parametrize("indices", [([0, 1], [2, 5]), ([0, 2], [2, 4]), ([1, 2], [2, 5]), ([0], [5])])
def test_flat_indices_must_tile(indices: tuple[list[int], list[int]]) -> None:
    output = vllm_flat(TOKENS, good_rows())
    output.logprobs.start_indices, output.logprobs.end_indices = indices
    with pytest.raises(oc.RecordError):
        read_output(output, PLAIN)
    output.token_ids, output.logprobs.start_indices, output.logprobs.end_indices = [], [], []
    with pytest.raises(oc.RecordError, match="tile"):
        read_output(output, PLAIN)
