"""Benchmark: the baseline, SC + MIS as one writes it first, in log-probs that autograd differentiates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import offpolicy_corr as oc


def plain_loss(record: oc.SamplerRecord, advantages: Tensor) -> Callable[[Tensor], Tensor]:
    """The mean loss of `MaskedIS()` as a function of logits ``[T, V]``, by ``log_softmax`` in fp32 and ``gather``.

    Centered where the record has candidates: heads everywhere, or supports everywhere, whose log-softmax is taken over
    the gathered logits alone. What does not depend on the logits is made here. The temperature is 1.
    """
    assert record.logprobs is not None
    own, tokens, rule = record.logprobs, record.tokens[:, None], oc.MaskedIS()
    candidates = record.candidates

    def weighted(token: Tensor) -> Tensor:
        return rule.weight(token.detach() - own, advantages) * token

    if candidates is None:
        return lambda logits: (
            -(advantages * weighted(_log_softmax(logits).gather(1, tokens).squeeze(1))).mean()
        )
    ids, logq = candidates.to_padded(pad_id=0)
    assert logq is not None
    ids, unused = ids.long(), logq == -torch.inf
    q_tail = (1 - logq.exp().sum(1)).clamp(min=1e-6)
    place = ((ids == tokens) & ~unused).byte().argmax(1, keepdim=True)
    over_supports = bool(candidates.complete.all())

    def centered(logits: Tensor) -> Tensor:
        if over_supports:
            head = _log_softmax(logits.gather(1, ids).masked_fill(unused, -torch.inf))
            token, head = head.gather(1, place).squeeze(1), head.masked_fill(unused, 0.0)
        else:
            logp = _log_softmax(logits)
            token, head = logp.gather(1, tokens).squeeze(1), logp.gather(1, ids)
        with torch.no_grad():
            coefficient = rule.weighted_prob(head, logq, advantages)
            if not over_supports:
                p = head.exp()
                alpha = rule.tail_scale(q_tail / (1 - p.sum(1)).clamp(min=1e-6), advantages)
                coefficient = coefficient - alpha[:, None] * p
        return -(advantages * (weighted(token) - (coefficient * head).sum(1))).mean()

    return centered


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)
