"""A micro-batch of Miles seen whole, and what the core makes of it in fp64."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import offpolicy_corr as oc


@dataclass
class Problem:
    """A micro-batch seen whole. Lists have one entry per sample; per-token entries cover the full response."""

    prompts: list[int]
    responses: list[int]
    vocab: int
    logits: list[Tensor]  # [total, V], raw, before temperature
    tokens: list[Tensor]  # [total]
    masks: list[Tensor]  # [response]
    rollout: list[Tensor]  # [response], log q
    advantages: list[Tensor]
    reference: list[Tensor]
    head_ids: list[np.ndarray]  # [response, K], −1 unused
    head_logprobs: list[np.ndarray]
    support_ids: list[np.ndarray]
    support_offsets: list[np.ndarray]
    support_logprobs: list[np.ndarray]
    support_rollout: list[Tensor]  # log q over the support

    @property
    def totals(self) -> list[int]:
        return [p + r for p, r in zip(self.prompts, self.responses, strict=True)]


def make_problem(
    seed: int = 0,
    prompts: tuple[int, ...] = (3, 2, 5),
    responses: tuple[int, ...] = (6, 9, 4),
    vocab: int = 23,
    head: int = 4,
    temperature: float = 1.0,
    noise: float = 0.4,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Random trainer and sampler policies that differ by ``noise`` in the logits; tool tokens masked, garbage there."""
    g = torch.Generator().manual_seed(seed)
    p = Problem(list(prompts), list(responses), vocab, *([] for _ in range(12)))  # type: ignore[arg-type]
    for prompt, response in zip(prompts, responses, strict=True):
        total = prompt + response
        logits = torch.randn(total, vocab, generator=g, dtype=torch.float64) * 1.5
        sampler = logits + noise * torch.randn(total, vocab, generator=g, dtype=torch.float64)
        logq = (sampler / temperature).log_softmax(-1)[prompt - 1 : total - 1]
        ids, lengths, support_logq = [], [], []
        order = logq.argsort(-1, descending=True)
        drawn = []
        for t in range(response):
            size = 1 + int(torch.randint(0, 6, (), generator=g))
            support = order[t, :size]
            over_s = logq[t, support].log_softmax(0)
            pick = int(torch.multinomial(over_s.exp(), 1, generator=g))
            drawn.append(int(support[pick]))
            ids.append(support.numpy().astype(np.int32))
            lengths.append(size)
            support_logq.append(over_s.float().numpy())
        drawn_t = torch.tensor(drawn, dtype=torch.int64)
        mask = (torch.rand(response, generator=g) > 0.2).int()
        mask[0] = 1
        rollout = logq.gather(1, drawn_t[:, None]).squeeze(1) if response else torch.zeros(0)
        over = [float(row[list(i).index(d)]) for row, i, d in zip(support_logq, ids, drawn, strict=True)]
        garbage = torch.tensor([float("nan"), 0.0, float("-inf"), -9999.0])[torch.arange(response) % 4]
        prompt_ids = torch.randint(0, vocab, (prompt,), generator=g)
        p.logits.append(logits.to(dtype))
        p.tokens.append(torch.cat([prompt_ids, drawn_t]))
        p.masks.append(mask)
        p.rollout.append(torch.where(mask.bool(), rollout.float(), garbage))
        p.support_rollout.append(torch.where(mask.bool(), torch.tensor(over), garbage))
        p.advantages.append(torch.randn((), generator=g).expand(response).float().clone())
        p.reference.append(rollout.float() + 0.1 * torch.randn(response, generator=g))
        top = order[:, :head].numpy().astype(np.int32)
        values = np.take_along_axis(logq.numpy(), top.astype(np.int64), 1).astype(np.float32)
        tool = mask.numpy() == 0
        top[tool], values[tool] = -1, -np.inf
        p.head_ids.append(top)
        p.head_logprobs.append(values)
        p.support_ids.append(np.concatenate([np.zeros(0, np.int32), *ids]))
        p.support_offsets.append(np.cumsum([0, *lengths]).astype(np.int64))
        p.support_logprobs.append(np.concatenate([np.zeros(0, np.float32), *support_logq]))
    return p


def expected(
    problem: Problem,
    args: Namespace,
    candidates: str = "heads",
    rollout_mask_sums: list[float] | None = None,
    **core: Any,
) -> tuple[Tensor, list[Tensor], oc.PolicyLoss]:
    """Loss and gradients of the whole micro-batch by the core in fp64, on full responses, with explicit means."""
    leaves = [logits.double().clone().requires_grad_() for logits in problem.logits]
    rows = torch.cat(
        [
            leaf[p - 1 : p - 1 + r]
            for leaf, p, r in zip(leaves, problem.prompts, problem.responses, strict=True)
        ]
    )
    over_support = candidates not in ("heads", "none")
    record = oc.SamplerRecord(
        torch.cat([t[p:] for t, p in zip(problem.tokens, problem.prompts, strict=True)]),
        torch.cat(problem.support_rollout if over_support else problem.rollout).double(),
        _candidates(problem, candidates),
        args.rollout_temperature,
    )
    mask = torch.cat(problem.masks).bool()
    sums = rollout_mask_sums or [float(m.sum()) for m in problem.masks]
    weights = torch.cat(
        [
            torch.full((r,), 1.0 if args.calculate_per_token_loss else 1.0 / max(s, 1.0), dtype=torch.float64)
            for r, s in zip(problem.responses, sums, strict=True)
        ]
    )
    out = oc.policy_loss(
        rows, record, torch.cat(problem.advantages).double(), loss_mask=mask, reduction="none", **core
    )
    loss = (out.loss * torch.where(mask, weights, 0.0)).sum()
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in leaves], out


def _candidates(problem: Problem, kind: str) -> oc.CandidateSet | None:
    if kind == "none":
        return None
    sets = []
    for i in range(len(problem.prompts)):
        if kind == "heads":
            ids, values = torch.from_numpy(problem.head_ids[i]), torch.from_numpy(problem.head_logprobs[i])
            sets.append(oc.CandidateSet.from_topk(ids, values))
            continue
        values = None if kind == "ids" else torch.from_numpy(problem.support_logprobs[i])
        ids, offsets = torch.from_numpy(problem.support_ids[i]), torch.from_numpy(problem.support_offsets[i])
        sets.append(oc.CandidateSet.from_support(ids, offsets, values))
    return oc.CandidateSet.concat(sets)
