"""The Miles adapter on the fused kernels: the core's fp64 result, in place and not."""

from __future__ import annotations

import pytest
import torch
from offpolicy_corr.integrations.miles import policy_loss

import miles_double as double
import offpolicy_corr as oc
from on_device import DEVICE, MARKS

pytest.importorskip("triton")

pytestmark = MARKS

FILTERS = {"rollout_top_p": 0.9, "rollout_top_k": 6}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("form", ["thd", "bshd"])
@pytest.mark.parametrize(
    "name, candidates", [("sc+mis", "heads"), ("sc+mis", "supports"), ("mis", "ids"), ("sc", "heads")]
)
def test_fused_kernels_serve_the_adapter(name: str, candidates: str, form: str, inplace: bool) -> None:
    problem = double.make_problem(seed=3, dtype=torch.float32)
    own = {"correction": name, "backend": "triton", "inplace_logits": inplace}
    filters = {} if candidates == "heads" else FILTERS
    args = double.make_args(qkv_format=form, vocab_size=problem.vocab, offpolicy_corr=own, **filters)
    state = double.single()
    double.install(state)
    leaves = double.make_leaves(problem)
    batch = double.make_batch(problem, args, state, candidates)
    for key in ("unconcat_tokens", "loss_masks", "rollout_log_probs", "advantages"):
        batch[key] = [value.to(DEVICE) for value in batch[key]]
    logits = double.local_logits(problem, leaves, args, state, pad_columns=9).to(DEVICE) * 1.0
    loss, metrics = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    loss.backward()
    want, gradients, _ = double.expected(problem, args, candidates, correction=oc.Correction.from_name(name))
    torch.testing.assert_close(loss.detach().cpu().double(), want, rtol=1e-5, atol=1e-5)
    for leaf, reference in zip(leaves, gradients, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.double(), reference, rtol=1e-4, atol=1e-6)
    assert all(bool(value.isfinite()) for value in metrics.values())


def test_a_capped_kl_has_no_gradient_on_the_kernels_either() -> None:
    problem = double.make_problem(seed=7, dtype=torch.float32)
    problem.reference = [torch.full_like(values, -0.01) for values in problem.reference]
    own = {"correction": "mis", "backend": "triton"}
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl"}
    args, state = double.make_args(vocab_size=problem.vocab, offpolicy_corr=own, **kl), double.single()
    double.install(state)
    leaves = double.make_leaves(problem)
    batch = double.make_batch(problem, args, state, "none")
    logits = double.local_logits(problem, leaves, args, state).to(DEVICE)
    loss, _ = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    loss.backward()
    core = {
        "kl_coef": 0.3,
        "kl_estimator": "low_var_kl",
        "ref_logprobs": torch.cat(problem.reference).double(),
    }
    correction = oc.Correction.from_name("mis")
    want, gradients, out = double.expected(problem, args, "none", correction=correction, **core)
    assert float(out.diagnostics.logprobs.min()) < -2.7  # k3 beyond its cap of 10
    torch.testing.assert_close(loss.detach().cpu().double(), want, rtol=1e-5, atol=1e-5)
    for leaf, reference in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(leaf.grad.double(), reference, rtol=1e-4, atol=1e-6)
