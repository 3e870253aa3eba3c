"""The microbenchmark: its arithmetic, and every path of it that needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from offpolicy_corr.benchmarks import kernels, roofline

from on_device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore")
H200 = next(m for m in roofline.MACHINES if m.name == "H200")


def test_the_roofline_is_bytes_over_bandwidth_where_the_second_read_hits() -> None:
    small = roofline.predict(H200, 8192, 32_000, 13.8, 2.03, 1)
    assert small.bytes_per_logit == 4.0 and small.limit == "memory"
    whole = roofline.predict(H200, 8192, 151_936, 13.8, 2.03, 1)
    assert whole.memory == pytest.approx(1.16, abs=0.01)
    assert whole.issue == pytest.approx(0.51, abs=0.01) and whole.exponential == pytest.approx(0.60, abs=0.01)
    crowded = roofline.predict(H200, 8192, 248_320, 13.8, 2.03, 2)
    assert 5.0 < crowded.bytes_per_logit < 5.2


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--quick"]) == 2
    assert "--static" in capsys.readouterr().out


def test_every_implementation_runs_or_says_why_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(case: Any) -> Any:
        raise ValueError("a peer's own fault\nwith details")

    monkeypatch.setitem(kernels.ON_LOGITS, "broken", (broken, "?", False))
    monkeypatch.delitem(kernels.ON_LOGITS, "compile")  # needs a C++ compiler on a CPU
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "plot")}
    files["plot"] = tmp_path / "out.png"
    pytest.importorskip("matplotlib")
    arguments = ["--device", DEVICE, "--quick", "--shape", "2x300", "--k", "4", "--hidden", "16"]
    for name, file in files.items():
        arguments += [f"--{name}", str(file)]
    assert kernels.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "skipped broken: ValueError: a peer's own fault" in printed and "with details" not in printed
    document = json.loads(files["json"].read_text())
    assert {"command", "torch", "triton", "device"} <= set(document["environment"])
    found = {row["impl"] for row in document["rows"]}
    assert {"ours", "ours, buffer", "ours, pair", "ours, torch", "eager"} <= found
    row = document["rows"][0]
    assert row["GB/s"] == pytest.approx(1e-9 * 4 * 2 * 300 / (1e-3 * row["ms"]))
    assert files["csv"].read_text().count("\n") == 1 + len(document["rows"])
    assert files["plot"].stat().st_size > 1000


def test_static_figures_are_labelled_as_predicted(tmp_path: Path) -> None:
    file = tmp_path / "static.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "offpolicy_corr.benchmarks.kernels", "--static", "--json", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PREDICTED" in done.stdout and "nothing was run" in done.stdout
    document = json.loads(file.read_text())
    assert document["kind"].startswith("predicted")
    assert {p["PREDICTED for"] for p in document["predicted"]} == {"H100 SXM", "H200", "B200", "B300"}


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU kernels are never interpreted")
def test_interpreted_kernels_cannot_be_compiled_and_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--static"]) == 2
    assert "unset TRITON_INTERPRET" in capsys.readouterr().out
