"""Shorthand of the fault tests: records and turns from plain lists."""

from __future__ import annotations

from typing import Any

import torch
from offpolicy_corr.integrations import sglang

import offpolicy_corr as oc
from answers import HEAD
from offpolicy_corr.records.assembly import Turn
from offpolicy_corr.records.sampler_spec import SamplerSpec


def generate(response: Any, spec: SamplerSpec = HEAD, **options: Any) -> Any:
    return sglang.read_generate(response, spec, **options)


def record(tokens: list[int], logprobs: list[float] | None, **fields: Any) -> oc.SamplerRecord:
    values = None if logprobs is None else torch.tensor(logprobs)
    return oc.SamplerRecord(torch.tensor(tokens), values, **fields)


def support(rows: list[list[int]], logprobs: list[list[float]] | None) -> oc.CandidateSet:
    offsets = torch.tensor([0] + [len(row) for row in rows]).cumsum(0)
    values = None if logprobs is None else torch.tensor([v for row in logprobs for v in row])
    return oc.CandidateSet.from_support(
        torch.tensor([i for row in rows for i in row], dtype=torch.int64), offsets, values
    )


def turns(*calls: tuple[list[int], list[int], SamplerSpec]) -> list[Turn]:
    return [
        Turn(record(drawn, [-0.5] * len(drawn), temperature=spec.temperature), torch.tensor(prompt), spec)
        for prompt, drawn, spec in calls
    ]
