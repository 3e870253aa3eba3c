"""Every reported fault that the readers must know, one case per report, numbered as in FAULTS.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from offpolicy_corr.integrations import sglang, vllm

import answers
import offpolicy_corr as oc
import test_faults_accepted
from answers import FILTERED, HEAD, PLAIN, SLIME, SUPPORT, log
from faults import generate, record, support, turns
from offpolicy_corr.records.assembly import assemble
from offpolicy_corr.records.inspection import inspect
from offpolicy_corr.records.rollout_fields import from_fields
from offpolicy_corr.records.sampler_spec import SamplerSpec, check_fleet

MINUS_MAX = -3.4028234663852886e38


def stream(*chunks: tuple[list[int], list[float], int | None]) -> list[dict[str, Any]]:
    """Incremental chunks: new ids, log-probs beside them, the server's cumulative length."""
    parts = [
        answers.sglang(
            ids, values, output_token_logprobs_length=length, completion_tokens=..., finish_reason=None
        )
        for ids, values, length in chunks
    ]
    parts[-1]["meta_info"]["finish_reason"] = {"type": "stop"}
    return parts


A = SamplerSpec(engine="vllm", logprobs="processed", group="a", tokenizer_hash="x")
B = SamplerSpec(engine="sglang", logprobs="temperature", group="b", tokenizer_hash="y")
CUT_SUPPORT = answers.sglang_support(
    [17], [[17, 5]], [log([0.5, 0.43])], output_token_sampling_mask_truncated=True
)

# row: (what is done, what the error says, field, token)
REFUSED: dict[str, tuple[Callable[[], Any], str, str | None, int | None]] = {
    "1 retraction": (
        lambda: generate(answers.sglang([5, 6, 7], [-0.9, -0.8, -0.1, -0.2, -0.3])),
        "5 values for 3 tokens", "output_token_logprobs", 3,
    ),
    "2 phantom": (
        lambda: generate(answers.sglang([], [-0.1])), "phantom", "output_token_logprobs", 0,
    ),
    "3 one too many": (
        lambda: generate(answers.sglang([5, 9], [-0.1, -0.2, -0.3], finish_reason={"type": "length"})),
        "neither end may be cut", "output_token_logprobs", 2,
    ),
    "5 entry per group": (
        lambda: generate(answers.sglang([5, 6, 7], [-0.1, -0.2, -0.3], completion_tokens=4)),
        "completion_tokens disagrees", "completion_tokens", None,
    ),
    "6 speculation": (
        lambda: generate(answers.sglang(list(range(16)), [-0.1])),
        "Speculative decoding", "output_token_logprobs", 1,
    ),
    "7 first is null": (
        lambda: generate(answers.sglang([5, 6, 7], [None, -0.2, -0.3])),
        "disaggregation", "output_token_logprobs", 0,
    ),
    "7 first is lost": (
        lambda: generate(answers.sglang([5, 6, 7], [-0.2, -0.3])),
        "disaggregation", "output_token_logprobs", 0,
    ),
    "8 stop token cut": (
        lambda: generate(answers.sglang([5, 6], [-0.1, -0.2, -0.05])),
        "include_stop_str_in_output", "output_token_logprobs", 2,
    ),
    "10 cumulative beside incremental": (
        lambda: sglang.read_stream(
            stream(([5, 6], [-0.1, -0.2], 2), ([7], [-0.1, -0.2, -0.3], 3)), HEAD, incremental=True
        ),
        "3 entries beside 1 new", "chunks[1].output_token_logprobs", None,
    ),
    "11 other id": (
        lambda: generate(
            answers.sglang([5, 6], [-0.1, -0.2], output_token_logprobs=[[-0.1, 5, None], [-0.2, 8, None]])
        ),
        "id differs", "output_token_logprobs", 1,
    ),
    "12 short offsets": (
        lambda: generate(answers.slime([1, 2, 3], [1, 4, 2, 6, 7], [0, 2, 5]), SLIME),
        "not T + 1", "top_p_token_offsets", None,
    ),
    "12 short offsets in fields": (
        lambda: from_fields(
            [1, 2, 3],
            {"rollout_top_p_token_ids": np.array([1, 4, 2, 6, 7], np.int32),
             "rollout_top_p_token_offsets": np.array([0, 2, 5], np.int32)},
        ),
        "3 offsets for 3 tokens", "rollout_top_p_token_offsets", None,
    ),
    "13 mask lost, SGLang": (
        lambda: generate(answers.sglang([5, 6, 7], [-0.1, -0.2, -0.3], finish_reason={"type": "abort"}), SUPPORT),
        "truncated sampling without support", "output_token_sampling_mask", 0,
    ),
    "13 mask lost, vLLM": (
        lambda: vllm.read_output(answers.vllm_dicts([5, 6], [{5: (-0.1, 1)}, {6: (-0.2, 1)}]), FILTERED),
        "truncated sampling without support", "logprobs", 0,
    ),
    "14 row behind observations": (
        lambda: record([5, 6, 7], None, candidates=support([[5, 1, 2], [6], []], None)).validate(
            loss_mask=torch.tensor([1, 0, 1])
        ),
        "absent from its complete set", "candidates.ids", 2,
    ),
    "17 repeated id, generic": (
        lambda: oc.SamplerRecord(
            torch.tensor([7]), None,
            oc.CandidateSet.from_topk(torch.tensor([[7, 7, 3, 9]]), torch.tensor([[-0.2, -0.2, -2.0, -3.0]])),
        ).validate(),
        "stands twice", "candidates.ids", 0,
    ),
    "17 repeated id, unequal": (
        lambda: vllm.read_output(answers.vllm_flat([7], [[(7, -0.2, 1), (7, -0.21, 1), (3, -2.0, 2)]]), PLAIN),
        "twice with different values", "logprobs", 0,
    ),
    "19 not in the support": (
        lambda: record([88], [-6.0], candidates=support([[3, 9]], [log([0.6, 0.4])])).validate(),
        "absent from its complete set", "candidates.ids", 0,
    ),
    "20 not in the recomputed support": (
        lambda: generate(answers.slime([88], [3, 9], [0, 2]), SLIME),
        "absent from its complete set", "candidates.ids", 0,
    ),
    "20 sampled token outside its mask": (
        lambda: generate(answers.sglang_support([88], [[3, 9]], [log([0.6, 0.4])]), SUPPORT),
        "absent from its row", "output_token_sampling_mask", 0,
    ),
    "20 keeping it outside slime": (
        lambda: generate(answers.good_support(), SUPPORT, force_keep_sampled=True),
        "declare dialect='slime'", "spec.dialect", None,
    ),
    "22 row says otherwise": (
        lambda: generate(answers.sglang([5], [-0.65], [[[-0.69, 5, None], [-1.0, 6, None]]])),
        "differs from its entry", "candidates.logprobs", 0,
    ),
    "23 cut support used as complete": (
        lambda: generate(answers.sglang_support([17], [[17, 5]], [log([0.5, 0.43])]), SUPPORT),
        "do not sum to 1", "candidates.logprobs", 0,
    ),
    "27 null": (
        lambda: generate(answers.sglang([1, 2, 3], [-0.1, None, -0.2])),
        "log-prob is missing", "output_token_logprobs", 1,
    ),
    "28 sentinel": (
        lambda: vllm.read_json(answers.vllm_generate([5], [[(5, -9999.0, None)]]), PLAIN),
        "log-prob is missing", "logprobs", 0,
    ),
    "29 clamp": (
        lambda: generate(answers.sglang([5, 6], [-0.1, MINUS_MAX])),
        "log-prob is missing", "output_token_logprobs", 1,
    ),
    "31 zero fill": (
        lambda: generate(answers.sglang([1, 2, 3, 4, 5, 6], [-0.1, -0.2, -0.3, -0.4])),
        "4 values for 6 tokens", "output_token_logprobs", 4,
    ),
    "32 logits": (
        lambda: generate(answers.sglang([5, 6], [17.25, 22.5])), "above 0", "logprobs", 0,
    ),
    "32 logits mode": (
        lambda: SamplerSpec(engine="vllm", logprobs="processed_logits"),
        "processed_logprobs", "spec.logprobs", None,
    ),
    "34 probabilities": (
        lambda: generate(answers.sglang([5, 6], [0.9969, 1.0])), "probabilities", "logprobs", 0,
    ),
    "35 head above 1": (
        lambda: generate(answers.sglang([5], [-0.1], [[[-0.1, 5, None], [-0.1, 6, None], [-0.1, 7, None]]])),
        "sum to more than 1", "candidates.logprobs", 0,
    ),
    "36 support below 1": (
        lambda: generate(answers.sglang_support([1], [[1, 2]], [[-0.693, -0.799]]), SUPPORT),
        "post-filter", "candidates.logprobs", 0,
    ),
    "38 temperature left out": (
        lambda: SamplerSpec(engine="vllm", logprobs="raw", temperature=0.6),
        "leave temperature out", "spec.logprobs", None,
    ),
    "38 undeclared": (
        lambda: SamplerSpec(engine="vllm", logprobs="", temperature=0.6),
        "unknown meaning", "spec.logprobs", None,
    ),
    "39 divided by T": (
        lambda: record(
            [0], [-0.212], candidates=support([[0, 1]], [[-0.127 / 0.6, -2.127 / 0.6]])
        ).validate(),
        "do not sum to 1", "candidates.logprobs", 0,
    ),
    "40 scored again at T = 0": (
        lambda: SamplerSpec(engine="sglang", logprobs="temperature", temperature=0.8, rescored_temperature=0.0),
        "another temperature", "spec.rescored_temperature", None,
    ),
    "42 half precision": (
        lambda: from_fields(
            [1], {"rollout_topk_token_ids": np.array([[1, 2]], np.int32),
                  "rollout_topk_log_probs": np.array([[0.0, -18.0]], np.float16)},
        ),
        "float32", "rollout_topk_log_probs", None,
    ),
    "45 id above the vocabulary": (
        lambda: generate(answers.sglang([99, 100], [-0.1, -0.2])), "outside [0, 100)", "tokens", 1,
    ),
    "46 placeholder": (
        lambda: generate(answers.sglang([5, -1, 7], [-0.1, -0.2, -0.3])), "outside [0, 100)", "tokens", 1,
    ),
    "46 candidate placeholder": (
        lambda: generate(answers.sglang([5], [-0.1], [[[-0.1, 5, None], [-5.0, -1, None]]])),
        "outside [0, 100)", "candidates.ids", 0,
    ),
    "47 tokenized again, other length": (
        lambda: generate(answers.sglang([12], [-0.1, -0.2])), "2 values for 1 tokens", "output_token_logprobs", 1,
    ),
    "47 tokenized again, same length": (
        lambda: vllm.read_json(
            answers.vllm_generate([12, 13], [[(12, -0.1, 1)], [(31, -0.2, 1)]]), PLAIN
        ),
        "tokenized again", "logprobs", 1,
    ),
    "47 context tokenized again": (
        lambda: assemble(turns(([1, 2], [3, 4], A), ([1, 2, 34, 5], [6], A))),
        "does not continue", "turns[1].prompt", 2,
    ),
    "49 two tokenizers": (lambda: check_fleet([A, B]), "tokenizer_hash", "spec.tokenizer_hash", None),
    "51 other dtype": (
        lambda: generate(_with(answers.as_flat(answers.good_sglang(), coded=True),
                               output_top_logprobs_val_flat_b64_dtype="float16")),
        "dtype marker", "output_top_logprobs_val_flat_b64_dtype", None,
    ),
    "51 no dtype": (
        lambda: generate(_with(answers.as_flat(answers.good_sglang(), coded=True),
                               output_top_logprobs_idx_flat_b64_dtype=None)),
        "dtype marker", "output_top_logprobs_idx_flat_b64_dtype", None,
    ),
    "55 masked value that is trained": (
        lambda: record([5], [1.0]).validate(loss_mask=torch.tensor([1])), "above 0", "logprobs", 0,
    ),
    "56 empty support": (
        lambda: record([5], None, candidates=support([[]], None)).validate(),
        "absent from its complete set", "candidates.ids", 0,
    ),
    "63 default version": (
        lambda: oc.guards.staleness(
            generate(answers.sglang([5], [-0.1], weight_versions=[{"version": "default", "start": 0, "end": 1}])),
            torch.zeros(1, dtype=torch.int64), 9, 4,
        ),
        "undeclared", "weight_version", 0,
    ),
    "65 above the gate": (
        lambda: inspect(
            record(list(range(200)), [-1.01] * 200), trainer_logprobs=torch.full((200,), -1.88), on_finding="raise"
        ),
        "above the gate", "mismatch", None,
    ),
    "68 nameless group": (
        lambda: assemble(turns(([1], [2], SamplerSpec(engine="vllm", logprobs="processed")))),
        "no name", "spec.group", None,
    ),
}  # fmt: skip


def _with(response: dict[str, Any], **meta: Any) -> dict[str, Any]:
    response["meta_info"].update(meta)
    return response


@pytest.mark.parametrize("row", REFUSED)
def test_reported_fault_is_refused_with_place_and_remedy(row: str) -> None:
    act, says, field, token = REFUSED[row]
    with pytest.raises(oc.RecordError) as caught:
        act()
    assert says in str(caught.value)
    assert (caught.value.field, caught.value.token) == (field, token)
    assert caught.value.remedy


SURVEY = """
1 2 3 5 6 7 8 10 11 12 13 14 17 18 19 20 22 23 24 27 28 29 31 32 34 35 36 38 39 40 42 43 45 46 47 49 51 54 55 56
57 59 60 63 65 66 68 69 71
"""


def test_every_row_of_the_survey_has_a_case() -> None:
    names = [*REFUSED, *(name[5:] for name in vars(test_faults_accepted) if name.startswith("test_"))]
    leading = [re.match(r"\d+([ _]\d+)*", name) for name in names]
    rows = {int(part) for match in leading if match for part in re.split("[ _]", match[0])}
    assert rows == set(map(int, SURVEY.split()))
