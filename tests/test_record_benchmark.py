"""The promises of the bulk form, at a quarter of its size so that a busy machine can keep them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("pybase64", reason="needs the records extra")

SCRIPT = """
import json, torch
torch.set_num_threads(1)
from offpolicy_corr.benchmarks.records import read_large
print(json.dumps(read_large(tokens=65_536)))
"""


def test_bulk_base64_is_read_fast_and_in_little_memory() -> None:
    reply = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout
    _, cpu, beyond, size = json.loads(reply)
    assert cpu < 1.5 / 4 * 2  # seconds of CPU; twice the share, for a machine that throttles
    assert size < beyond < 600 / 4


def test_every_form_and_head_is_measured() -> None:
    from offpolicy_corr.benchmarks.records import adaptive_heads, wire_forms

    forms = {name: (size, parsing + reading) for name, size, parsing, reading in wire_forms(256, 32)}
    assert len(forms) == 6
    assert forms["SGLang base64"][0] < forms["SGLang flat"][0] < forms["SGLang nested"][0]
    heads = {(text, head): (size, mass, bound) for text, head, size, mass, bound in adaptive_heads(512)}
    fixed, adaptive = heads["low entropy", "k = 128"], heads["low entropy", "mass 0.999"]
    assert adaptive[0] < fixed[0] / 10 and adaptive[1] > 0.998
    assert adaptive[2] >= fixed[2]
