"""Right answers as data (`data/corrections.json`), through every entrance that can give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import offpolicy_corr as oc
from support import ENTRANCES, gradient_through

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "corrections.json").read_text())[
    "cases"
]


def correction_of(case: dict[str, Any]) -> oc.Correction:
    settings = dict(case["rule"])
    name = ("sc+" if case["center"] else "") + settings.pop("kind")
    return oc.Correction.from_name(name, **settings)


def record_of(case: dict[str, Any], dtype: torch.dtype) -> oc.SamplerRecord:
    ids = torch.tensor(case["candidate_ids"])
    candidates = oc.CandidateSet(
        ids,
        torch.tensor(case["candidate_logprobs"], dtype=dtype),
        torch.tensor([0, ids.numel()]),
        torch.tensor([case["complete"]]),
    )
    logq = torch.tensor([case["sampler_logprob"]], dtype=dtype)
    return oc.SamplerRecord(torch.tensor([case["token"]]), logq, candidates, case["temperature"])


EXACT = [(entrance, torch.float64, 1e-9) for entrance in ENTRANCES]
# from log-probs the tail is a difference: that entrance is held to fp64 only
SINGLE = [(entrance, torch.float32, 2e-5) for entrance in ENTRANCES if entrance != "logprobs"]


# Grid: the cases made for an edge of the mathematics go through every entrance in both precisions. The random ones are
# ordinary points: that entrances agree there is a fact of test_facts and test_invariance, so one entrance reads them.
GRID = [
    (case, *entrance)
    for case in CASES
    for entrance in EXACT + SINGLE
    if entrance[0] == "logits" or not case["name"].startswith("random")
]


@pytest.mark.parametrize(
    "case,entrance,dtype,tolerance",
    GRID,
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_vector(case: dict[str, Any], entrance: str, dtype: torch.dtype, tolerance: float) -> None:
    logits = torch.tensor([case["logits"]], dtype=dtype)
    out, gradient = gradient_through(
        entrance,
        logits,
        record_of(case, dtype),
        torch.tensor([case["advantage"]], dtype=dtype),
        correction=correction_of(case),
    )
    expected = case["expected"]
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(gradient[0], torch.tensor(expected["grad"], dtype=dtype), **close)
    torch.testing.assert_close(out.loss.detach(), torch.tensor(expected["loss"], dtype=dtype), **close)
    torch.testing.assert_close(out.diagnostics.logprobs[0].item(), expected["logprob"], **close)
    torch.testing.assert_close(out.diagnostics.weight[0].item(), expected["weight"], **close)
