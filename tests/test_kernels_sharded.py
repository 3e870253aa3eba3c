"""Vocabulary-parallel kernels: every world size, uneven ends, candidates anywhere, against the whole vocabulary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import offpolicy_corr as oc
from support import Problem

RULES = (oc.MaskedIS(0.5, 2.0), oc.Unweighted())


def problems() -> list[tuple[Problem, torch.Tensor, oc.SamplerRecord]]:
    """Rows whose candidates and tokens lie on any shard; one row is −inf over most of the vocabulary."""
    made = []
    for kind in ("head", "mixed"):
        problem = Problem(size=5, vocab=51, kind=kind, seed=31, k=6)
        logits = problem.logits.float()
        if kind == "head":
            logits[1, 13:] = -torch.inf  # a shard that holds nothing finite
            keep = problem.candidates.ids.view(5, 6)[1] < 13
            inside = torch.ones(30, dtype=torch.bool)
            inside[6:12] = keep
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), inside.view(5, 6).sum(1).cumsum(0)])
            problem.candidates = oc.CandidateSet(
                problem.candidates.ids[inside], problem.candidates.logprobs[inside], offsets, problem.complete
            )
            problem.tokens[1] = 4
        record = problem.record()
        made.append((problem, logits, record))
    return made


def results(
    logits: torch.Tensor, problem: Problem, record: oc.SamplerRecord, backend: str, **options
) -> list[torch.Tensor]:
    """Loss, gradient, diagnostics, and the pair's outputs and gradient, for every rule."""
    found = []
    for rule in RULES:
        leaf = logits.clone().requires_grad_()
        out = oc.policy_loss(
            leaf * 1.0, record, problem.advantages, correction=oc.Correction(rule), entropy_coef=0.1, inplace=True,
            loss_mask=torch.tensor([1, 1, 1, 0, 1]), vocab_size=51, backend=backend, **options,
        )  # fmt: skip
        out.loss.backward()
        found += [
            leaf.grad,
            out.loss.detach()[None],
            out.tokens.logprobs,
            out.tokens.entropy,
            out.tokens.trainer_head_mass,
        ]
    leaf = logits.clone().requires_grad_()
    logp, candidate_logp, entropy = oc.selected_logprobs(
        leaf, record.tokens, record.candidates, record.temperature, vocab_size=51, backend=backend, **options
    )
    finite = candidate_logp[candidate_logp.isfinite()]
    (logp.sum() + finite.sum() + entropy.sum()).backward()
    return [*found, leaf.grad, logp.detach(), candidate_logp.detach(), entropy.detach()]


def rank_main(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    columns = -(-56 // world)  # five columns of padding: the true vocabulary ends inside a shard
    try:
        for problem, logits, record in problems():
            exact = results(logits.double(), problem, record, "torch")
            padded = torch.full((5, columns * world), torch.nan)
            padded[:, :51] = logits
            mine = slice(rank * columns, (rank + 1) * columns)
            shard = padded[:, mine].contiguous()
            ours = results(shard, problem, record, "triton", process_group=dist.group.WORLD)
            for position, (a, b) in enumerate(zip(ours, exact, strict=True)):
                if b.dim() == 2:
                    wide = torch.zeros(5, columns * world, dtype=b.dtype)
                    wide[:, :51] = b
                    b = wide[:, mine]
                torch.testing.assert_close(
                    a.double(),
                    b,
                    rtol=2e-5,
                    atol=2e-5,
                    equal_nan=True,
                    msg=lambda m, p=position: f"result {p}: {m}",
                )
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks run in the interpreter, on a CPU")
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_shards_give_what_the_whole_vocabulary_gives(world: int, tmp_path: Path) -> None:
    mp.spawn(rank_main, (world, str(tmp_path / "store")), nprocs=world)


def one_rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    count = 0
    plain = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return plain(*args, **kwargs)

    dist.all_reduce = counting
    try:
        problem, logits, record = problems()[1]
        oc.policy_loss(
            logits.requires_grad_(),
            record,
            problem.advantages,
            process_group=dist.group.WORLD,
            backend="triton",
        ).loss.backward()
        assert count == 2, count
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks run in the interpreter, on a CPU")
def test_two_collectives_and_none_backward(tmp_path: Path) -> None:
    mp.spawn(one_rank, (str(tmp_path / "store"),), nprocs=1)
