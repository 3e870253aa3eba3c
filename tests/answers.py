"""Engine answers built by hand from the documented shapes of SGLang 0.5.23 and vLLM 0.33, for the reader tests."""

from __future__ import annotations

import base64
import copy
from types import SimpleNamespace
from typing import Any

import numpy as np

from offpolicy_corr.records.sampler_spec import SamplerSpec

HEAD = SamplerSpec(engine="sglang", logprobs="temperature", temperature=0.8, vocab_size=100, group="h100")
SUPPORT = SamplerSpec(engine="sglang", logprobs="support", temperature=0.8, top_p=0.95, top_k=8, group="h100")
SELECTED = SamplerSpec(engine="sglang", logprobs="processed", temperature=0.8, top_p=0.95, top_k=8)
SLIME = SamplerSpec(engine="sglang", logprobs="processed", top_p=0.9, dialect="slime")
PLAIN = SamplerSpec(engine="vllm", logprobs="processed", temperature=0.8, vocab_size=100, group="b200")
FILTERED = SamplerSpec(
    engine="vllm", logprobs="processed", temperature=0.8, top_p=0.95, top_k=4, group="b200"
)


def sglang(
    tokens: list[Any], logprobs: list[Any], head: list[Any] | None = None, **meta: Any
) -> dict[str, Any]:
    """A ``/generate`` response; ``head`` is rows of [logprob, id, text]."""
    triples = [[value, token, None] for value, token in zip(logprobs, tokens, strict=False)]
    triples += [[value, 99, None] for value in logprobs[len(tokens) :]]
    info: dict[str, Any] = {
        "output_token_logprobs": triples,
        "output_token_logprobs_length": len(triples),
        "completion_tokens": len(tokens),
        "finish_reason": {"type": "stop", "matched": 2},
        "weight_version": "9",
    }
    if head is not None:
        info["output_top_logprobs"] = head
    info.update(meta)
    return {
        "text": "…",
        "output_ids": list(tokens),
        "meta_info": {k: v for k, v in info.items() if v is not ...},
    }


def good_sglang() -> dict[str, Any]:
    """Three tokens with heads of two."""
    head = [
        [[-0.5, 5, None], [-2.0, 9, None]],
        [[-0.2, 6, None], [-2.5, 8, None]],
        [[-0.75, 3, None], [-1.0, 4, None]],
    ]
    return sglang([5, 6, 7], [-0.5, -0.2, -3.0], head)


def as_flat(response: dict[str, Any], coded: bool, null_prefix: int = 0) -> dict[str, Any]:
    """The same response with its heads in flat form, plain or base64."""
    response = copy.deepcopy(response)
    meta = response["meta_info"]
    rows = meta.pop("output_top_logprobs")[null_prefix:]
    values = np.array([[entry[0] for entry in row] for row in rows], dtype="<f4")
    ids = np.array([[entry[1] for entry in row] for row in rows], dtype="<i4")
    meta["output_top_logprobs_shape"] = list(values.shape)
    meta["output_top_logprobs_null_prefix"] = null_prefix
    for name, array, dtype in (("val", values, "float32"), ("idx", ids, "int32")):
        key = f"output_top_logprobs_{name}_flat"
        if coded:
            meta[key + "_b64"] = base64.b64encode(array.tobytes()).decode()
            meta[key + "_b64_dtype"] = dtype
        else:
            meta[key] = array.ravel().tolist()
    return response


def sglang_support(tokens: list[int], mask: list[Any], logprobs: list[Any], **meta: Any) -> dict[str, Any]:
    """A response with a sampling mask; the triples hold values from before the filters."""
    return sglang(
        tokens,
        [-4.0] * len(tokens),
        output_token_sampling_mask=mask,
        output_token_sampling_mask_length=len(mask),
        output_token_sampling_logprobs=logprobs,
        **meta,
    )


def good_support() -> dict[str, Any]:
    return sglang_support([5, 42], [[17, 5, 9], [42]], [log([0.5, 0.3, 0.2]), [0.0]])


def slime(tokens: list[int], ids: list[int], offsets: list[int]) -> dict[str, Any]:
    coded = {
        name: base64.b64encode(np.array(array, dtype="<i4").tobytes()).decode()
        for name, array in (("top_p_token_ids", ids), ("top_p_token_offsets", offsets))
    }
    return sglang(tokens, [-0.5] * len(tokens), **coded)


def log(probabilities: list[float]) -> list[float]:
    """Float32 log-probs printed as Python prints them."""
    return [float(np.float32(np.log(p))) for p in probabilities]


def entry(logprob: float | None, rank: int | None) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob, rank=rank, decoded_token=None)


def vllm_dicts(tokens: list[int], rows: list[dict[int, tuple[float, int]]], **extra: Any) -> SimpleNamespace:
    """A ``CompletionOutput`` with dict rows: ``{id: (logprob, rank)}``, the sampled token first."""
    logprobs = [{token: entry(*pair) for token, pair in row.items()} for row in rows]
    return SimpleNamespace(
        index=0, text="", token_ids=tokens, logprobs=logprobs, finish_reason="stop", **extra
    )


def vllm_flat(tokens: list[int], rows: list[list[tuple[int, float, int]]], **extra: Any) -> SimpleNamespace:
    """A ``CompletionOutput`` with ``FlatLogprobs``: rows of (id, logprob, rank), the sampled token first."""
    ends = np.cumsum([len(row) for row in rows]).tolist()
    flat = SimpleNamespace(
        start_indices=[0, *ends[:-1]] if ends else [],
        end_indices=ends,
        token_ids=[item[0] for row in rows for item in row],
        logprobs=[item[1] for row in rows for item in row],
        ranks=[item[2] for row in rows for item in row],
        decoded_tokens=[None for row in rows for _ in row],
    )
    return SimpleNamespace(index=0, text="", token_ids=tokens, logprobs=flat, finish_reason="stop", **extra)


def vllm_generate(tokens: list[Any], rows: list[list[tuple[Any, Any, Any]]], **choice: Any) -> dict[str, Any]:
    """A ``/inference/v1/generate`` response: rows of (id, logprob, rank), the sampled token first."""
    content = [
        {
            "token_id": row[0][0],
            "logprob": row[0][1],
            "rank": row[0][2],
            "top_logprobs": [{"token_id": i, "logprob": v, "rank": r} for i, v, r in row],
        }
        for row in rows
    ]
    body = {"index": 0, "finish_reason": "stop", "token_ids": list(tokens), "logprobs": {"content": content}}
    return {"request_id": "r", "choices": [body | choice]}


def good_rows() -> list[list[tuple[int, float, int]]]:
    """k = 2: a row whose token is the first candidate, one whose token is no candidate."""
    return [[(5, -0.5, 1), (9, -2.0, 2)], [(7, -3.0, 4), (6, -0.2, 1), (8, -2.5, 2)]]
