"""Values that are not what they look like: impossible heads, ids of the caller's choice, zeros, padding, overflows."""

from __future__ import annotations

import base64
import copy
import math
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from offpolicy_corr.integrations import sglang, vllm

import answers
import offpolicy_corr as oc
from answers import FILTERED, HEAD, PLAIN, SLIME, good_rows, log, vllm_dicts, vllm_flat, vllm_generate
from offpolicy_corr.records.record import missing_tokens
from offpolicy_corr.records.sampler_spec import SamplerSpec
from test_vllm import as_dicts, chat, completions

WIDE = SamplerSpec(engine="vllm", logprobs="processed", vocab_size=151_936)


def sglang_row(own: float, head: list[list[Any]], **options: Any) -> Any:
    return sglang.read_generate(answers.sglang([9], [own], [head]), HEAD, **options)


# --- impossible heads -----------------------------------------------------------------------------------------------


def test_a_token_outside_its_head_shares_the_mass_with_it() -> None:
    head = [[-0.7, 5, None], [-0.9, 7, None]]
    with pytest.raises(oc.RecordError) as caught:
        sglang_row(-1.0, head)  # q_y + Q_H = 1.27
    assert caught.value.token == 0 and caught.value.remedy
    assert len(sglang_row(-2.6, head)) == 1  # 0.98
    flat = answers.as_flat(answers.sglang([9], [-1.0], [head]), coded=True)
    with pytest.raises(oc.RecordError):
        sglang.read_generate(flat, HEAD)
    rows = [[(9, -1.0, 3), (5, -0.7, 1), (7, -0.9, 2)]]
    for read in (
        lambda: vllm.read_output(vllm_dicts([9], as_dicts(rows)), PLAIN),
        lambda: vllm.read_output(vllm_flat([9], rows), PLAIN),
        lambda: vllm.read_json(vllm_generate([9], rows), PLAIN),
        lambda: vllm.read_json(completions([9], rows), PLAIN, top_logprobs=2),
    ):
        with pytest.raises(oc.RecordError):
            read()


def test_a_head_beside_a_masked_value_is_not_judged() -> None:
    response = answers.sglang([9, 5], [None, -0.5], [[[-0.7, 5, None]], [[-0.5, 5, None]]])
    with pytest.warns(oc.RecordWarning, match="1 of 2 tokens"):
        assert missing_tokens(sglang.read_generate(response, HEAD, on_missing="mask")).tolist() == [
            True,
            False,
        ]


# --- logprob_token_ids in place of the likeliest --------------------------------------------------------------------


def of_choice(ids: list[int], values: list[list[float]], own: list[tuple[int, float, int]]) -> Any:
    """Rows as vLLM sends them: the sampled entry, then the asked ids, numbered 1, 2, … as if they were sorted."""
    rows = []
    for (token, value, rank), numbers in zip(own, values, strict=True):
        asked = [(i, v, r) for r, (i, v) in enumerate(zip(ids, numbers, strict=True), 1)]
        rows.append([(token, value, rank), *(entry for entry in asked if entry[0] != token)])
    return rows


def chat_of(rows: Any) -> dict[str, Any]:
    """The chat route returns all entries of such a row."""
    response = chat([row[0][0] for row in rows], [[row[0], *row[1:]] for row in rows])
    for entry, row in zip(response["choices"][0]["logprobs"]["content"], rows, strict=True):
        entry["top_logprobs"] = [{"token": f"token_id:{i}", "logprob": v, "bytes": None} for i, v, _ in row]
    return response


ROUTES: dict[str, Any] = {
    "chat": lambda rows, spec: vllm.read_json(chat_of(rows), spec),
    "generate": lambda rows, spec: vllm.read_json(vllm_generate([r[0][0] for r in rows], rows), spec),
    "dicts": lambda rows, spec: vllm.read_output(vllm_dicts([r[0][0] for r in rows], as_dicts(rows)), spec),
    "flat": lambda rows, spec: vllm.read_output(vllm_flat([r[0][0] for r in rows], rows), spec),
}
CHOSEN = {
    "values rise along a row": of_choice([21, 22], [[-3.0, -2.5]], [(5, -0.5, 1)]),
    "too little for the mass left": of_choice([21, 22], [[-15.0, -16.0]], [(5, -2.0, 1)]),
    "one id, always the same": of_choice(
        [21], [[-2.0 - i / 10] for i in range(8)], [(i, -0.5 - i / 10, 1) for i in range(8)]
    ),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", CHOSEN)
def test_ids_of_the_callers_choice_are_no_head(name: str, route: str) -> None:
    with pytest.raises(oc.RecordError, match=r"not the likeliest ids.*logprob_token_ids") as caught:
        ROUTES[route](CHOSEN[name], WIDE)
    assert caught.value.token == 0 and caught.value.field == "logprobs"


def test_ranks_that_stand_twice_are_ids_of_the_callers_choice() -> None:
    rows = of_choice([21, 22], [[-1.5, -2.5]], [(5, -0.5, 1)])  # sorted, by chance
    for route in ("generate", "dicts", "flat"):
        with pytest.raises(oc.RecordError, match="not the likeliest"):
            ROUTES[route](rows, PLAIN)
    with pytest.raises(oc.RecordError, match="not the likeliest"):
        ROUTES["generate"]([[(5, -0.5, 1), (21, -1.5, 2), (22, -2.5, 2)]], PLAIN)


@pytest.mark.parametrize("route", ROUTES)
def test_real_heads_with_ties_fillers_and_repetitions_stay_readable(route: str) -> None:
    again = [[(5, -0.5, 1), (9, -1.5, 2)]] * 9  # one token repeated has one head
    assert len(ROUTES[route](again, WIDE)) == 9
    tied = [[(5, -1.2, 1), (9, -1.2, 2), (8, -1.2, 3)]]
    assert len(ROUTES[route](tied, WIDE)) == 1
    whole = log([0.6, 0.4])
    binary = [[(i % 2, whole[i % 2], i % 2 + 1), (1 - i % 2, whole[1 - i % 2], 2 - i % 2)] for i in range(9)]
    assert len(ROUTES[route](binary, SamplerSpec(engine="vllm", logprobs="processed", vocab_size=2))) == 9


# --- zeros ----------------------------------------------------------------------------------------------------------

DRAFTED = [-0.5, 0.0, 0.0, -0.7, 0.0, 0.0, -0.2]


def zeros_of(values: list[Any], mode: str, spec: SamplerSpec = HEAD, reason: str = "stop") -> list[int]:
    """Which tokens a reader masks; under "raise", what it warns of, as text."""
    response = answers.sglang(list(range(len(values))), values, finish_reason={"type": reason})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = sglang.read_generate(response, spec, on_missing=mode)
    if mode == "raise":
        assert not missing_tokens(record).any()
        return [int(str(w.message).split("log-probs")[0].split()[-1]) for w in caught]
    assert len(caught) == bool(missing_tokens(record).any())
    return missing_tokens(record).nonzero().squeeze(1).tolist()


def test_zeros_inside_an_answer_are_not_silent() -> None:
    assert zeros_of(DRAFTED, "raise") == [4]
    assert zeros_of(DRAFTED, "mask") == [1, 2, 4, 5]
    certain = [-0.5, 0.0, -1e-6, 0.0, -2e-5, 0.0, -0.7, -0.2]  # a sure model has many values near 0
    assert zeros_of(certain, "raise") == [] and zeros_of(certain, "mask") == []
    assert zeros_of([-0.5, 0.0, -0.2], "raise") == []  # one: q > 1 − 6e-8 is exactly 0.0 in float32
    speculative = SamplerSpec(engine="sglang", logprobs="temperature", speculative="EAGLE")
    assert zeros_of([-0.5, 0.0, -0.2], "raise", speculative) == [1]
    assert zeros_of([-0.5, 0.0, -0.2], "mask", speculative) == [1]


def test_a_zero_of_an_appended_end_token_is_not_silent() -> None:
    assert zeros_of([-0.5, -0.3, 0.0], "raise") == [1]
    assert zeros_of([-0.5, -0.3, 0.0], "mask") == [2]
    assert zeros_of([-0.5, -0.3, 0.0], "raise", reason="length") == []  # cut off: nothing was appended
    assert zeros_of([-0.5, 0.0, 0.0], "raise", reason="length") == [2]
    rows = [{5: (-0.5, 1)}, {7: (0.0, 1)}]
    with pytest.warns(oc.RecordWarning, match=r"ends in 1 log-probs of exactly 0\.0"):
        vllm.read_output(vllm_dicts([5, 7], rows), PLAIN)


def test_zeros_that_candidates_support_are_silent() -> None:
    heads = [[[v, i, None]] for i, v in enumerate(DRAFTED)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sglang.read_generate(answers.sglang(list(range(7)), DRAFTED, heads), HEAD)


# --- top_logprobs: null ---------------------------------------------------------------------------------------------


def test_logprobs_asked_without_top_logprobs_are_named() -> None:
    response = vllm_generate([5, 7], good_rows())
    for content in response["choices"][0]["logprobs"]["content"]:
        content["top_logprobs"] = None
    assert vllm.read_json(response, PLAIN).candidates is None
    text = completions([5, 7], good_rows())
    text["choices"][0]["logprobs"]["top_logprobs"] = None
    assert vllm.read_json(text, PLAIN).candidates is None
    for answer in (response, text):
        with pytest.raises(oc.RecordError, match="asked for without top_logprobs"):
            vllm.read_json(answer, FILTERED)
    for block in (None, {"content": None}):
        with pytest.raises(oc.RecordError, match="chat route sends none without top_logprobs"):
            vllm.read_json(vllm_generate([5, 7], good_rows(), logprobs=block), PLAIN)
    response = vllm_generate([5, 7], good_rows())
    response["choices"][0]["logprobs"]["content"][1]["top_logprobs"] = None
    with pytest.raises(oc.RecordError, match="null or empty in one row alone") as caught:
        vllm.read_json(response, PLAIN)
    assert caught.value.token == 1


# --- padded vocabulary, overflowed offsets ---------------------------------------------------------------------------


def test_ids_of_the_padded_vocabulary_are_called_that() -> None:
    spec = SamplerSpec(engine="sglang", logprobs="temperature", vocab_size=100, logits_width=128)
    head = [[[-0.5, 5, None], [-2.0, 101, None]], [[-0.2, 6, None], [-2.5, 8, None]]]
    with pytest.raises(oc.RecordError, match="padded vocabulary") as caught:
        sglang.read_generate(answers.sglang([5, 6], [-0.5, -0.2], head), spec)
    assert (caught.value.token, caught.value.field, caught.value.value) == (0, "candidates.ids", 101)
    with pytest.raises(oc.RecordError, match="padded vocabulary") as caught:
        sglang.read_generate(answers.sglang([5, 127], [-0.5, -0.2]), spec)
    assert (caught.value.token, caught.value.field) == (1, "tokens")
    with pytest.raises(oc.RecordError, match=r"outside \[0, 100\)"):
        sglang.read_generate(answers.sglang([5, 128], [-0.5, -0.2]), spec)
    damaged = answers.sglang([5, 6], [None, -0.2], head)
    with pytest.warns(oc.RecordWarning):  # a masked token's candidates are not looked at
        sglang.read_generate(damaged, spec, on_missing="mask")


def test_int32_offsets_that_overflowed_are_called_that() -> None:
    wrapped = np.array([0, 2**31 - 5, -(2**31) + 5], np.int32)
    response = answers.slime([1, 2], [1, 4, 2, 7], [0, 2, 4])
    response["meta_info"]["top_p_token_offsets"] = base64.b64encode(wrapped.tobytes()).decode()
    with pytest.raises(oc.RecordError, match="int32 offsets overflowed") as caught:
        sglang.read_generate(response, SLIME)
    assert (caught.value.token, caught.value.field) == (1, "top_p_token_offsets")
    mask = SimpleNamespace(token_ids=[5, 8, 9, 7], offsets=wrapped)
    rows = [{5: (math.log(0.5), 1)}, {7: (0.0, 1)}]
    with pytest.raises(oc.RecordError, match="int32 offsets overflowed"):
        vllm.read_output(vllm_dicts([5, 7], rows, sampling_mask=mask), FILTERED)
    mask.offsets = [0, 3, 2]
    with pytest.raises(oc.RecordError, match="not CSR"):
        vllm.read_output(vllm_dicts([5, 7], rows, sampling_mask=mask), FILTERED)


# --- causes are named where they are likely ---------------------------------------------------------------------------


def says(act: Any) -> str:
    with pytest.raises(oc.RecordError) as caught:
        act()
    assert caught.value.remedy
    return str(caught.value)


def test_retraction_is_named_where_the_server_counts_one() -> None:
    def extra(**meta: Any) -> str:
        values = [-0.1, -0.2, -0.3]
        return says(lambda: sglang.read_generate(answers.sglang([5, 6], values, **meta), HEAD))

    cut = {"finish_reason": {"type": "length"}}
    assert "retracted" in extra(num_retractions=1, **cut) and "retracted" in extra(num_retractions=2)
    assert "retracted" not in extra(num_retractions=0, **cut) + extra(**cut) + extra()

    def short(**meta: Any) -> str:
        return says(
            lambda: sglang.read_generate(answers.sglang([5], [-0.1], completion_tokens=4, **meta), HEAD)
        )

    assert "retracted" in short(num_retractions=1) and "retracted" not in short(num_retractions=0)
    assert "retracted" not in says(
        lambda: vllm.read_json(vllm_generate([5], good_rows(), finish_reason="length"), PLAIN)
    )


def test_disaggregation_is_named_where_the_first_value_alone_is_lost() -> None:
    def lost(values: list[Any]) -> str:
        tokens = list(range(3))
        return says(lambda: sglang.read_generate(answers.sglang(tokens, values), HEAD))

    assert "disaggregation" in lost([None, -0.2, -0.3]) and "disaggregation" in lost([-0.2, -0.3])
    for values in ([None, None, None], [-0.1, None, -0.3], [None, -0.2, None], [-0.1], []):
        assert "disaggregation" not in lost(values)
    rows = copy.deepcopy(good_rows())
    rows[0][0] = (5, None, None)
    assert "disaggregation" not in says(lambda: vllm.read_json(vllm_generate([5, 7], rows), PLAIN))
    assert "disaggregation" not in says(lambda: vllm.read_json(vllm_generate([5, 7], good_rows()[:1]), PLAIN))
