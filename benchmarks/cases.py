"""Benchmark: logits of real shapes, and records of a sampler that differs a little, for the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import offpolicy_corr as oc

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, eq=False)
class Case:
    """Logits ``[tokens, vocab]``, what a sampler recorded, advantages; ``k`` candidates per row, or supports.

    ``source`` holds the logits for steps that write over them.
    """

    logits: Tensor
    source: Tensor
    record: oc.SamplerRecord
    advantages: Tensor
    k: int
    support: bool

    @property
    def correction(self) -> oc.Correction:
        """What the records allow: SC + MIS, without candidates MIS."""
        return oc.Correction.from_name("sc+mis" if self.k else "mis")

    def restore(self) -> None:
        self.logits.copy_(self.source)


@dataclass(frozen=True, eq=False)
class HiddenCase:
    """The same record with hidden states ``[tokens, width]`` and an LM head ``[vocab, width]`` for logits."""

    hidden: Tensor
    weight: Tensor
    case: Case


def make_case(
    tokens: int, vocab: int, k: int, support: bool, device: str, dtype: torch.dtype = torch.bfloat16
) -> Case:
    """Peaked random logits, and a sampler whose logits are a little different. Supports have 1 to ``k`` ids."""
    torch.manual_seed(0)
    logits = torch.empty(tokens, vocab, dtype=dtype, device=device)
    ids = torch.empty(tokens, max(k, 1), dtype=torch.int32, device=device)
    logq = torch.empty(tokens, max(k, 1), device=device)
    for start in range(0, tokens, 512):
        rows = slice(start, start + 512)
        scores = 3.0 * torch.randn(logits[rows].shape, device=device)
        top = scores.log_softmax(1).topk(max(k, 1), 1)
        ids[rows], logq[rows] = top.indices.int(), top.values
        logits[rows] = scores + 0.05 * torch.randn_like(scores)
    sampled = ids[:, 0].long()
    candidates = None
    if support:
        sizes = (1 + torch.randint(0, k, (tokens,), device=device) ** 2 // k).clamp(max=k)
        inside = torch.arange(k, device=device) < sizes[:, None]
        logq = logq.masked_fill(~inside, -torch.inf).log_softmax(1)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        candidates = oc.CandidateSet.from_support(ids[inside], offsets, logq[inside])
    elif k:
        candidates = oc.CandidateSet.from_topk(ids, logq)
    record = oc.SamplerRecord(sampled, logq[:, 0].contiguous(), candidates)
    advantages = torch.randn(tokens, device=device)
    return Case(logits, logits.clone(), record, advantages, k, support)


def make_hidden_case(case: Case, width: int) -> HiddenCase:
    hidden = case.logits.new_empty(case.logits.shape[0], width).normal_()
    weight = case.logits.new_empty(case.logits.shape[1], width).normal_(std=width**-0.5)
    return HiddenCase(hidden, weight, case)
