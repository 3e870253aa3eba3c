"""Vocabulary-parallel kernels: every world size, uneven ends, candidates anywhere, against the whole vocabulary."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import offpolicy_corr as oc
from ranks import Group, Ranks
from support import RULES as EVERY_RULE
from support import Problem

RULES = (oc.MaskedIS(0.5, 2.0),)  # between processes; every rule below, in one


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
    """Loss, gradient, diagnostics, and the log-probs' outputs and gradient, for every rule."""
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
            out.diagnostics.logprobs,
            out.diagnostics.entropy,
            out.diagnostics.trainer_head_mass,
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


# ------------------------------------------------------------------------------------------------ in one process


def shards_of(logits: torch.Tensor, ranks: int, columns: int) -> list[torch.Tensor]:
    """Each rank's columns; those behind the true vocabulary hold NaN."""
    padded = torch.full((logits.shape[0], columns * ranks), torch.nan, dtype=logits.dtype)
    padded[:, : logits.shape[1]] = logits
    return [part.contiguous() for part in padded.split(columns, 1)]


def assert_shards_agree(
    monkeypatch: pytest.MonkeyPatch,
    logits: torch.Tensor,
    record: oc.SamplerRecord,
    advantages: torch.Tensor,
    ranks: int,
    columns: int,
    tolerance: float = 2e-5,
    rounding: float = 0.0,
    **options: Any,
) -> None:
    """Every rank has the loss and diagnostics of the whole vocabulary in fp64, and its columns of the gradient."""
    options |= {"vocab_size": logits.shape[1], "reduction": "sum"}
    leaf = logits.double().requires_grad_()
    exact = oc.policy_loss(leaf, record, advantages, backend="torch", **options)
    exact.loss.backward()
    parts = shards_of(logits, ranks, columns)

    def body(group: Group) -> tuple[oc.PolicyLoss, torch.Tensor]:
        own = parts[group.rank].requires_grad_()
        out = oc.policy_loss(own, record, advantages, backend="triton", process_group=group, **options)
        (gradient,) = torch.autograd.grad(out.loss, own)
        assert group.calls == 2  # forward; none backward
        return out, gradient

    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    found = Ranks(ranks).run(body, monkeypatch)
    for out, _ in found:
        assert torch.equal(out.loss, found[0][0].loss)  # replicated
        torch.testing.assert_close(out.loss.detach().double(), exact.loss.detach(), **close)
        for name, values in vars(exact.diagnostics).items():
            if name == "tail_ratio" and logits.dtype == torch.float32:
                continue  # divides by the trainer's tail, which is good to 1e-7 of the row
            got = getattr(out.diagnostics, name)
            torch.testing.assert_close(
                got.to(values.dtype), values, **close, msg=lambda m, n=name: f"{n}: {m}"
            )
    whole = torch.cat([gradient for _, gradient in found], 1).double()
    width = logits.shape[1]
    assert (whole[:, width:] == 0).all()
    torch.testing.assert_close(whole[:, :width], leaf.grad, rtol=max(tolerance, rounding), atol=tolerance)


def made(kind: str, seed: int = 31, vocab: int = 51) -> tuple[torch.Tensor, oc.SamplerRecord, torch.Tensor]:
    problem = Problem(size=5, vocab=vocab, kind={"ids alone": "support"}.get(kind, kind), seed=seed, k=6)
    record = problem.record()
    if kind == "none":
        record = replace(record, candidates=None)
    if kind == "ids alone":
        record = replace(record, candidates=replace(problem.candidates, logprobs=None))
    return problem.logits.float(), record, problem.advantages


@pytest.mark.parametrize("kind", ["head", "support", "mixed", "ids alone", "none"])
@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: type(rule).__name__)
def test_every_rule_on_every_kind_of_record(
    rule: oc.WeightRule, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four shards of 13: the vocabulary of 51 ends inside the last; then of 17: the last holds nothing of it."""
    logits, record, advantages = made(kind)
    centers = (True, False) if kind in ("head", "support", "mixed") else (False,)
    for center, columns in zip(centers, (13, 17), strict=False):
        assert_shards_agree(
            monkeypatch, logits, record, advantages, 4, columns, correction=oc.Correction(rule, center=center),
            loss_mask=torch.tensor([1, 1, 0, 1, 1]),
        )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    "options",
    [{"entropy_coef": 0.3}, {"kl_coef": 0.2, "kl_estimator": "k1"}, {"kl_coef": 0.2, "entropy_coef": -0.1}],
    ids=str,
)
def test_regularizers(options: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, record, advantages = made("mixed")
    if "kl_coef" in options:
        options = options | {"ref_logprobs": torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5])}
    assert_shards_agree(monkeypatch, logits, record, advantages, ranks, -(-56 // ranks), **options)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("kind", ["head", "support", "mixed", "none"])
def test_the_pair(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, record, _ = made(kind)
    mask = torch.tensor([1, 1, 0, 1, 1])
    columns = -(-56 // ranks)
    parts = [*shards_of(logits, ranks, columns), logits.double()]

    def both(part: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        leaf = part.detach().requires_grad_()
        outputs = oc.selected_logprobs(
            leaf,
            record.tokens,
            record.candidates,
            record.temperature,
            loss_mask=mask,
            vocab_size=51,
            **options,
        )
        total = sum((torch.arange(1.0, 1 + len(o)) * o).sum() for o in outputs)
        return [*(o.detach() for o in outputs), *torch.autograd.grad(total, leaf)]

    exact = both(parts[-1], backend="torch")
    found = Ranks(ranks).run(
        lambda group: both(parts[group.rank], backend="triton", process_group=group), monkeypatch
    )
    for outputs in found:
        for ours, expected in zip(outputs[:3], exact[:3], strict=True):
            torch.testing.assert_close(ours.double(), expected, rtol=2e-5, atol=2e-5)
    whole = torch.cat([outputs[3] for outputs in found], 1).double()
    torch.testing.assert_close(whole[:, :51], exact[3], rtol=2e-5, atol=2e-5)
    assert (whole[:, 51:] == 0).all()


@pytest.mark.parametrize("home", [0, 3])
@pytest.mark.parametrize("token", [2, 20, 50])
def test_candidates_that_all_live_on_one_shard(
    home: int, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of 13; the sampled token is on that shard, on another, on the last; a candidate or not."""
    logits, _, advantages = made("head")
    ids = torch.arange(5) + 13 * home
    logq = (logits[:, ids] / 1.1).double().log_softmax(1) + torch.tensor(0.7).log()
    candidates = oc.CandidateSet.from_topk(ids.expand(5, 5).contiguous(), logq.contiguous())
    inside = (ids == token).nonzero()
    own = logq[:, inside[0, 0]] if len(inside) else logq.amin(1)  # a tail token is no likelier than the head
    record = oc.SamplerRecord(torch.full((5,), token), own, candidates)
    for rule in (oc.MaskedIS(), oc.Unweighted(), oc.TruncatedIS()):
        assert_shards_agree(monkeypatch, logits, record, advantages, 4, 13, correction=oc.Correction(rule))


@pytest.mark.parametrize("masking", [-torch.inf, -3e38, -1e12])
def test_shards_of_minus_infinity(masking: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 0 lives on shard 0, row 1 on shard 2, row 2 on shards 1 and 3; candidates are where the row is finite."""
    logits, _, advantages = made("head")
    homes = ((0, 13), (26, 39), (13, 51), (0, 51), (0, 51))
    ids, tokens = [], []
    for row, (first, last) in enumerate(homes):
        logits[row, :first] = logits[row, last:] = masking
        ids.append(torch.arange(first, first + 5))
        tokens.append(last - 1)
    logits[2, 26:39] = masking
    table = torch.stack(ids)
    logq = (logits.double() / 1.2).log_softmax(1)
    head, own = logq.gather(1, table), logq[torch.arange(5), torch.tensor(tokens)]
    own = torch.minimum(own, head.amin(1))  # a tail token is no likelier than the head
    record = oc.SamplerRecord(torch.tensor(tokens), own, oc.CandidateSet.from_topk(table, head))
    for rule in (oc.MaskedIS(), oc.Unweighted(), oc.ClampedIS(0.5, 2.0)):
        options = {"correction": oc.Correction(rule), "entropy_coef": 0.1}
        assert_shards_agree(monkeypatch, logits, record, advantages, 4, 13, **options)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: type(rule).__name__)
def test_five_digits_where_the_tail_scale_is_5e4(
    rule: oc.WeightRule, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p's tail is 1e-6, spread over the shards, and q's 0.05; the head's two ids lie on different shards."""
    p = torch.full((64,), 1e-6 / 62, dtype=torch.float64)
    p[3], p[60] = 0.7, 0.3 - 1e-6
    q = torch.tensor([0.6, 0.35], dtype=torch.float64)
    candidates = oc.CandidateSet.from_topk(torch.tensor([[3, 60]]), q.log()[None])
    record = oc.SamplerRecord(torch.tensor([3]), q[:1].log(), candidates)
    correction = oc.Correction(rule, tail_floor=1e-9)
    logits, ones = p.log()[None].float(), torch.ones(1, dtype=torch.float64)
    leaf = logits.double().requires_grad_()
    oc.policy_loss(leaf, record, ones, correction=correction).loss.backward()
    parts = shards_of(logits, ranks, 64 // ranks)

    def body(group: Group) -> torch.Tensor:
        own = parts[group.rank].requires_grad_()
        options = {"correction": correction, "backend": "triton", "process_group": group}
        return torch.autograd.grad(oc.policy_loss(own, record, ones, **options).loss, own)[0]

    gradient = torch.cat(Ranks(ranks).run(body, monkeypatch), 1)
    torch.testing.assert_close(gradient.double(), leaf.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter truncates where a device rounds: one unit in the last place."""
    logits, record, advantages = made("mixed")
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    assert_shards_agree(monkeypatch, logits.to(dtype), record, advantages, 4, 13, rounding=rounding)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_every_rank_refuses_what_one_shard_holds(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that went on alone would wait for the others for ever."""
    logits, record, advantages = made("mixed")
    logits[3, 40] = bad
    parts = shards_of(logits, 4, 13)

    def body(group: Group) -> str:
        try:
            oc.policy_loss(
                parts[group.rank], record, advantages, backend="triton", process_group=group, vocab_size=51
            )
        except ValueError as error:
            return str(error)
        return "accepted"

    refusals = Ranks(4).run(body, monkeypatch)
    assert len(set(refusals)) == 1 and "token 3 is not finite: its logits hold NaN" in refusals[0]
