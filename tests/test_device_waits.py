"""How often a validated call waits for the device: counted on a GPU that has shapes and no values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import offpolicy_corr as oc
from fake_cuda import allow_fake_devices, fake_cuda
from on_device import MARKS

pytestmark = MARKS
T, V, K = 6, 40, 4


@pytest.fixture(autouse=True, scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    allow_fake_devices(tmp_path_factory.mktemp("guard"))
    with fake_cuda():
        yield


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every tensor whose values were read on the host; anything but ``tolist`` raises on a fake tensor."""
    read: list[Tensor] = []

    def nothing_is_wrong(tensor: Tensor) -> list[int]:
        read.append(tensor)
        return [0] * tensor.numel()

    monkeypatch.setattr(FakeTensor, "tolist", nothing_is_wrong)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return read


def on_gpu(value: Any, *shape: int) -> Tensor:
    return torch.full(shape, value, device="cuda")


def record_of(kind: str) -> oc.SamplerRecord:
    offsets = torch.arange(T + 1, device="cuda") * K
    candidates = oc.CandidateSet(
        on_gpu(1, T * K), on_gpu(-2.0, T * K), offsets, on_gpu(kind == "supports", T)
    )
    group, version = on_gpu(0, T), on_gpu(3, T)
    return oc.SamplerRecord(
        on_gpu(1, T), on_gpu(-2.0, T), candidates, on_gpu(0.7, T), group, ("a",), weight_version=version
    )


@pytest.mark.parametrize("kind", ["heads", "supports"])
@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "none"])
def test_a_validated_loss_waits_twice(kind: str, reduction: str, waits: list[Tensor]) -> None:
    logits = torch.empty(T, V, dtype=torch.bfloat16, device="cuda").requires_grad_()
    oc.policy_loss(
        logits, record_of(kind), on_gpu(1.0, T), loss_mask=on_gpu(1, T), sequence_ids=on_gpu(0, T),
        sequence_keep=on_gpu(True, 1), kl_coef=0.1, ref_logprobs=on_gpu(-1.0, T), reduction=reduction,
        backend="triton",
    )  # fmt: skip
    assert len(waits) == 2


def test_validated_log_probs_wait_once_and_nothing_waits_without_validation(waits: list[Tensor]) -> None:
    logits = torch.empty(T, V, dtype=torch.bfloat16, device="cuda").requires_grad_()
    record = record_of("heads")
    oc.selected_logprobs(logits, record.tokens, record.candidates, 0.7, backend="triton")
    assert len(waits) == 1
    oc.policy_loss(logits, record, on_gpu(1.0, T), backend="triton", validate=False)
    assert len(waits) == 1


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_backward_pass_keeps_the_backend_of_the_forward_pass(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offpolicy_corr.kernels import rescale

    from offpolicy_corr.autograd import PrecomputedGrads

    launched: list[Tensor] = []
    monkeypatch.setattr(rescale, "scale_", lambda gradient, factor: launched.append(gradient) or gradient)
    gradient = on_gpu(1.0, T, V)
    (scaled,) = PrecomputedGrads([gradient], [gradient.dtype], backend).times(on_gpu(3.0))
    assert scaled is not None and scaled.shape == gradient.shape
    assert len(launched) == (1 if backend == "triton" else 0)
