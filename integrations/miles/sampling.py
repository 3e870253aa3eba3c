"""Adapter: what Miles' samplers are, as far as its options say, and what a request must ask them for."""

from __future__ import annotations

from typing import Any

from offpolicy_corr.records.requests import request_parameters
from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.settings import Settings

from .options import filters, number_of


def sampler_spec(args: Any) -> SamplerSpec:
    """The semantics of what SGLang records under Miles' arguments, for `offpolicy_corr.integrations.sglang`.

    Raises:
        SettingsError: an ``offpolicy_corr:`` mapping that is wrong, or that the sampling options contradict.
    """
    settings = Settings.of(getattr(args, "offpolicy_corr", None))
    return spec_of_kind(args, settings.kind_of_candidates(filters(args)))


def request_fields(args: Any, num_candidates: int = 128) -> dict[str, Any]:
    """Fields of a ``/generate`` request, beside ``sampling_params``, that make SGLang record what the correction needs.

    Args:
        num_candidates: size of recorded heads.
    """
    settings = Settings.of(getattr(args, "offpolicy_corr", None))
    parameters = request_parameters(sampler_spec(args), settings.correction, num_candidates=num_candidates)
    return {name: value for name, value in parameters.request.items() if name != "sampling_params"}


def spec_of_kind(args: Any, kind: str) -> SamplerSpec:
    """The same for a ``kind`` of candidates, ``"heads"``, ``"supports"`` or ``"none"``."""
    top_k = int(number_of(args, "rollout_top_k", -1))
    return SamplerSpec(
        engine="sglang",
        logprobs="support" if kind == "supports" else "temperature",
        temperature=number_of(args, "rollout_temperature", 1.0),
        top_p=number_of(args, "rollout_top_p", 1.0),
        top_k=top_k if top_k > 0 else None,
    )
