"""Faults that other kernels had, each by the smallest input that shows it.

12 and 17 are in `test_aot`, 19 is in `test_kernels_capture`.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from offpolicy_corr.kernels import launch
from torch import Tensor

import offpolicy_corr as oc
from offpolicy_corr import backend, lm_head
from on_device import DEVICE, MARKS, assert_same, loss_and_gradient, moved
from support import Problem

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SHORT", launch.Tiles(256, 8, 4))


def rows(
    logits: Tensor, tokens: list[int], k: int = 3, temperature: float | Tensor = 1.0
) -> oc.SamplerRecord:
    """A record whose heads are the top ``k`` of slightly different logits, the sampled tokens anywhere."""
    size, vocab = logits.shape
    noise = 0.1 * torch.randn(size, vocab, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logq = (logits.double().clamp(min=-1e4) + noise).log_softmax(1)
    top = logq.topk(k, 1)
    sampled = torch.tensor(tokens)
    candidates = oc.CandidateSet.from_topk(top.indices, top.values)
    return oc.SamplerRecord(sampled, logq.gather(1, sampled[:, None]).squeeze(1), candidates, temperature)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("level", [0.0, -200.0])
def test_fault_1_a_first_tile_of_minus_infinity(level: float) -> None:
    logits = randn(2, 1000) + level  # far below zero, rescaling nothing by 2^288 would be inf · 0
    logits[:, :256] = -torch.inf
    for options in ({}, {"entropy_coef": 0.2}):
        assert_same(logits, rows(logits, [300, 999]), torch.ones(2), **options)


@pytest.mark.parametrize("mask", [-1e9, -1e30, -1e37, -1e38, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_fault_1_large_negative_numbers_mask_as_minus_infinity_does(mask: float, temperature: float) -> None:
    """Lanes and tiles that hold nothing else, in front of the allowed ids and behind them."""
    logits = torch.full((2, 1000), mask)
    logits[0, 400:404], logits[1, [0, 600, 999]] = randn(4), randn(3)
    record = rows(logits, [400, 600], temperature=temperature)
    for options in ({}, {"entropy_coef": 0.2}):
        assert_same(logits, record, torch.ones(2), **options)


def test_fault_2_a_row_with_no_finite_logit_is_named_and_its_neighbor_untouched() -> None:
    logits = randn(2, 300)
    logits[0] = -torch.inf
    record = moved(rows(logits, [5, 6]))
    spoiled, advantages = logits.to(DEVICE), torch.ones(2, device=DEVICE)
    with pytest.raises(ValueError, match=r"token 0 is not finite.*none of them is finite"):
        oc.policy_loss(spoiled, record, advantages, backend="triton")
    out, gradient = loss_and_gradient(spoiled, record, advantages, "triton", reduction="none", validate=False)
    clean, expected = loss_and_gradient(
        spoiled[1:],
        record.select(torch.tensor([1], device=DEVICE)),
        advantages[1:],
        "triton",
        reduction="none",
    )
    assert not out.loss[0].isfinite()
    assert torch.equal(out.loss[1:], clean.loss) and torch.equal(gradient[1:], expected)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_fault_3_one_nan_is_never_swallowed(bad: float, entropy_coef: float) -> None:
    logits = randn(1, 1000)
    record = moved(rows(logits, [5]))
    logits[0, 700] = bad
    for correction in (oc.Correction(), oc.Correction(oc.MaskedIS(0.9, 0.9), center=False)):
        out = oc.policy_loss(
            logits.to(DEVICE), record, torch.ones(1, device=DEVICE), correction=correction,
            entropy_coef=entropy_coef, backend="triton", validate=False,
        )  # fmt: skip
        assert out.loss.isnan()


def test_fault_4_logits_far_below_zero() -> None:
    logits = randn(1, 64) - 120.0
    assert_same(logits, rows(logits, [3]), torch.ones(1))


@pytest.mark.parametrize("layout", ["transposed", "middle", "every second column", "offset base"])
@pytest.mark.parametrize("inplace", [False, True])
def test_fault_5_any_strides(layout: str, inplace: bool) -> None:
    values = randn(4, 300)
    if layout == "transposed":
        strided = values.t().contiguous().t()
    elif layout == "middle":
        strided = values.view(2, 2, 300)[:, 1]
    elif layout == "every second column":
        strided = values.repeat_interleave(2, 1)[:, ::2]
    else:
        strided = torch.cat([torch.zeros(3), values.flatten()])[3:].view(4, 300)
    size = strided.shape[0]
    assert layout == "offset base" or not strided.is_contiguous()
    assert_same(strided, rows(strided, [1, 2, 3, 299][:size]), torch.ones(size), inplace=inplace)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_fault_5_rows_that_share_memory_are_not_written_over(name: str, reduction: str) -> None:
    """A row would be read after another row's gradient had been written to it."""
    logits = randn(1, 300).expand(3, 300)
    record = rows(logits, [1, 2, 3])
    shared, advantages = randn(1, 300).to(DEVICE).requires_grad_().exp().expand(3, 300), torch.ones(3)
    options: dict[str, Any] = {"reduction": reduction, "backend": name}
    with pytest.raises(ValueError, match="share memory: use inplace=False"):
        out = oc.policy_loss(shared, moved(record), advantages.to(DEVICE), inplace=True, **options)
        out.loss.sum().backward()
    assert_same(logits, record, advantages, reduction=reduction)


def test_fault_6_expanded_and_strided_upstream_gradients() -> None:
    logits = randn(4, 300).to(DEVICE)
    record = moved(rows(logits.cpu(), [1, 2, 3, 4]))
    _, whole = loss_and_gradient(logits, record, torch.ones(4, device=DEVICE), "triton", reduction="none")
    leaf = logits.detach().requires_grad_()
    out = oc.policy_loss(leaf, record, torch.ones(4, device=DEVICE), backend="triton", reduction="none")
    out.loss[::2].sum().backward()
    assert torch.equal(leaf.grad[::2], whole[::2]) and (leaf.grad[1::2] == 0).all()

    leaf = logits.detach().requires_grad_()
    logp, candidate_logp, _ = oc.selected_logprobs(leaf, record.tokens, record.candidates, backend="triton")
    (logp[::2].sum() + candidate_logp.sum()).backward()
    wide = logits.detach().double().requires_grad_()
    logp, candidate_logp, _ = oc.selected_logprobs(wide, record.tokens, record.candidates, backend="torch")
    (logp[::2].sum() + candidate_logp.sum()).backward()
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)


def test_fault_7_each_token_s_upstream_factor_reaches_the_weight_s_gradient() -> None:
    states, head = randn(3, 8, seed=1), randn(300, 8, seed=2)
    logits = states @ head.T
    record, factor = moved(rows(logits, [1, 2, 3])), torch.tensor([1.0, 0.0, 3.0], device=DEVICE)
    grads = []
    for name, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        weight = head.detach().to(DEVICE, dtype).requires_grad_()
        out = oc.policy_loss_from_hidden(
            states.to(DEVICE, dtype),
            weight,
            record,
            torch.ones(3, device=DEVICE),
            reduction="none",
            backend=name,
        )
        (out.loss * factor).sum().backward()
        grads.append(weight.grad.double())
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000])
def test_fault_8_a_vocabulary_of_any_size(vocab: int) -> None:
    logits = randn(2, vocab)
    assert_same(logits, rows(logits, [0, vocab - 1], k=min(3, vocab)), torch.ones(2))


def test_fault_8_padding_columns_hold_anything() -> None:
    logits = torch.full((2, 1000), 50.0)
    logits[0, 990:] = torch.nan
    logits[:, :990] = randn(2, 990)
    record = rows(logits[:, :990], [0, 989])
    for inplace in (False, True):
        gradient = assert_same(logits, record, torch.ones(2), inplace=inplace, vocab_size=990)
        assert (gradient[:, 990:] == 0).all()


class Grids:
    """Stands in for a kernel and notes the grids that it is launched on."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.seen.append(grid)
        return lambda *args, **kwargs: None


def test_fault_9_rows_are_on_the_one_axis_of_a_grid_that_takes_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others end at 65,535."""
    from offpolicy_corr.kernels import rescale, triton_logprobs, triton_loss, vocab_parallel

    grids, size = Grids(), 65_536
    launches = (
        (triton_loss, "fused_loss"),
        (triton_logprobs, "row_gradient"),
        (rescale, "scale_rows"),
        (vocab_parallel, "row_stats"),
    )
    for module, name in launches:
        monkeypatch.setattr(module, name, grids)
    logits = torch.zeros(size, 4, device=DEVICE).requires_grad_()
    tokens = torch.zeros(size, dtype=torch.int64, device=DEVICE)
    record = oc.SamplerRecord(tokens, torch.zeros(size, device=DEVICE))
    options = {"backend": "triton", "validate": False}
    oc.policy_loss(
        logits, record, torch.ones(size, device=DEVICE), correction=oc.Correction.from_name("is"), **options
    )
    oc.selected_logprobs(logits, tokens, **options)[0].sum().backward()
    rescale.scale_(logits.detach(), torch.ones(size, device=DEVICE))
    assert grids.seen == [(size,)] * len(launches)


def test_fault_10_a_second_reader_of_logits_written_in_place_is_refused() -> None:
    leaf = randn(2, 300).to(DEVICE).requires_grad_()
    record = moved(rows(leaf.detach().cpu(), [1, 2]))
    logits = leaf * 1.0
    other = logits.logsumexp(-1).mean()
    out = oc.policy_loss(logits, record, torch.ones(2, device=DEVICE), backend="triton", inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (out.loss + other).backward()


CHILD = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
import offpolicy_corr as oc
stride = 2**30 + 16
file = torch.from_file(sys.argv[1], shared=True, size=2 * stride + 64, dtype=torch.bfloat16)
logits = file.as_strided((3, 64), (stride, 1))
torch.manual_seed(0)
values = torch.randn(3, 64).bfloat16()
for row in range(3):
    logits[row] = values[row]
record = oc.SamplerRecord(torch.tensor([1, 2, 3]), torch.full((3,), -4.0))
options = dict(correction=oc.Correction.from_name("is"), reduction="sum", validate=False)
far = oc.policy_loss(logits.detach().requires_grad_(), record, torch.ones(3), backend="triton", inplace=True, **options)
near = oc.policy_loss(values.requires_grad_(), record, torch.ones(3), backend="triton", **options)
assert torch.equal(far.loss, near.loss)
near.loss.backward()
assert torch.equal(logits, values.grad), (logits[2], values.grad[2])
print("equal")
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="a sparse file stands in for memory that a GPU has")
def test_fault_11_rows_that_start_beyond_two_to_the_31(tmp_path: Path) -> None:
    """In a child: with 32-bit offsets it dies of a segmentation fault. The file is sparse: 12 KB on disk."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "logits")], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "equal\n", done.stderr[-2000:]


def test_fault_13_every_token_masked() -> None:
    logits = torch.full((3, 300), torch.nan, device=DEVICE)
    record = moved(rows(randn(3, 300), [1, 2, 3]))
    out, gradient = loss_and_gradient(
        logits, record, torch.ones(3, device=DEVICE), "triton", loss_mask=torch.zeros(3, device=DEVICE)
    )
    assert out.loss == 0 and out.loss.requires_grad and (gradient == 0).all()


def test_fault_14_autocast_with_fp32_parameters() -> None:
    states, head = randn(4, 8, seed=1).to(DEVICE), randn(300, 8, seed=2).to(DEVICE)
    record = moved(rows((states @ head.T).cpu(), [1, 2, 3, 4]))
    weight = head.clone().requires_grad_()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        logits = states @ weight.T
        assert logits.dtype == torch.bfloat16
        oc.policy_loss(logits, record, torch.ones(4, device=DEVICE), backend="triton").loss.backward()
        dense, weight.grad = weight.grad, None
        oc.policy_loss_from_hidden(
            states, weight, record, torch.ones(4, device=DEVICE), backend="triton"
        ).loss.backward()
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, dense, rtol=0.1, atol=0.02)


def test_fault_15_a_second_derivative_is_refused() -> None:
    leaf = randn(2, 300).to(DEVICE).requires_grad_()
    record = moved(rows(leaf.detach().cpu(), [1, 2]))
    out = oc.policy_loss(leaf, record, torch.ones(2, device=DEVICE), backend="triton")
    (gradient,) = torch.autograd.grad(out.loss * leaf.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_fault_16_the_gradient_of_a_confident_token_survives_bf16() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 7] = 13.0  # p_y rounds to 1 in bf16, p_y − 1 must not round to 0
    low = logits.bfloat16().to(DEVICE)
    record = oc.SamplerRecord(torch.tensor([7], device=DEVICE), torch.zeros(1, device=DEVICE))
    options = {"correction": oc.Correction.from_name("none")}
    _, ours = loss_and_gradient(low, record, torch.ones(1, device=DEVICE), "triton", inplace=True, **options)
    _, exact = loss_and_gradient(low.double(), record, torch.ones(1, device=DEVICE), "torch", **options)
    assert abs(ours[0, 7] / exact[0, 7] - 1) < 2**-7


def test_fault_18_the_weight_s_gradient_is_summed_in_fp32_over_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states, head = randn(1, 8, seed=1).repeat(64, 1).bfloat16(), randn(32, 8, seed=2).bfloat16()
    record = moved(rows((states @ head.T).float(), [1] * 64))
    grads = []
    for size in (64, 1):
        monkeypatch.setattr(lm_head, "_ROWS", size)
        weight = head.detach().to(DEVICE).requires_grad_()
        oc.policy_loss_from_hidden(
            states.to(DEVICE), weight, record, torch.ones(64, device=DEVICE), backend="triton"
        ).loss.backward()
        grads.append(weight.grad.float())
    scale = grads[0].abs().max()
    assert (grads[0] - grads[1]).abs().max() <= 2**-8 * scale  # one rounding at the end


def test_fault_20_chunks_are_large_enough_for_matrix_products() -> None:
    assert lm_head._ROWS >= 1024


def test_fault_21_a_duplicate_candidate_is_refused_and_a_sampled_candidate_is_folded_in() -> None:
    logits = randn(1, 300)
    twice = oc.CandidateSet.from_topk(torch.tensor([[5, 5, 7]]), torch.tensor([[-2.0, -2.0, -3.0]]))
    record = oc.SamplerRecord(torch.tensor([5]), torch.tensor([-2.0]), twice)
    with pytest.raises(oc.RecordError, match="stands twice"):
        oc.policy_loss(logits.to(DEVICE), moved(record), torch.ones(1, device=DEVICE), backend="triton")
    once = oc.CandidateSet.from_topk(torch.tensor([[5, 7]]), torch.tensor([[-2.0, -3.0]]))
    assert_same(logits, replace(record, candidates=once), torch.ones(1))


@pytest.mark.parametrize("name", ["sc", "sc+mis", "sc+tis", "sc+clamp", "sc+ppo"])
def test_fault_22_a_partial_head_and_a_temperature(name: str) -> None:
    logits = randn(2, 40)
    record = rows(logits / 0.7, [1, 2], k=5, temperature=0.7)
    gradient = assert_same(
        logits, record, torch.tensor([1.0, -2.0]), correction=oc.Correction.from_name(name)
    )
    torch.testing.assert_close(gradient.sum(1), torch.zeros(2, device=DEVICE), atol=1e-6, rtol=0)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_poison_reaches_nothing_and_nothing_outside_is_touched(garbage: float) -> None:
    """Outputs filled with NaN, margins with a canary, masked rows with garbage in every field."""
    problem = Problem(size=4, vocab=300, kind="mixed", seed=5)
    mask = torch.tensor([True, False, True, False])
    candidates, own = problem.candidates, mask[problem.candidates.rows]
    candidates = replace(
        candidates,
        ids=torch.where(own, candidates.ids, -1),
        logprobs=torch.where(own, candidates.logprobs, garbage),
    )
    record = problem.record()
    record = oc.SamplerRecord(
        torch.where(mask, record.tokens, -1), torch.where(mask, record.logprobs, garbage), candidates,
        torch.where(mask, problem.temperature, garbage),
    )  # fmt: skip
    canary = 77.0
    room = torch.full((6, 340), canary, device=DEVICE)
    logits = room[1:5, 20:320]
    logits.copy_(torch.where(mask[:, None], problem.logits.float(), garbage))
    advantages = torch.where(mask, problem.advantages, garbage).to(DEVICE)
    _, expected = loss_and_gradient(
        logits.clone(), moved(record), advantages, "triton", loss_mask=mask.to(DEVICE)
    )
    assert expected.isfinite().all() and (expected[1] == 0).all() and (expected[3] == 0).all()
    inner = logits.detach().requires_grad_()
    out = oc.policy_loss(
        inner, moved(record), advantages, backend="triton", inplace=True, loss_mask=mask.to(DEVICE)
    )
    assert torch.equal(logits, expected)
    outside = torch.ones_like(room, dtype=torch.bool)
    outside[1:5, 20:320] = False
    assert (room[outside] == canary).all()
    for name, values in vars(out.diagnostics).items():
        assert (values[~mask.to(DEVICE)] == 0).all(), name


def test_poisoned_buffers_are_written_everywhere() -> None:
    from offpolicy_corr.correction import Correction
    from offpolicy_corr.loss_inputs import LossConfig, LossInputs, LossProblem, VocabShard

    problem = Problem(size=4, vocab=300, kind="mixed", seed=5)
    record = moved(problem.record())
    inputs = LossInputs(
        record.tokens, record.logprobs, problem.advantages.to(DEVICE), torch.ones(4, device=DEVICE),
        record.temperature, record.candidates,
    )  # fmt: skip
    loss_problem = LossProblem(inputs, None, LossConfig(Correction()), VocabShard(0, 290, 290))
    logits = problem.logits.float().to(DEVICE)
    loss_problem.inputs.candidates.ids.clamp_(max=289)
    gradient = torch.full_like(logits, torch.nan)
    results = backend.loss_and_grad("triton")(logits, loss_problem, gradient)
    assert gradient.isfinite().all() and (gradient[:, 290:] == 0).all()
    assert results[:, :].isfinite().all()
