"""Fault 19, a hidden wait for the device: whole steps on a GPU that has shapes and no values to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import offpolicy_corr as oc
from fake_cuda import NoTransfers, allow_fake_devices, fake_cuda, gradients
from offpolicy_corr.lm_head import LMHead, LMHeadGradients, loss_on_vocabulary
from offpolicy_corr.loss_inputs import LossConfig, LossInputs, LossProblem, VocabShard
from on_device import MARKS
from support import RULES

pytestmark = MARKS
T, V, K = 6, 40, 4
RECORDS = ("none", "heads", "supports", "mixed", "ids alone")


@pytest.fixture(autouse=True, scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    allow_fake_devices(tmp_path_factory.mktemp("guard"))
    with fake_cuda():
        yield


def like(value: Any, *shape: int) -> Tensor:
    """A tensor on the fake GPU with the dtype that ``value`` has as a tensor."""
    return torch.full(shape, value, device="cuda")


def record_of(kind: str, temperature: bool) -> oc.SamplerRecord:
    candidates = None
    if kind != "none":
        logq = None if kind == "ids alone" else like(-2.0, T * K)
        offsets = torch.arange(T + 1, device="cuda") * K
        complete = like(kind in ("supports", "ids alone"), T)
        candidates = oc.CandidateSet(like(1, T * K), logq, offsets, complete)
    return oc.SamplerRecord(like(1, T), like(-2.0, T), candidates, like(0.7, T) if temperature else 0.7)


def logits(dtype: torch.dtype = torch.bfloat16, padding: int = 0) -> Tensor:
    return torch.empty(T, V + padding, dtype=dtype, device="cuda").requires_grad_()


def loss_and_gradient(z: Tensor, kind: str, temperature: bool = False, **options: Any) -> None:
    leaf = z * 1.0 if options.get("inplace") else z
    options = {"backend": "triton", "validate": False} | options
    out = oc.policy_loss(leaf, record_of(kind, temperature), like(1.0, T), **options)
    (gradient, *_) = gradients(out.loss, like(1.0) if out.loss.dim() == 0 else like(1.0, 1).expand(T), None)
    assert gradient.shape == z.shape and gradient.dtype == z.dtype and gradient.device.type == "cuda"


# Grid: the host's path branches on the kind of record, the mask and the buffer. Of the rule it only asks whether α can
# grow, so every kind meets one rule whose α cannot, and every rule meets the kind that has all branches.
EVERY_KIND = [
    (oc.MaskedIS(), kind, masked, inplace)
    for kind in RECORDS
    for masked in (False, True)
    for inplace in (False, True)
]
EVERY_RULE = [(rule, "mixed", True, False) for rule in RULES if type(rule) is not oc.MaskedIS]


@pytest.mark.parametrize("rule,kind,masked,inplace", EVERY_KIND + EVERY_RULE)
def test_fault_19_every_rule_and_every_kind_of_record(
    rule: oc.WeightRule, kind: str, masked: bool, inplace: bool
) -> None:
    centers = (True, False) if kind not in ("none", "ids alone") else (False,)
    for center in centers:
        loss_and_gradient(
            logits(), kind, temperature=masked, inplace=inplace, correction=oc.Correction(rule, center=center),
            loss_mask=like(True, T) if masked else None,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {"entropy_coef": 0.1},
        {"kl_coef": 0.1, "kl_estimator": "k1"},
        {"kl_coef": 0.1, "entropy_coef": 0.1},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"reduction": "sequence-mean"},
        {"reduction": "sequence-mean", "keep": True, "masked": True},
        {"denominator": "kept"},
        {"denominator": 7.0},
        {"denominator": "tensor"},
        {"padding": 24},
    ],
    ids=str,
)
def test_fault_19_every_option(options: dict[str, Any], dtype: torch.dtype) -> None:
    options = dict(options)
    z = logits(dtype, options.pop("padding", 0))
    if z.shape[1] > V:
        options["vocab_size"] = V
    if "kl_coef" in options:
        options["ref_logprobs"] = like(-2.0, T)
    if options.get("reduction") == "sequence-mean":
        options["sequence_ids"] = like(1, T)
    if options.pop("keep", False):
        options["sequence_keep"] = like(True, 2)
    if options.pop("masked", False):
        options["loss_mask"] = like(1, T)
    if options.get("denominator") == "tensor":
        options["denominator"] = like(7.0)
    loss_and_gradient(z, "mixed", **options)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("kind", RECORDS)
def test_fault_19_log_probs_forward_and_backward(kind: str, masked: bool) -> None:
    z, record = logits(), record_of(kind, masked)
    outputs = oc.selected_logprobs(
        z, record.tokens, record.candidates, record.temperature, loss_mask=like(True, T) if masked else None,
        backend="triton", copy=masked, validate=False,
    )  # fmt: skip
    for upstream in (outputs, (outputs[0], None, None), (None, None, outputs[2])):
        (gradient, *_) = gradients(outputs[0], *upstream)
        assert gradient.shape == z.shape and gradient.dtype == z.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_chunk_of_hidden_states(dtype: torch.dtype) -> None:
    """The products that only a GPU makes: half-precision factors, summed in fp32."""
    record = record_of("none", False)
    ones = like(1.0, T)
    inputs = LossInputs(record.tokens, record.logprobs, ones, ones.double(), record.temperature, None)
    problem = LossProblem(inputs, None, LossConfig(oc.Correction.from_name("mis")), VocabShard(0, V, V))
    states, weight, bias = (
        torch.empty(shape, dtype=dtype, device="cuda") for shape in ((T, 8), (V, 8), (V,))
    )
    lm_head = LMHead(states, weight, bias, 30.0)
    gradients = LMHeadGradients.zeros_for(lm_head, (True, True, True))
    loss_on_vocabulary(lm_head, problem, "triton", torch.arange(T, device="cuda"), gradients)
    assert gradients.weight is not None and gradients.weight.dtype == torch.float32


class Launches(TorchDispatchMode):
    """Notes every operator that a GPU would get a kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace != "prim" and not func.is_view and "empty" not in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_a_step_launches_little_besides_its_own_kernel() -> None:
    """Each launch is microseconds, and the kernel itself about one millisecond."""
    z, record, advantages = logits(), record_of("heads", False), like(1.0, T)
    with Launches() as forward:
        oc.policy_loss(z, record, advantages, backend="triton", validate=False, inplace=True)
    assert forward.names.count("loss") == 1
    assert len(forward.names) <= 16, forward.names


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Rank 1 of two that exchange nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("rule", [oc.MaskedIS(), oc.Unweighted()], ids=["masked", "unweighted"])
def test_fault_19_a_shard_of_the_vocabulary(group: dist.ProcessGroup, rule: oc.WeightRule) -> None:
    z, record = logits(), record_of("mixed", True)
    correction = oc.Correction(rule)
    loss_and_gradient(z, "mixed", process_group=group, vocab_size=2 * V - 3, correction=correction)
    outputs = oc.selected_logprobs(
        z, record.tokens, record.candidates, process_group=group, backend="triton", validate=False
    )
    assert gradients(outputs[0], *outputs)[0].shape == z.shape


def test_what_waits_for_the_device_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above would show nothing."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(DataDependentOutputException):
        loss_and_gradient(logits(), "none", correction=oc.Correction(center=False), validate=True)
    with pytest.raises(DynamicOutputShapeException):
        loss_and_gradient(logits(), "heads", backend="torch", loss_mask=like(True, T))
    with NoTransfers(), pytest.raises(AssertionError, match="moves"):
        like(1.0, T).to("cpu")


def test_validation_is_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="pass validate=False"):
        loss_and_gradient(logits(), "heads", validate=True)
    with pytest.raises(RuntimeError, match="pass validate=False"):
        oc.selected_logprobs(logits(), like(1, T), backend="triton")
