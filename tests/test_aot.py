"""Ahead-of-time compilation for architectures that need not be here, held to a written budget.

Every kernel, in configurations in which every choice occurs; in which all pairs, or triples, of choices that can be
launched together occur under ``AOT_STRENGTH=2`` or ``3`` (`make aot`).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from offpolicy_corr.benchmarks import static

from aot_configurations import covering

REGISTERS = 128  # at 8 warps, two programs on a multiprocessor
# on the compiler that CI pins nothing spills; others may keep a few bytes outside the loops, and count other slots
PINNED = version("triton").startswith("3.9.")
STACK = 0 if PINNED else 16


def in_child(code: str) -> Any:
    """What ``code`` prints as JSON, in a process whose kernels are not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    strength = os.environ.get("AOT_STRENGTH", "1")
    code = (
        "import json\n"
        "from dataclasses import asdict\n"
        "from offpolicy_corr.benchmarks import static as s\n"
        "from aot_configurations import all_configurations\n"
        f"configurations = all_configurations({strength})\n"
        "found = [vars(c) | {'columns': c.columns} | asdict(s.figures(c, %d)) for c in configurations]\n"
        "print(json.dumps(found))"
    )
    with ThreadPoolExecutor(2) as pool:
        return [
            figures for found in pool.map(in_child, [code % t for t in static.TARGETS]) for figures in found
        ]


def offenders(compiled: list[dict[str, Any]], bad: Any) -> list[str]:
    keys = ("kernel", "dtype", "label", "target", "registers", "stack_bytes", "sweep_widths", "sweeps")
    return [str({k: c[k] for k in keys}) for c in compiled if bad(c)]


def test_nothing_spills(compiled: list[dict[str, Any]]) -> None:
    assert not offenders(compiled, lambda c: c["stack_bytes"] > STACK)
    assert not offenders(compiled, lambda c: c["local_in_loops"] > 0)


def test_registers_leave_room_for_two_programs(compiled: list[dict[str, Any]]) -> None:
    aligned = [c for c in compiled if c["aligned"]]
    assert not offenders(aligned, lambda c: c["registers"] > REGISTERS)


def test_main_loops_access_128_bits_at_a_time(compiled: list[dict[str, Any]]) -> None:
    aligned = [c for c in compiled if c["aligned"] and c["columns"] >= 4096 and c["sweeps"]]
    assert not offenders(aligned, lambda c: set(c["sweep_widths"]) != {128})
    assert {c["kernel"] for c in aligned} == {"fused_loss", "row_stats", "row_gradient", "scale_rows"}


@pytest.mark.skipif(not PINNED, reason="the budget is that of Triton 3.9")
def test_issue_slots_per_logit_stay_within_the_budget(compiled: list[dict[str, Any]]) -> None:
    def over(c: dict[str, Any]) -> bool:
        budget = static.BONUS_BUDGET if c["constants"].get("ENTROPY") else static.SLOT_BUDGET
        large = c["kernel"] == "fused_loss" and c["aligned"] and c["columns"] >= 4096
        return large and sum(c["sweeps"]) > budget[c["target"]]

    assert not offenders(compiled, over)
    assert any(c["kernel"] == "fused_loss" and len(c["sweeps"]) == 2 for c in compiled)


def test_configurations_cover_every_pair_and_triple_of_choices() -> None:
    axes = {"a": (1, 2, 3), "b": (True, False), "c": ("x", "y"), "d": (0, 1)}
    for strength, most in ((2, 9), (3, 18)):
        rows = list(covering(axes, strength))
        for names in itertools.combinations(axes, strength):
            met = {tuple(row[name] for name in names) for row in rows}
            assert met == set(itertools.product(*(axes[name] for name in names)))
        assert len(rows) <= most


def test_fault_12_no_double_precision_arithmetic_slips_in() -> None:
    """Only the third sweep, which asks for it, may use fp64; loading the fp64 scale is one conversion."""
    lines = in_child(
        "import json\n"
        "from offpolicy_corr.benchmarks import static as s\n"
        "ptx = s.compile_for(s.fused(entropy=True, kl=3, dtype='bf16'), 90).asm['ptx'].splitlines()\n"
        "print(json.dumps([x.strip() for x in ptx if '.f64' in x]))"
    )
    assert [line for line in lines if not line.startswith("cvt.rn.f32.f64")] == [], lines
    assert len(lines) <= 1


def test_fault_17_barriers_stand_between_the_dense_stores_and_the_scatter() -> None:
    """The interpreter runs statements in order and never shows this race."""
    order = in_child(
        "import json, re\n"
        "from offpolicy_corr.benchmarks import static as s\n"
        "ptx = s.compile_for(s.fused(), 90).asm['ptx'].splitlines()\n"
        "kinds = []\n"
        "for x in ptx:\n"
        "    if re.search(r'st\\.global\\S*v4', x): kinds.append('dense')\n"
        "    elif 'bar.sync' in x: kinds.append('barrier')\n"
        "    elif re.search(r'st\\.global\\.b16|st\\.global\\.u16', x): kinds.append('sparse')\n"
        "print(json.dumps(kinds))"
    )
    last_dense = max(i for i, kind in enumerate(order) if kind == "dense")
    # stores of the masked last tile are 16 bits wide too: what counts is the scatter, at the very end
    assert order[-1] == "sparse" and "barrier" in order[last_dense:]
