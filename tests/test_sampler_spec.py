"""Sampler specs: what is refused, what is allowed, and what an engine must be asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import offpolicy_corr as oc
from offpolicy_corr.records.requests import request_parameters
from offpolicy_corr.records.sampler_spec import SamplerSpec, check_fleet, specs_from_plain, specs_to_plain

NOT_LOG_Q: list[tuple[dict[str, Any], str, str]] = [
    ({"engine": "sglang", "logprobs": "temperature", "top_p": 0.9}, "spec.logprobs", "return_sampling_mask"),
    ({"engine": "sglang", "logprobs": "temperature", "top_k": 40}, "spec.logprobs", "support"),
    ({"engine": "sglang", "logprobs": "temperature", "min_p": 0.1}, "spec.logprobs", "min_p = 0.1"),
    ({"engine": "sglang", "logprobs": "raw", "temperature": 0.7}, "spec.logprobs", "SGLANG_RETURN_ORIGINAL"),
    ({"engine": "vllm", "logprobs": "raw", "temperature": 0.7}, "spec.logprobs", "processed_logprobs"),
    ({"engine": "vllm", "logprobs": "raw", "top_p": 0.9}, "spec.logprobs", "processed_logprobs"),
    ({"engine": "vllm", "logprobs": "raw", "frequency_penalty": 0.2}, "spec.logprobs", "penalties"),
    ({"engine": "vllm", "logprobs": "raw", "constrained": True}, "spec.logprobs", "penalties"),
    ({"engine": "vllm", "logprobs": "temperature"}, "spec.logprobs", "processed"),
    ({"engine": "vllm", "logprobs": "raw_logits"}, "spec.logprobs", "logits are not log-probs"),
    ({"engine": "vllm", "logprobs": "processed", "temperature": 0.005}, "spec.temperature", "0.01"),
    (
        {"engine": "vllm", "logprobs": "processed", "temperature": 0.7, "engine_version": "0.10.0"},
        "spec.engine_version",
        "leave temperature out",
    ),
    ({"engine": "tensorrt-llm", "logprobs": "raw", "temperature": 0.7}, "spec.logprobs", "processed"),
    (
        {"engine": "sglang", "logprobs": "processed", "top_p": 0.9, "rescored_temperature": 1.0},
        "spec.logprobs",
        "filters",
    ),
    ({"engine": "vllm", "logprobs": "processed", "dialect": "slime"}, "spec.dialect", "patched SGLang"),
]
OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("temperature", 0.0),
    ("temperature", float("nan")),
    ("temperature", None),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 2.0),
    ("min_p", 1.0),
    ("repetition_penalty", 0.0),
    ("presence_penalty", float("inf")),
    ("vocab_size", 0),
    ("dialect", "patois"),
]


@pytest.mark.parametrize(("settings", "field", "says"), NOT_LOG_Q)
def test_combinations_that_are_not_log_q_are_refused_with_the_setting_that_would_be(
    settings: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(oc.RecordError) as caught:
        SamplerSpec(**settings)
    assert caught.value.field == field and says in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "sglang", "logprobs": "temperature", "temperature": 0.7, "frequency_penalty": 0.1},
        {"engine": "sglang", "logprobs": "raw", "presence_penalty": 0.1},
        {"engine": "sglang", "logprobs": "support", "top_p": 0.9, "top_k": 512, "min_p": 0.05},
        {"engine": "sglang", "logprobs": "temperature", "top_k": -1},
        {"engine": "sglang", "logprobs": "temperature", "top_k": 0},
        {"engine": "vllm", "logprobs": "raw"},
        {"engine": "vllm", "logprobs": "processed", "temperature": 0.7, "engine_version": "0.33.0"},
        {"engine": "vllm", "logprobs": "processed", "temperature": 0.7, "engine_version": "nightly"},
        {"engine": "vllm", "logprobs": "processed", "engine_version": "0.10.0"},
        {
            "engine": "sglang",
            "logprobs": "support",
            "temperature": 0.8,
            "top_k": 8,
            "rescored_temperature": 0.8,
        },
    ],
)
def test_combinations_that_are_log_q_are_taken(settings: dict[str, Any]) -> None:
    assert SamplerSpec(**settings).engine == settings["engine"]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_values_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(oc.RecordError) as caught:
        SamplerSpec(**({"engine": "other", "logprobs": "processed"} | {name: value}))
    assert caught.value.field == f"spec.{name}"


def test_a_vocabulary_wider_than_the_logits_is_refused() -> None:
    with pytest.raises(oc.RecordError, match="narrower"):
        SamplerSpec(engine="other", logprobs="processed", vocab_size=101, logits_width=100)


def test_the_meaning_of_log_probs_has_no_default() -> None:
    with pytest.raises(TypeError, match="logprobs"):
        SamplerSpec(engine="vllm")  # type: ignore[call-arg]


def test_fleet_refuses_one_name_for_two_samplers_and_different_vocabularies() -> None:
    fp8 = SamplerSpec(engine="vllm", logprobs="processed", group="g", weights="fp8")
    check_fleet([fp8, fp8])
    with pytest.raises(oc.RecordError, match="weights"):
        check_fleet([fp8, SamplerSpec(engine="vllm", logprobs="processed", group="g", weights="bf16")])
    sizes = [SamplerSpec(engine="x", logprobs="raw", group=str(n), vocab_size=n) for n in (100, 101)]
    with pytest.raises(oc.RecordError, match="vocab_size"):
        check_fleet(sizes)
    check_fleet([SamplerSpec(engine="x", logprobs="raw")], strict=False)


@pytest.mark.parametrize("name", ["group", "weights", "engine_version", "speculative", "tokenizer_hash"])
def test_names_are_text(name: str) -> None:
    with pytest.raises(oc.RecordError, match=f"{name} must be text") as caught:
        SamplerSpec(engine="vllm", logprobs="processed", **{name: 3})
    assert caught.value.field == f"spec.{name}"


def test_specs_survive_json_and_refuse_what_they_do_not_know() -> None:
    specs = (
        SamplerSpec(engine="sglang", logprobs="support", temperature=0.7, top_p=0.9, top_k=64, group="größe"),
        SamplerSpec(engine="vllm", logprobs="raw", constrained=False, logits_width=8),
    )
    plain = json.loads(json.dumps(specs_to_plain(specs)))
    assert specs_from_plain(plain) == specs and set(plain[1]) == {"engine", "logprobs", "logits_width"}
    for wrong in (
        None,
        3,
        ["x"],
        [{}],
        [{"engine": "vllm"}],
        [plain[0] | {"later": 1}],
        [plain[0] | {"top_p": 2}],
    ):
        with pytest.raises(oc.RecordError):
            specs_from_plain(wrong)


def test_sglang_requests() -> None:
    head = request_parameters(SamplerSpec(engine="sglang", logprobs="temperature", temperature=0.8))
    assert head.request["top_logprobs_num"] == 128 and head.request["return_flat_raw_top_logprobs_b64"]
    assert head.request["sampling_params"]["temperature"] == 0.8
    assert head.environment == {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    plain = request_parameters(
        SamplerSpec(engine="sglang", logprobs="temperature"), oc.Correction(center=False)
    )
    assert "top_logprobs_num" not in plain.request
    wide = SamplerSpec(engine="sglang", logprobs="support", top_p=0.95, top_k=5000)
    mask = request_parameters(wide)
    assert mask.request["return_sampling_mask"] and mask.request["sampling_logprobs_mode"] == "support"
    assert mask.server_flags == ("--sampling-mask-max-tokens 5000",)
    selected = SamplerSpec(engine="sglang", logprobs="processed", top_p=0.95, top_k=50)
    replayed = request_parameters(selected, oc.Correction(center=False))
    assert replayed.request["sampling_logprobs_mode"] == "selected"
    with pytest.raises(oc.RecordError, match="Declare logprobs='support'"):
        request_parameters(selected)
    dflash = replace(wide, speculative="DFLASH")
    assert request_parameters(dflash).request["return_sampling_mask"]
    for refused in (replace(wide, speculative="EAGLE"), replace(dflash, min_p=0.1)):
        with pytest.raises(oc.RecordError, match="no mask under speculative"):
            request_parameters(refused)
    chat = request_parameters(SamplerSpec(engine="sglang", logprobs="temperature"), endpoint="chat").request
    assert chat["return_meta_info"] and chat["return_token_ids"] and chat["top_logprobs"] == 128


def test_slime_requests() -> None:
    slime = SamplerSpec(engine="sglang", logprobs="processed", top_p=0.9, dialect="slime")  # no top-k needed
    asked = request_parameters(slime, oc.Correction(center=False)).request
    assert asked["custom_params"] == {"return_top_p_token_ids": True} and asked["return_logprob"]
    assert "return_sampling_mask" not in asked
    with pytest.raises(oc.RecordError, match="ids alone") as caught:
        request_parameters(slime)
    assert caught.value.field == "spec.dialect"


@pytest.mark.parametrize("version", ["0.10.0rc1", "v0.10.0", "0.10", "0.9.2.post1", "0.10.0+cpu"])
def test_early_releases_are_known_however_they_are_written(version: str) -> None:
    spec = {"engine": "vllm", "logprobs": "processed", "temperature": 0.7}
    with pytest.raises(oc.RecordError, match="leave temperature out"):
        SamplerSpec(**spec, engine_version=version)
    for later in ("0.10.1.dev3+g1", "0.33.0rc1", "1.0", "nightly"):
        assert SamplerSpec(**spec, engine_version=later).engine_version == later


def test_vllm_requests() -> None:
    filtered = SamplerSpec(engine="vllm", logprobs="processed", top_p=0.95, top_k=64)
    asked = request_parameters(filtered)
    assert asked.request["sampling_params"]["logprobs"] == 64
    assert asked.server_flags == (
        "--logprobs-mode processed_logprobs",
        "--max-logprobs 64",
        "--enable-scale-out",
    )
    ids = request_parameters(filtered, oc.Correction(center=False))
    assert ids.request["sampling_params"]["logprobs"] == 0 and "--return-sampling-mask" in ids.server_flags
    with pytest.raises(oc.RecordError, match="chat has no mask"):
        request_parameters(filtered, oc.Correction(center=False), endpoint="chat")
    raw = request_parameters(SamplerSpec(engine="vllm", logprobs="raw"), num_candidates=20)
    assert raw.server_flags == ("--logprobs-mode raw_logprobs", "--enable-scale-out")
    everything = request_parameters(SamplerSpec(engine="vllm", logprobs="support"))
    assert everything.request["sampling_params"]["logprobs"] == -1
    assert "--max-logprobs -1" in everything.server_flags
    chat = request_parameters(SamplerSpec(engine="vllm", logprobs="processed"), endpoint="chat").request
    assert chat["return_tokens_as_token_ids"] and chat["top_logprobs"] == 129


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_support_needs_a_finite_top_k(engine: str) -> None:
    logprobs = {"sglang": "support", "vllm": "processed"}[engine]
    with pytest.raises(oc.RecordError, match="finite top-k") as caught:
        request_parameters(SamplerSpec(engine=engine, logprobs=logprobs, top_p=0.9))
    assert caught.value.field == "spec.top_k"


def test_unknown_engines_and_endpoints() -> None:
    with pytest.raises(oc.RecordError, match="unknown engine"):
        request_parameters(SamplerSpec(engine="other", logprobs="processed"))
    spec = SamplerSpec(engine="vllm", logprobs="processed")
    with pytest.raises(ValueError, match="endpoint"):
        request_parameters(spec, endpoint="embeddings")
    with pytest.raises(ValueError, match="num_candidates"):
        request_parameters(spec, num_candidates=0)


@pytest.mark.parametrize(
    "setting",
    [{"temperature": np.float32(0.5)}, {"top_k": np.int64(8)}, {"vocab_size": True}, {"top_p": "1"}],
)
def test_settings_that_are_no_python_numbers_say_so(setting: dict[str, Any]) -> None:
    """A spec is stored as JSON; a NumPy scalar is not out of range, it is of another type."""
    with pytest.raises(oc.RecordError, match=r"must be a Python (number|integer).*Give (float|int)\("):
        oc.SamplerSpec(engine="sglang", logprobs="temperature", **setting)
