"""The implementations that are compared, each as a function that does loss and gradient once.

A peer that is not installed, or does not accept the case, raises `Skip` with the reason.
"""

# peers need not be installed, and have no types
# mypy: disable-error-code="import-not-found, import-untyped"
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import offpolicy_corr as oc

from .cpu import autograd_loss

Step = Callable[[], Any]


class Skip(Exception):
    """This peer sits out, and says why."""


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
    sampled, own = ids[:, 0].long(), logq[:, 0].contiguous()
    candidates = None
    if support:
        sizes = (1 + torch.randint(0, k, (tokens,), device=device) ** 2 // k).clamp(max=k)
        inside = torch.arange(k, device=device) < sizes[:, None]
        logq = logq.masked_fill(~inside, -torch.inf).log_softmax(1)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        candidates = oc.CandidateSet.from_support(ids[inside], offsets, logq[inside])
        own = logq[:, 0].contiguous()
    elif k:
        candidates = oc.CandidateSet.from_topk(ids, logq)
    record = oc.SamplerRecord(sampled, own, candidates)
    advantages = torch.randn(tokens, device=device)
    return Case(logits, logits.clone(), record, advantages, k, support)


def _correction(case: Case) -> oc.Correction:
    return oc.Correction.from_name("sc+mis" if case.k else "mis")


def _policy_loss(case: Case, upstream: float = 1.0, **options: Any) -> Step:
    def step() -> Any:
        leaf = case.logits.detach().requires_grad_()
        out = oc.policy_loss(
            leaf, case.record, case.advantages, correction=_correction(case), validate=False, **options
        )
        return torch.autograd.grad(out.loss * upstream if upstream != 1.0 else out.loss, leaf)

    return step


def ours_inplace(case: Case) -> Step:
    return _policy_loss(case, backend="triton", inplace=True)


def ours(case: Case) -> Step:
    return _policy_loss(case, backend="triton")


def ours_scaled(case: Case) -> Step:
    """A loss scaler's factor, which is not 1: one more pass over the gradient."""
    return _policy_loss(case, upstream=3.0, backend="triton", inplace=True)


def ours_torch(case: Case) -> Step:
    return _policy_loss(case, backend="torch", inplace=True)


def ours_pair(case: Case) -> Step:
    """`selected_logprobs`, then the loss by autograd on what it gives."""

    def step() -> Any:
        leaf = case.logits.detach().requires_grad_()
        logp, head, _ = oc.selected_logprobs(
            leaf, case.record.tokens, case.record.candidates, backend="triton"
        )
        out = oc.policy_loss_from_logprobs(
            logp,
            head if case.k else None,
            case.record,
            case.advantages,
            correction=_correction(case),
            validate=False,
        )
        return torch.autograd.grad(out.loss, leaf)

    return step


def _plain(case: Case, loss: Callable[..., Tensor]) -> Step:
    if not case.k or case.support:
        raise Skip("the plain autograd loss is written for heads")

    def step() -> Any:
        leaf = case.logits.detach().requires_grad_()
        return torch.autograd.grad(loss(leaf, case.record, case.advantages), leaf)

    return step


def eager(case: Case) -> Step:
    return _plain(case, autograd_loss)


def compiled(case: Case) -> Step:
    if not case.k or case.support:
        raise Skip("the plain autograd loss is written for heads")
    assert case.record.candidates is not None and case.record.logprobs is not None
    own, (ids, logq) = case.record.logprobs, case.record.candidates.to_padded()
    assert logq is not None
    ids = ids.long()

    @torch.compile
    def loss(logits: Tensor, tokens: Tensor, own: Tensor, advantages: Tensor) -> Tensor:
        logp = logits.float().log_softmax(-1)
        token, head = logp.gather(1, tokens[:, None]).squeeze(1), logp.gather(1, ids)
        with torch.no_grad():
            rule, q, p = oc.MaskedIS(), logq.exp(), head.exp()
            weight = rule.weight(token - own, advantages)
            rho = (1 - q.sum(1)).clamp(min=1e-6) / (1 - p.sum(1)).clamp(min=1e-6)
            coefficient = (
                rule.weighted_prob(head, logq, advantages) - rule.tail_scale(rho, advantages)[:, None] * p
            )
        return -(advantages * (weight * token - (coefficient * head).sum(1))).mean()

    def step() -> Any:
        leaf = case.logits.detach().requires_grad_()
        return torch.autograd.grad(loss(leaf, case.record.tokens, own, case.advantages), leaf)

    return step


def liger(case: Case) -> Step:
    """Cross-entropy of one token: a fraction of the work, on the same bytes."""
    try:
        from liger_kernel.transformers import LigerCrossEntropyLoss
    except ImportError as error:
        raise Skip("liger-kernel is not installed") from error
    module = LigerCrossEntropyLoss()

    def step() -> Any:
        leaf = case.logits.detach().requires_grad_()
        return torch.autograd.grad(module(leaf, case.record.tokens), leaf)

    return step


def quack(case: Case) -> Step:
    try:
        from quack.cross_entropy import cross_entropy
    except ImportError as error:
        raise Skip("quack-kernels is not installed") from error

    def step() -> Any:
        leaf = case.logits.detach().requires_grad_()
        return torch.autograd.grad(cross_entropy(leaf, case.record.tokens).mean(), leaf)

    return step


# name: (build, model of the bytes it moves per bf16 logit, does it write over the logits)
ON_LOGITS: dict[str, tuple[Callable[[Case], Step], str, bool]] = {
    "ours": (ours_inplace, "4-6", True),
    "ours, buffer": (ours, "4-6", False),
    "ours, upstream 3": (ours_scaled, "8-10", True),
    "ours, pair": (ours_pair, "6", False),
    "ours, torch": (ours_torch, "20+", True),
    "eager": (eager, "20-30", False),
    "compile": (compiled, "6-10", False),
    "liger": (liger, "4-6", True),
    "quack": (quack, "6", False),
}


@dataclass(frozen=True, eq=False)
class HiddenCase:
    """Hidden states ``[tokens, width]`` and an LM head ``[vocab, width]``."""

    hidden: Tensor
    weight: Tensor
    record: oc.SamplerRecord
    advantages: Tensor
    k: int
    support: bool


def make_hidden_case(case: Case, width: int) -> HiddenCase:
    dtype, device = case.logits.dtype, case.logits.device
    hidden = torch.randn(len(case.record), width, dtype=dtype, device=device)
    weight = torch.randn(case.logits.shape[1], width, dtype=dtype, device=device) / width**0.5
    return HiddenCase(hidden, weight, case.record, case.advantages, case.k, case.support)


def hidden_ours(case: HiddenCase) -> Step:
    correction = oc.Correction.from_name("sc+mis" if case.k else "mis")

    def step() -> Any:
        hidden, weight = case.hidden.detach().requires_grad_(), case.weight.detach().requires_grad_()
        out = oc.policy_loss_from_hidden(
            hidden, weight, case.record, case.advantages, correction=correction, validate=False
        )
        return torch.autograd.grad(out.loss, [hidden, weight])

    return step


def hidden_cce(case: HiddenCase) -> Step:
    try:
        from cut_cross_entropy import linear_cross_entropy
    except ImportError as error:
        raise Skip("cut-cross-entropy is not installed") from error

    def step() -> Any:
        leaves = [case.hidden.detach().requires_grad_(), case.weight.detach().requires_grad_()]
        # the exact variant: the default drops small gradients, which biases them
        return torch.autograd.grad(
            linear_cross_entropy(*leaves, case.record.tokens, impl="cce_exact"), leaves
        )

    return step


def hidden_liger(case: HiddenCase) -> Step:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise Skip("liger-kernel is not installed") from error
    module = LigerFusedLinearCrossEntropyLoss()

    def step() -> Any:
        leaves = [case.hidden.detach().requires_grad_(), case.weight.detach().requires_grad_()]
        return torch.autograd.grad(module(leaves[1], leaves[0], case.record.tokens), leaves)

    return step


def hidden_eager(case: HiddenCase) -> Step:
    """Cross-entropy of one token over materialised logits."""

    def step() -> Any:
        leaves = [case.hidden.detach().requires_grad_(), case.weight.detach().requires_grad_()]
        logits = leaves[0] @ leaves[1].T
        return torch.autograd.grad(
            torch.nn.functional.cross_entropy(logits.float(), case.record.tokens), leaves
        )

    return step


ON_HIDDEN: dict[str, Callable[[HiddenCase], Step]] = {
    "ours": hidden_ours,
    "cce": hidden_cce,
    "liger": hidden_liger,
    "eager": hidden_eager,
}
