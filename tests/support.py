"""Shared by the tests: the entrances behind one signature, and random problems."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import offpolicy_corr as oc

ENTRANCES = ("logits", "inplace", "hidden", "logprobs")


def gradient_through(
    entrance: str, logits: Tensor, record: oc.SamplerRecord, advantages: Tensor, **options: Any
) -> tuple[oc.PolicyLoss, Tensor]:
    """The loss through one entrance, and its gradient with respect to raw logits ``[T, V]``."""
    leaf = logits.detach().clone().requires_grad_()
    if entrance == "hidden":
        # an identity head: hidden states are the logits, and the gradient comes out in their place
        head = torch.eye(logits.shape[1], dtype=logits.dtype)
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
