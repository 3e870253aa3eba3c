"""The microbenchmark: its arithmetic, and every path of it that needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from offpolicy_corr.benchmarks import cases, kernels, peers, plain, roofline, timing
from offpolicy_corr.kernels import launch

import offpolicy_corr as oc
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


def test_programs_on_a_multiprocessor_are_bound_by_registers_and_by_warps() -> None:
    assert [roofline.programs(*each) for each in ((128, 8), (64, 16), (57, 8), (40, 32), (16, 8))] == [
        2,
        2,
        4,
        1,
        8,
    ]


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--quick"]) == 2
    assert "--static" in capsys.readouterr().out


class Event:
    """What `torch.cuda.Event` offers to a stopwatch."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose tensors lie on the host and whose clock and allocator are made up."""
    held = iter(range(0, 2**40, 2**20))
    for name, value in {
        "is_available": lambda: True,
        "get_device_name": lambda: "a stand-in",
        "Event": Event,
        "_sleep": lambda cycles: None,
        "mem_get_info": lambda: (2**20, 2**30),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: next(held),
        "max_memory_allocated": lambda: next(held),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in {"device": "cpu", "copied": 2**16, "side": 16, "repeats": 2, "flushed": 64}.items():
        monkeypatch.setattr(timing.OnGpu, name, value)


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_the_whole_run_on_a_stand_in_for_a_gpu(
    stand_in: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line that measures on a GPU, so that the first who has one does not meet its typing errors."""

    def broken(case: Any) -> Any:
        raise ValueError("a peer's own fault\nwith details")

    pytest.importorskip("matplotlib")
    monkeypatch.setitem(kernels.ON_LOGITS, "broken", kernels.OnLogits(broken, (1, 1)))
    monkeypatch.delitem(kernels.ON_LOGITS, "compile")  # looks at the GPU itself
    files = {"json": tmp_path / "out.json", "csv": tmp_path / "out.csv", "plot": tmp_path / "out.png"}
    arguments = ["--shape", "2x300", "--k", "0", "--k", "4", "--hidden", "16"]
    for name, file in files.items():
        arguments += [f"--{name}", str(file)]
    assert kernels.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "skipped broken: ValueError: a peer's own fault" in printed and "with details" not in printed
    document = json.loads(files["json"].read_text())
    assert document["environment"]["device"] == "a stand-in" and "driver" in document["environment"]
    assert set(document["machine"]) == {"copy", "matmul"}
    rows = document["rows"]
    on_logits = {(row["impl"], row["dtype"], row["K"]) for row in rows if row["op"] == "loss"}
    ours = ("ours", "ours-buffer", "ours-upstream3", "ours-pair", "ours-torch", "eager")
    kinds = (("bf16", "0"), ("bf16", "4"), ("bf16", "set ≤128"), ("fp32", "4"))
    assert on_logits >= {(name, *kind) for name in ours for kind in kinds}
    on_hidden = {(row["impl"], row["K"]) for row in rows if row["op"] != "loss"}
    assert on_hidden >= {(name, k) for name in ("ours", "eager") for k in ("4", "set ≤128")}
    assert all(row["peak MiB"] == 1 for row in rows)
    for row in rows:
        assert row["x eager"] == pytest.approx(
            next(
                o["ms"] for o in rows if o["impl"] == "eager" and kernels._case_of(o) == kernels._case_of(row)
            )
            / row["ms"]
        )
    first, wide = rows[0], next(row for row in rows if row["dtype"] == "fp32")
    assert first["GB/s"] == pytest.approx(1e-9 * 4 * 2 * 300 / (1e-3 * first["ms"]))
    assert first["%copy"] == pytest.approx(100 * first["GB/s"] / document["machine"]["copy"])
    assert wide["GB/s"] == pytest.approx(1e-9 * 8 * 2 * 300 / (1e-3 * wide["ms"]))
    assert (first["B/logit"], wide["B/logit"]) == ("4-6", "8-12")
    assert files["csv"].read_text().count("\n") == 1 + len(rows)
    assert files["plot"].stat().st_size > 1000


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_tile_configurations_are_compared_and_the_best_is_named(
    stand_in: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "tiles.json"
    assert kernels.main(["--tiles", "--shape", "2x300", "--k", "4", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["impl"] for row in rows] == list(launch.CONFIGURATIONS)
    best = min(rows, key=lambda row: row["ms"])["impl"]
    assert f"best at 2 x 300, K = 4: {best}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--shape", "8192"], "'8192' is not TxV"),
        (["--k", "-3"], "'-3' is not a count"),
        (["--only", "ours,mine"], "'mine' is none of ours, ours-buffer"),
        (["--json", "nowhere/at/all.json"], "there is no directory for nowhere/at/all.json"),
    ],
)
def test_arguments_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        kernels.main(arguments)
    assert message in capsys.readouterr().err


def test_more_candidates_than_ids_are_skipped_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", DEVICE, "--quick", "--shape", "2x20", "--k", "30", "--hidden", "0"]
    assert kernels.main(arguments) == 0
    assert "skipped: a vocabulary of 20 has no 30 candidates" in capsys.readouterr().out


@pytest.mark.parametrize("k,support", [(0, False), (9, False), (9, True)])
def test_the_plain_loss_is_the_same_loss(k: int, support: bool) -> None:
    """Otherwise the speed-ups would compare different things."""
    case = cases.make_case(7, 60, k, support, "cpu", torch.float32)
    results = []
    for loss in (
        plain.plain_loss(case.record, case.advantages),
        lambda z: oc.policy_loss(z, case.record, case.advantages, correction=case.correction).loss,
    ):
        leaf = case.logits.clone().requires_grad_()
        value = loss(leaf)
        results.append((value.detach(), *torch.autograd.grad(value, leaf)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


ON_CPU = ("liger", "torch-chunks")  # the others need a GPU, or what the interpreter lacks


@pytest.mark.parametrize("name", ["liger", "quack", "quack-1read"])
def test_peers_compute_the_gradient_that_they_are_taken_for(name: str) -> None:
    """Cross-entropy of the sampled tokens, from logits; where they are installed."""
    if DEVICE == "cpu" and name not in ON_CPU:
        pytest.skip("needs a GPU")
    case = cases.make_case(8, 304, 4, False, DEVICE)
    leaf = case.logits.float().requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(leaf, case.record.tokens), leaf)
    try:
        gradient = kernels.ON_LOGITS[name].build(case)()[-1].float()
    except peers.Skip as reason:
        pytest.skip(str(reason))
    if name == "quack-1read":  # of the sum, not of the mean
        gradient = gradient / 8
    torch.testing.assert_close(gradient, expected, rtol=0.02, atol=1e-4)
    overwritten = not torch.equal(case.logits, case.source)
    assert overwritten == kernels.ON_LOGITS[name].overwrites


@pytest.mark.parametrize("name", ["torch-chunks", "cce", "liger", "quack"])
def test_fused_peers_compute_the_gradients_that_they_are_taken_for(name: str) -> None:
    if DEVICE == "cpu" and name not in ON_CPU:
        pytest.skip("needs a GPU")
    hidden = cases.make_hidden_case(cases.make_case(64, 512, 4, False, DEVICE), 64)
    leaves = [t.float().requires_grad_() for t in (hidden.hidden, hidden.weight)]
    loss = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].T, hidden.case.record.tokens)
    expected = torch.autograd.grad(loss, leaves)
    try:
        gradients = kernels.ON_HIDDEN[name](hidden)()
    except peers.Skip as reason:
        pytest.skip(str(reason))
    for ours, exact in zip(gradients, expected, strict=True):
        assert (ours.float() - exact).norm() < 0.02 * exact.norm()


def test_a_peer_that_is_not_installed_is_told_from_one_that_lacks_something() -> None:
    with pytest.raises(peers.Skip, match="no-such-peer is not installed"):
        peers._installed("no_such_peer.part", "no-such-peer")
    with pytest.raises(peers.Skip, match=r"torch lacks torch\.no_such_part"):
        peers._installed("torch.no_such_part", "torch")


def test_static_figures_are_labeled_as_predicted(tmp_path: Path) -> None:
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
