"""Records: `request_parameters`, what to ask of an engine so that its record fits a correction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..correction import Correction
from .errors import RecordError
from .sampler_spec import SamplerSpec

SGLANG_MASK_CAP = 4096  # default of --sampling-mask-max-tokens
VLLM_LOGPROBS_CAP = 20  # default of --max-logprobs


@dataclass(frozen=True)
class RequestParameters:
    """Attributes: ``request``, fields of the request's body; ``server_flags``, how the engine must be
    started; ``environment``, variables of the server's process."""

    request: dict[str, Any]
    server_flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def request_parameters(
    spec: SamplerSpec,
    correction: Correction | None = None,
    *,
    num_candidates: int = 128,
    endpoint: str = "generate",
) -> RequestParameters:
    """What an engine needs so that its answers, read under ``spec``, carry all that ``correction`` uses.

    Args:
        spec: the group; its temperature and filters go into the request.
        correction: None is `Correction()`. A centered one needs candidates; under filters the whole support is
            needed for every correction, with its log-probs where centered.
        num_candidates: size of the heads of an unfiltered sampler.
        endpoint: ``"generate"`` (SGLang's ``/generate``, vLLM's ``/inference/v1/generate``) or ``"chat"``.

    Raises:
        RecordError: the engine cannot record what is asked for, for example a support without a finite top-k.
    """
    centered = (Correction() if correction is None else correction).center
    if endpoint not in ("generate", "chat"):
        raise ValueError(f"endpoint must be 'generate' or 'chat', got {endpoint!r}")
    if num_candidates < 1:
        raise ValueError(f"num_candidates must be at least 1, got {num_candidates}")
    if spec.truncates and spec.limit is None and spec.dialect != "slime":  # whose patch reports top-p's alone
        raise RecordError(
            "no released engine reports a support without a finite top-k",
            field="spec.top_k",
            value=spec.top_k,
            remedy="Set top_k beside top_p or min_p, for example top_k=512.",
        )
    build = {"sglang": _sglang, "vllm": _vllm}.get(spec.engine)
    if build is None:
        remedy = "Known are sglang and vllm; configure other engines by hand."
        raise RecordError("unknown engine", field="spec.engine", value=spec.engine, remedy=remedy)
    return build(spec, centered, num_candidates, endpoint)


def _sampling(spec: SamplerSpec) -> dict[str, Any]:
    return {
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": -1 if spec.limit is None else spec.limit,
        "min_p": spec.min_p,
        "repetition_penalty": spec.repetition_penalty,
        "presence_penalty": spec.presence_penalty,
        "frequency_penalty": spec.frequency_penalty,
    }


def _sglang(spec: SamplerSpec, centered: bool, num_candidates: int, endpoint: str) -> RequestParameters:
    chat = endpoint == "chat"
    request: dict[str, Any] = {"stream": False}
    flags: tuple[str, ...] = ()
    if chat:
        request |= {**_sampling(spec), "logprobs": True, "return_meta_info": True, "return_token_ids": True}
    else:
        request |= {"sampling_params": _sampling(spec), "return_logprob": True, "logprob_start_len": -1}
    if spec.dialect == "slime":
        if centered:
            remedy = (
                "Use SGLang's own masks and declare logprobs='support', or a correction without centering."
            )
            raise RecordError("slime reports ids alone", field="spec.dialect", value="slime", remedy=remedy)
        request["custom_params"] = {"return_top_p_token_ids": True}
    elif spec.limit is not None or spec.logprobs in ("processed", "support"):
        if spec.limit is None:
            remedy = "Without filters declare logprobs='temperature', or set a finite top_k."
            raise RecordError("no mask without top-k", field="spec.top_k", value=spec.top_k, remedy=remedy)
        if spec.speculative is not None and (spec.min_p or not spec.speculative.lower().startswith("dflash")):
            remedy = (
                "Sample without speculation, or without filters; DFlash alone reports masks, without min_p."
            )
            problem = "no mask under speculative decoding"
            raise RecordError(problem, field="spec.speculative", value=spec.speculative, remedy=remedy)
        if spec.logprobs == "processed" and centered:
            remedy = "Declare logprobs='support': centering needs every candidate's log-prob."
            raise RecordError(
                "selected values alone", field="spec.logprobs", value="processed", remedy=remedy
            )
        request["return_sampling_mask"] = True
        request["sampling_logprobs_mode"] = "support" if spec.logprobs == "support" else "selected"
        if spec.limit > SGLANG_MASK_CAP:
            flags = (f"--sampling-mask-max-tokens {spec.limit}",)
    elif centered:
        request |= {
            "top_logprobs" if chat else "top_logprobs_num": num_candidates,
            "return_flat_raw_output_top_logprobs": True,
            "return_flat_raw_top_logprobs_b64": True,
        }
    original = "1" if spec.logprobs == "raw" else "0"
    return RequestParameters(request, flags, {"SGLANG_RETURN_ORIGINAL_LOGPROB": original})


def _vllm(spec: SamplerSpec, centered: bool, num_candidates: int, endpoint: str) -> RequestParameters:
    mode = "raw_logprobs" if spec.logprobs == "raw" else "processed_logprobs"
    flags = [f"--logprobs-mode {mode}"]
    count = num_candidates if centered else 0
    if spec.limit is not None:
        if centered:
            count = spec.limit
        else:
            flags.append("--return-sampling-mask")
            if endpoint == "chat":
                remedy = "Use endpoint='generate', which returns sampling_mask."
                raise RecordError("vLLM's chat has no mask", field="endpoint", value=endpoint, remedy=remedy)
    # chat rows are cut to the request, sampled token included: one more keeps the head whole
    count += int(endpoint == "chat" and centered and spec.limit is None)
    if spec.logprobs == "support" and spec.limit is None:
        count = -1  # without filters the support is the vocabulary
    if count > VLLM_LOGPROBS_CAP or count < 0:
        flags.append(f"--max-logprobs {count}")
    if endpoint == "generate":
        flags.append("--enable-scale-out")
        return RequestParameters({"sampling_params": _sampling(spec) | {"logprobs": count}}, tuple(flags))
    chat = {
        "logprobs": True,
        "top_logprobs": count,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "return_weight_versions": True,
    }
    return RequestParameters(_sampling(spec) | chat, tuple(flags))
