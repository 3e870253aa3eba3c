"""What `policy_loss` keeps between forward and backward: the logits, and nothing else of their size."""

from __future__ import annotations

import pytest
import torch
from offpolicy_corr.integrations.miles import policy_loss

import miles_double as double
from offpolicy_corr import torch_loss
from test_memory import Allocations

SIZE, VOCAB = 64, 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_nothing_is_kept_and_the_gradient_is_made_once(
    dtype: torch.dtype, inplace: bool, per_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_loss, "_BLOCK_ON_CPU", 4 * VOCAB)
    monkeypatch.setattr(torch_loss, "_TILE_ON_CPU", 2 * VOCAB)
    problem = double.make_problem(prompts=(4,), responses=(SIZE - 4,), vocab=VOCAB, dtype=dtype)
    own = {"inplace_logits": inplace, "guards": {"geometric_mean": {"low": 0.0, "high": 9.0}}}
    args = double.make_args(offpolicy_corr=own, entropy_coef=0.1, calculate_per_token_loss=per_token)
    state = double.single()
    double.install(state)
    batch = double.make_batch(problem, args, state)
    leaf = double.local_logits(problem, problem.logits, args, state)[:, :SIZE].contiguous().requires_grad_()
    logits = leaf.view(1, SIZE, VOCAB)
    reducer = double.make_reducer(batch, args, state, problem)
    with Allocations() as seen:
        loss, _ = policy_loss(args, batch, logits, reducer)
        large = lambda: sum(n >= SIZE * VOCAB for ptr, n in seen.storages.items() if ptr != leaf.data_ptr())
        assert large() == 0
        (loss / 7).backward()
        assert large() == (0 if inplace else 1)
