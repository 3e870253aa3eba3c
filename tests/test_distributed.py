"""Vocabulary-parallel logits and data-parallel denominators, in real gloo processes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import offpolicy_corr as oc
from support import RULES, Problem, gradient_through

VOCAB, TRUE_VOCAB = 16, 13  # four shards of four columns: the vocabulary ends inside the last one


def launch(ranks: int, body: Callable[..., None], *args: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_worker, (ranks, port, body, args), nprocs=ranks)


def _worker(rank: int, ranks: int, port: int, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        body(rank, ranks, *args)
    finally:
        dist.destroy_process_group()


def padded(problem: Problem) -> torch.Tensor:
    extra = torch.full((len(problem.tokens), VOCAB - TRUE_VOCAB), torch.nan, dtype=problem.logits.dtype)
    return torch.cat([problem.logits, extra], 1)


def _losses(rank: int, ranks: int) -> None:
    group = dist.new_group(list(range(ranks)))
    width = VOCAB // ranks
    mask = torch.tensor([True, True, False, True, True, True])
    for seed, kind in enumerate(("head", "support", "mixed")):
        problem = Problem(vocab=TRUE_VOCAB, kind=kind, seed=seed, k=6)
        full = padded(problem)
        for rule in RULES:
            options: dict[str, Any] = {
                "correction": oc.Correction(rule), "loss_mask": mask, "entropy_coef": 0.2,
                "kl_coef": 0.1, "ref_logprobs": torch.linspace(-2, -1, 6), "vocab_size": TRUE_VOCAB,
            }  # fmt: skip
            whole, expected = gradient_through(
                "logits", full, problem.record(), problem.advantages, **options
            )
            shard = full[:, rank * width : (rank + 1) * width]
            for entrance in ("logits", "inplace"):
                out, gradient = gradient_through(
                    entrance, shard, problem.record(), problem.advantages, process_group=group, **options
                )
                torch.testing.assert_close(
                    gradient, expected[:, rank * width : (rank + 1) * width], atol=1e-12, rtol=1e-10
                )
                torch.testing.assert_close(out.loss, whole.loss, atol=1e-12, rtol=1e-10)
                for name, values in vars(out.diagnostics).items():
                    torch.testing.assert_close(values, getattr(whole.diagnostics, name), equal_nan=True)


def _logprobs_and_hidden(rank: int, ranks: int) -> None:
    group = dist.new_group(list(range(ranks)))
    width, problem = VOCAB // ranks, Problem(vocab=TRUE_VOCAB, k=6, seed=5)
    own = slice(rank * width, (rank + 1) * width)
    results = []
    for columns, process_group in ((slice(None), None), (own, group)):
        leaf = padded(problem)[:, columns].clone().requires_grad_()
        values = oc.selected_logprobs(
            leaf, problem.tokens, problem.candidates, problem.temperature,
            process_group=process_group, vocab_size=TRUE_VOCAB,
        )  # fmt: skip
        (values[0].sum() + (values[1] * torch.arange(36)).sum() - values[2].sum()).backward()
        results.append([*values, leaf.grad if process_group is not None else leaf.grad[:, own]])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, atol=1e-11, rtol=1e-9)

    make = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=make, dtype=torch.float64) for n in (6, VOCAB))
    bias = torch.randn(VOCAB, generator=make, dtype=torch.float64)
    results = []
    for columns, process_group in ((slice(None), None), (own, group)):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight[columns], bias[columns])]
        out = oc.policy_loss_from_hidden(
            leaves[0], leaves[1], problem.record(), problem.advantages, bias=leaves[2], logit_softcap=5.0,
            process_group=process_group, vocab_size=TRUE_VOCAB,
        )  # fmt: skip
        out.loss.backward()
        cut = slice(None) if process_group is not None else own
        results.append([out.loss.detach(), leaves[0].grad, leaves[1].grad[cut], leaves[2].grad[cut]])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, atol=1e-11, rtol=1e-9)


def _bad_rows_are_seen_by_all_ranks(rank: int, ranks: int) -> None:
    group = dist.new_group(list(range(ranks)))
    width, problem = VOCAB // ranks, Problem(vocab=VOCAB, kind="head", seed=1)
    logits = problem.logits.clone()
    logits[3, -1] = torch.nan  # on the last rank only
    logits[1, : VOCAB // 2] = -torch.inf  # a whole shard without a finite logit is no fault
    options: dict[str, Any] = {"correction": oc.Correction.from_name("tis"), "process_group": group}
    with pytest.raises(ValueError, match="token 3 is not finite"):
        oc.policy_loss(
            logits[:, rank * width : (rank + 1) * width], problem.record(), problem.advantages, **options
        )
    logits[3, -1] = 0.0
    logits[1, problem.tokens[1]] = 0.5
    problem.logits = logits
    _, expected = gradient_through(
        "logits", logits, problem.record(), problem.advantages, correction=options["correction"]
    )
    shard = logits[:, rank * width : (rank + 1) * width]
    _, gradient = gradient_through("logits", shard, problem.record(), problem.advantages, **options)
    torch.testing.assert_close(gradient, expected[:, rank * width : (rank + 1) * width])


def _ranks_add_up(rank: int, ranks: int) -> None:
    problem = Problem(size=8, seed=3)
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 0, 0])
    whole, expected = gradient_through(
        "logits", problem.logits, problem.record(), problem.advantages, loss_mask=mask
    )
    share = slice(rank * 4, rank * 4 + 4)
    index = torch.arange(8)[share]
    denominator = oc.global_denominator(mask[share])
    assert denominator.item() == 4
    out, gradient = gradient_through(
        "logits", problem.logits[share], problem.record().select(index), problem.advantages[share],
        loss_mask=mask[share], denominator=denominator,
    )  # fmt: skip
    torch.testing.assert_close(gradient, expected[share])
    total = out.loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, whole.loss.detach())
    assert oc.global_denominator(torch.zeros(3)).item() == 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("body", [_losses, _logprobs_and_hidden], ids=["losses", "log-probs and hidden"])
def test_vocabulary_parallel_equals_unsharded(ranks: int, body: Callable[..., None]) -> None:
    launch(ranks, body)


def test_bad_rows_are_seen_by_all_ranks() -> None:
    launch(2, _bad_rows_are_seen_by_all_ranks)


def test_ranks_add_up_under_a_global_denominator() -> None:
    launch(2, _ranks_add_up)


def test_the_denominator_without_processes_is_the_count() -> None:
    assert oc.global_denominator(torch.tensor([[1, 0], [1, 1]])).item() == 3
