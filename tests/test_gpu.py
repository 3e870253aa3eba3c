"""What only a GPU can show. ``pytest -m gpu`` runs these, and the kernel tests on the device instead of interpreted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

import offpolicy_corr as oc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
OPTIONS = {"backend": "triton", "validate": False}


def case(tokens: int, vocab: int, k: int, support: bool = False, dtype: torch.dtype = torch.bfloat16):
    from offpolicy_corr.benchmarks.cases import make_case

    return make_case(tokens, vocab, k, support, "cuda", dtype)


def gradient(logits: torch.Tensor, made, **options):
    leaf = logits.detach().requires_grad_()
    out = oc.policy_loss(leaf, made.record, made.advantages, **OPTIONS | options)
    return out, torch.autograd.grad(out.loss, leaf)[0]


@pytest.mark.parametrize("support", [False, True])
@pytest.mark.parametrize("vocab", [151_936, 248_320, 50_257])
def test_model_shapes_round_to_nearest_and_match_fp64(vocab: int, support: bool) -> None:
    made = case(64, vocab, 128, support)
    for name in ("sc", "sc+mis", "sc+tis", "sc+clamp", "sc+ppo"):
        correction = oc.Correction.from_name(name)
        _, ours = gradient(made.logits, made, correction=correction, reduction="sum")
        _, exact = gradient(
            made.logits.double(), made, correction=correction, reduction="sum", backend="torch"
        )
        error = (ours.double() - exact).abs()
        assert (error <= 2**-8 * exact.abs() + 1e-5).all(), (name, error.max())


def test_auto_takes_the_kernels() -> None:
    from offpolicy_corr import backend

    assert backend.choose("auto", torch.zeros(1, 1, device="cuda")) == "triton"


def test_fault_17_a_hundred_runs_are_bitwise_equal() -> None:
    made = case(256, 151_936, 128)
    _, first = gradient(made.logits, made)
    for _ in range(100):
        leaf = made.logits.clone().requires_grad_()
        out = oc.policy_loss(leaf, made.record, made.advantages, inplace=True, **OPTIONS)
        assert torch.equal(torch.autograd.grad(out.loss, leaf)[0], first)


def test_fault_11_rows_beyond_two_to_the_31_elements() -> None:
    rows = 2**31 // 151_936 + 64
    logits = torch.zeros(rows, 151_936, dtype=torch.bfloat16, device="cuda")
    logits[-1] = torch.randn(151_936, device="cuda")
    record = oc.SamplerRecord(torch.full((rows,), 7, device="cuda"), torch.full((rows,), -9.0, device="cuda"))
    options = {"correction": oc.Correction.from_name("is"), "reduction": "sum"} | OPTIONS
    tail = record.select(torch.tensor([rows - 1], device="cuda"))
    expected = oc.policy_loss(logits[-1:].clone(), tail, torch.ones(1, device="cuda"), **options)
    leaf = logits.requires_grad_()
    out = oc.policy_loss(leaf, record, torch.ones(rows, device="cuda"), inplace=True, **options)
    assert torch.equal(out.diagnostics.logprobs[-1:], expected.diagnostics.logprobs)


@pytest.mark.parametrize("entrance", ["loss", "pair"])
def test_fault_19_a_step_is_captured_in_a_graph_and_replayed(entrance: str) -> None:
    made = case(128, 32_000, 32)
    leaf = made.logits.clone().requires_grad_()

    def step() -> torch.Tensor:
        if entrance == "loss":
            loss = oc.policy_loss(leaf, made.record, made.advantages, **OPTIONS).loss
        else:
            loss = oc.selected_logprobs(leaf, made.record.tokens, made.record.candidates, **OPTIONS)[0].sum()
        return torch.autograd.grad(2.0 * loss, leaf)[0]

    torch.cuda.set_sync_debug_mode("error")
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            expected = step().clone()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    assert torch.equal(captured, expected)


def test_extra_memory_is_tokens_times_candidates() -> None:
    made = case(2048, 151_936, 128)
    leaf = made.logits.requires_grad_()
    oc.policy_loss(leaf, made.record, made.advantages, inplace=True, **OPTIONS)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = oc.policy_loss(leaf, made.record, made.advantages, inplace=True, **OPTIONS)
    torch.autograd.grad(out.loss, leaf)
    assert torch.cuda.max_memory_allocated() - before < 64 * 2048 * 128


def test_three_quarters_of_the_copy_bandwidth() -> None:
    """At 8,192 × 151,936, K = 128, bf16, in place, counting 4 bytes per logit."""
    from offpolicy_corr.benchmarks import peers, timing

    made, machine = case(8192, 151_936, 128), timing.OnGpu()
    step = peers.ON_LOGITS["ours"].build(made)
    seconds = timing.timed(machine, step, 20, made.restore).median
    assert 4e-9 * made.logits.numel() / seconds > 0.75 * timing.measure(machine, 20).copy


def configurations() -> list[str]:
    from offpolicy_corr.kernels import launch

    return list(launch.CONFIGURATIONS)


@pytest.mark.parametrize("support", [False, True], ids=["heads", "supports"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", configurations())
def test_every_tile_configuration_gives_the_reference_s_gradient(
    name: str, dtype: torch.dtype, support: bool
) -> None:
    """Whole tiles, a partial one, several of candidates; in place, 20 runs bitwise equal."""
    from offpolicy_corr.benchmarks.tile_choice import using_tiles
    from offpolicy_corr.kernels import launch

    for vocab in (151_936, 40_000, 999):
        made = case(32, vocab, 200, support, dtype)
        options = {"correction": oc.Correction(oc.Unweighted()), "reduction": "sum", "entropy_coef": 0.01}
        _, exact = gradient(made.logits.double(), made, **options, backend="torch")
        with using_tiles(launch.CONFIGURATIONS[name]):
            for run in range(20):
                made.restore()
                _, ours = gradient(made.logits, made, **options, inplace=True)
                if run == 0:
                    first = ours.clone()
                assert torch.equal(ours, first)
        rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
        error = (first.double() - exact).abs()
        assert (error <= rounding * exact.abs() + 1e-5).all(), (vocab, error.max())


# a shape with whole tiles, a partial one, and several of candidates; in place with a factor, then forward and backward
EVERY_KERNEL = """
import torch, offpolicy_corr as oc
from offpolicy_corr.benchmarks.cases import make_case
for support in (False, True):
    made = make_case(8, 20_000, 200, support, "cuda")
    leaf = made.logits.requires_grad_()
    logp, head, entropy = oc.selected_logprobs(leaf, made.record.tokens, made.record.candidates, backend="triton")
    (logp.sum() + head.sum() + entropy.sum()).backward()
    out = oc.policy_loss(leaf, made.record, made.advantages, backend="triton", inplace=True, entropy_coef=0.1)
    (3.0 * out.loss).backward()
torch.cuda.synchronize()
"""


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_compute_sanitizer_is_clean(tool: str) -> None:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable]
    done = subprocess.run(
        [*command, "-c", EVERY_KERNEL],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
