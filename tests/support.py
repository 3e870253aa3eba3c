"""Shared by the tests: the entrances behind one signature, and random problems."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import offpolicy_corr as oc
from offpolicy_corr.records.storage import batch_tensors
from offpolicy_corr.records.trajectory import Batch

ENTRANCES = ("logits", "inplace", "hidden", "logprobs")


def gradient_through(
    entrance: str, logits: Tensor, record: oc.SamplerRecord, advantages: Tensor, **options: Any
) -> tuple[oc.PolicyLoss, Tensor]:
    """The loss through one entrance, and its gradient with respect to raw logits ``[T, V]``."""
    leaf = logits.detach().clone().requires_grad_()
    if entrance == "hidden":
        # an identity head: hidden states are the logits, and the gradient comes out in their place
        head = torch.eye(logits.shape[1], dtype=logits.dtype)
        if len(logits) == 1 and bool(leaf.detach().isneginf().any()):
            # a hidden state of −inf would spread over every logit; in the bias it stays in its column
            leaf.data.masked_fill_(logits.isneginf(), 0.0)
            options["bias"] = torch.where(logits[0].isneginf(), logits[0], 0.0)
        out = oc.policy_loss_from_hidden(leaf, head, record, advantages, **options)
    elif entrance == "logprobs":
        vocab_size = options.get("vocab_size")
        logp, candidate_logp, entropy = oc.selected_logprobs(
            leaf,
            record.tokens,
            record.candidates,
            record.temperature,
            loss_mask=options.get("loss_mask"),
            vocab_size=vocab_size,
        )
        out = oc.policy_loss_from_logprobs(
            logp, candidate_logp, record, advantages, entropy=entropy, **options
        )
    else:
        inner = leaf * 1.0  # a leaf may not be written to in place
        out = oc.policy_loss(inner, record, advantages, inplace=entrance == "inplace", **options)
    out.loss.sum().backward()
    assert leaf.grad is not None
    return out, leaf.grad


RULES: tuple[oc.WeightRule, ...] = (
    oc.Unweighted(),
    oc.FullIS(),
    oc.TruncatedIS(1.2),
    oc.MaskedIS(0.5, 3.0),  # not its own inverse
    oc.ClampedIS(0.8, 1.2),
    oc.PPOClip(0.2, 0.28),
)


class Problem:
    """Random rows: trainer logits, sampler distributions q, and a record drawn from them.

    ``kind`` is ``"head"`` (top-k of q over V), ``"support"`` (q lives on a set of its own), or ``"mixed"``.
    ``sampler`` ``[T, V]`` is q itself, so that expectations can be taken exactly.
    """

    def __init__(
        self,
        size: int = 6,
        vocab: int = 11,
        kind: str = "mixed",
        seed: int = 0,
        k: int = 4,
        noise: float = 1.0,
        dtype: torch.dtype = torch.float64,
        temperature: float | None = None,
    ) -> None:
        make = torch.Generator().manual_seed(seed)
        randn = lambda *shape: torch.randn(*shape, generator=make, dtype=torch.float64)
        self.logits = (2.0 * randn(size, vocab)).to(dtype)
        self.temperature: float | Tensor = 0.5 + torch.rand(size, generator=make, dtype=torch.float64)
        if temperature is not None:
            self.temperature = temperature
        temperature_of_rows = (
            self.temperature[:, None] if isinstance(self.temperature, Tensor) else self.temperature
        )
        scores = (self.logits.double() + noise * randn(size, vocab)) / temperature_of_rows
        top = scores.topk(k, 1).indices
        self.complete = torch.zeros(size, dtype=torch.bool)
        if kind == "support":
            self.complete[:] = True
        elif kind == "mixed":
            self.complete[::2] = True
        inside = torch.zeros(size, vocab, dtype=torch.bool).scatter_(1, top, True)
        scores = scores.masked_fill(self.complete[:, None] & ~inside, -torch.inf)
        self.log_sampler = scores.log_softmax(1)
        self.sampler = self.log_sampler.exp()
        self.tokens = torch.multinomial(self.sampler, 1, generator=make).squeeze(1)
        offsets = torch.arange(size + 1) * k
        self.candidates = oc.CandidateSet(
            top.reshape(-1), self.log_sampler.gather(1, top).reshape(-1), offsets, self.complete
        )
        self.advantages = randn(size)

    def record(self, tokens: Tensor | None = None) -> oc.SamplerRecord:
        """The record of ``tokens`` (default: the ones that were drawn)."""
        tokens = self.tokens if tokens is None else tokens
        logq = self.log_sampler.gather(1, tokens[:, None]).squeeze(1)
        return oc.SamplerRecord(tokens, logq, self.candidates, self.temperature)

    def modeled_sampler(self, floor: float = 1e-6) -> Tensor:
        """q̂ ``[T, V]``: q on the candidates, the trainer's probabilities rescaled to q's tail elsewhere."""
        temperature_of_rows = (
            self.temperature[:, None] if isinstance(self.temperature, Tensor) else self.temperature
        )
        p = (self.logits.double() / temperature_of_rows).softmax(1)
        ids, _ = self.candidates.to_padded()
        head = torch.zeros_like(p, dtype=torch.bool).scatter_(1, ids, True)
        q_tail = (1 - (self.sampler * head).sum(1)).clamp(min=floor)
        p_tail = (p * ~head).sum(1)
        tail = p * (q_tail / p_tail.clamp(min=floor))[:, None]
        return torch.where(head, self.sampler, tail.masked_fill(self.complete[:, None], 0.0))


def same_record(left: oc.SamplerRecord, right: oc.SamplerRecord) -> bool:
    """Whether two records hold the same values; NaN equals NaN."""
    none = torch.zeros(0)
    a, b = (batch_tensors(Batch(r, none, none)) for r in (left, right))
    described = [(r.group_names, r.version_names, r.specs) for r in (left, right)]
    scalars = [t for t in (left.temperature, right.temperature) if not isinstance(t, Tensor)]
    if described[0] != described[1] or set(a) != set(b) or len(set(scalars)) > 1:
        return False
    return all(a[n].dtype == b[n].dtype and _bits(a[n]) == _bits(b[n]) for n in a)


def _bits(tensor: Tensor) -> tuple[list[int], bytes]:
    return list(tensor.shape), tensor.numpy().tobytes()
