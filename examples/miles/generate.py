"""A generate function that records candidates and sampler groups, for Miles versions that do not by themselves.

    GENERATE=generate.generate ./launch.sh homogeneous_b200     # the mixed fleets use it by themselves

Single-turn. The prompt goes to one group of the fleet, chosen by its index so that groups keep their shares; SGLang is
asked for what the correction needs; `offpolicy_corr.integrations.sglang` reads and checks the answer, and the record
is attached to the sample, from where the transport extension carries it to the loss. A record that cannot be trusted
raises here, before a trainer sees it. Evaluation asks for no record. For several turns see docs/miles.md.

Written against Miles v0.1.0 (class-based rollout API); tested with stand-ins for Miles and for the server alone.
"""

from __future__ import annotations

from typing import Any

from offpolicy_corr.integrations import sglang
from offpolicy_corr.integrations.miles import request_fields, sampler_spec, transport


def choose_group(fleet: dict[str, dict[str, Any]], index: int) -> str:
    """The group of prompt ``index``: low-discrepancy, so that any run of prompts splits by the shares."""
    total = sum(float(group["share"]) for group in fleet.values())
    point = (index * 0.6180339887498949) % 1.0 * total
    for name, group in fleet.items():
        point -= float(group["share"])
        if point < 0:
            return name
    return name


async def generate(input: Any) -> Any:
    """``--custom-generate-function-path``: one answer, with its record."""
    from miles.rollout.base_types import GenerateFnOutput
    from miles.rollout.generate_utils.generate_endpoint_utils import (
        compute_prompt_ids_from_sample,
        compute_request_payload,
        update_sample_from_response,
    )
    from miles.utils.http_utils import post

    args, sample = input.args, input.sample
    if sample.response:
        raise ValueError(
            "a partial rollout cannot be continued here: its first part has no record. Turn it off"
        )
    prompt = compute_prompt_ids_from_sample(input.state, sample)
    payload, halted = compute_request_payload(args, input_ids=prompt, sampling_params=input.sampling_params)
    if payload is None:
        sample.status = halted
        return GenerateFnOutput(samples=sample)
    if not input.evaluation:
        payload |= request_fields(args, num_candidates=128)
    fleet = getattr(args, "offpolicy_corr_fleet", None)
    group = None if fleet is None else choose_group(fleet, sample.group_index or 0)
    base = (
        f"http://{args.sglang_router_ip}:{args.sglang_router_port}" if group is None else fleet[group]["url"]
    )
    answer = await post(f"{base}/generate", payload)
    await update_sample_from_response(args, sample, payload=payload, output=answer)
    # Miles aborts the requests that a rollout no longer needs: such an answer is not trained, and needs no record
    if not input.evaluation and answer["meta_info"]["finish_reason"]["type"] != "abort":
        transport.attach(sample, sglang.read_generate(answer, sampler_spec(args)), group)
    return GenerateFnOutput(samples=sample)
