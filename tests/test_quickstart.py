"""examples/quickstart.py runs, trains, and is the quickstart that the README shows."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch

import pages

pytest.importorskip("transformers", minversion="5.0")
QUICKSTART = pages.ROOT / "examples" / "quickstart.py"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return runpy.run_path(str(QUICKSTART))


def test_every_parameter_gets_a_gradient(names: dict[str, Any]) -> None:
    gradients = {name: p.grad for name, p in names["model"].named_parameters()}
    assert gradients and all(g is not None and g.isfinite().all() for g in gradients.values())
    assert any(g.abs().max() > 0 for g in gradients.values())


def test_the_loss_trains_the_answers_and_nothing_else(names: dict[str, Any]) -> None:
    batch, out = names["batch"], names["out"]
    assert batch.record.tokens[batch.loss_mask].tolist() == [7, 9, 8]
    assert batch.advantages[batch.loss_mask].tolist() == [1.0, 1.0, -1.0]
    assert out.loss.isfinite() and out.diagnostics.kept.equal(batch.loss_mask)
    rows = names["logits"].detach().log_softmax(2)
    picked = torch.stack([rows[0, 2, 7], rows[0, 3, 9], rows[1, 2, 8]])  # the row before each token
    torch.testing.assert_close(out.diagnostics.logprobs[batch.loss_mask], picked)


def test_the_readme_shows_it_whole() -> None:
    code = QUICKSTART.read_text().split('"""\n\n', 1)[1]
    assert pages.blocks("README.md", "python")[0] == code
    statements = [line for line in code.splitlines() if line and line[0] not in " }]#"]
    assert len(statements) <= 25
