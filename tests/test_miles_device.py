"""The Miles adapter on a GPU that is not there: tensors of the batch and logits on it, arrays of the record not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from offpolicy_corr.integrations.miles import inputs as adapter
from offpolicy_corr.integrations.miles import policy_loss, tis_function
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import miles_double as double
from fake_cuda import allow_fake_devices
from on_device import MARKS

pytest.importorskip("triton")
pytestmark = MARKS


class Gpu(TorchDispatchMode):
    """Within a `FakeTensorMode`: what is on "cuda" is fake, what is on the host real; what moved there comes back."""

    waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        there = any(isinstance(a, FakeTensor) for a in given)
        if not there and not any(isinstance(a, torch.device) and a.type == "cuda" for a in given):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        host = None
        if func._schema.name in ("aten::_to_copy", "aten::detach", "aten::slice", "aten::cat"):
            values = tree_map(lambda a: getattr(a, "host", None) if isinstance(a, FakeTensor) else a, args)
            if all(value is not None for value in tree_leaves(values)):
                with unset_fake_temporarily():
                    host = func(*values, **{k: v for k, v in kwargs.items() if k != "device"})
        if kwargs.get("device") == torch.device("cpu"):
            assert host is not None, f"{func} waits for values that were computed on the GPU"
            self.waits += 1
            return host
        result = func(*args, **kwargs)
        if host is not None:
            result.host = host
        return result


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"correction": "mis", "denominator": "kept"},
        {"groups": ["a", "b"]},
        {"candidates": "supports"},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["thd", "bshd"])
def test_a_call_mixes_no_devices_and_reads_back_masks_and_tokens_alone(
    form: str, own: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_fake_devices(tmp_path)
    ones = lambda reducer, size, dtype, device: torch.ones(size, dtype=dtype, device=device)
    monkeypatch.setattr(adapter, "reducer_weights", ones)  # autograd's engine would ask for a real device
    problem = double.make_problem(dtype=torch.float32)
    more = {"rollout_top_p": 0.9, "rollout_top_k": 6} if own.get("candidates") == "supports" else {}
    if not more:
        more = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coef": 0.01}
    settings = {"backend": "triton", "validate": False, **own}
    args, state = double.make_args(qkv_format=form, offpolicy_corr=settings, **more), double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state, own.get("candidates", "heads"))
    batch["offpolicy_corr_group"] = [np.arange(r) % 2 for r in problem.responses]
    logits: Tensor = double.local_logits(problem, problem.logits, args, state).detach()
    with FakeTensorMode(allow_non_fake_inputs=True), Gpu() as gpu:
        for key in ("unconcat_tokens", "loss_masks", "rollout_log_probs", "advantages", "ref_log_probs"):
            if batch[key] is not None:
                batch[key] = [value.to("cuda") for value in batch[key]]
        loss, metrics = policy_loss(args, batch, logits.to("cuda"), lambda x: x.sum())
    assert gpu.waits == 2, "one for the masks and one for the tokens of all samples"
    assert loss.device.type == "cuda"
    assert all(value.device.type == "cuda" for value in metrics.values())


@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_the_hook_mixes_no_devices_and_waits_for_nothing(denominator: str, tmp_path: Any) -> None:
    allow_fake_devices(tmp_path)
    problem, state = double.make_problem(dtype=torch.float32), double.single()
    own = {"correction": "mis", "denominator": denominator, "validate": False}
    with FakeTensorMode(allow_non_fake_inputs=True), Gpu() as gpu:
        lists = {"train_log_probs": problem.reference, "rollout_log_probs": problem.rollout}
        loss, _, metrics = tis_function(
            double.make_args(offpolicy_corr=own, use_rollout_logprobs=False, use_tis=True),
            pg_loss=torch.ones(sum(problem.responses)).to("cuda"),
            loss_masks=[mask.to("cuda") for mask in problem.masks],
            total_lengths=problem.totals,
            response_lengths=problem.responses,
            parallel_state=state,
            **{key: [value.to("cuda") for value in values] for key, values in lists.items()},
        )
    assert gpu.waits == 0
    assert all(value.device.type == "cuda" for value in (loss, *metrics.values()))
