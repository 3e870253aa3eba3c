"""Public: importance weights alone, for frameworks that keep their own loss."""

from __future__ import annotations

import torch
from torch import Tensor

from .correction import Correction
from .numerics import compute_dtype
from .records.errors import RecordError
from .records.missing import SENTINEL
from .records.validation import LOGPROB_ABOVE_ZERO, as_mask
from .weights import PPOClip


def importance_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    correction: Correction | str = "mis",
    loss_mask: Tensor | None = None,
    advantages: Tensor | None = None,
    validate: bool = True,
) -> Tensor:
    """f(p/q) of every token, to multiply into a loss of your own: ``(weights * loss).sum()``.

    Args:
        logprobs: log p of the sampled tokens (nats), any shape; gradients are cut.
        sampler_logprobs: log q, the same shape, under the distribution really sampled from.
        correction: an uncentered correction or its name. Centering adds a term to the loss, which weights cannot: use
            `policy_loss`.
        loss_mask: bool or {0, 1}, the same shape; masked tokens get 0, whatever stands there.
        advantages: the same shape; needed by rules that look at their sign (`PPOClip`).
        validate: check the log-probs, at the cost of a host sync.

    Returns:
        Detached fp32 (fp64 for fp64) weights of the same shape; 0 where a token is masked or the rule drops it.

    Raises:
        ValueError: shapes that differ, a centered correction, `PPOClip` without advantages.
        RecordError: a log-prob of a trained token that is missing, NaN or above 0; ``sample`` and ``token`` are its row
            and column, in a flat tensor ``token`` alone.
    """
    correction = Correction.of(correction)
    if correction.center:
        raise ValueError("weights cannot center a loss: use policy_loss, or a correction without 'sc+'")
    if advantages is None and isinstance(correction.rule, PPOClip):
        raise ValueError("PPOClip keeps a token by the sign of its advantage: pass advantages=")
    given = {"sampler_logprobs": sampler_logprobs, "loss_mask": loss_mask, "advantages": advantages}
    for name, values in given.items():
        if values is not None and values.shape != logprobs.shape:
            raise ValueError(
                f"{name} must have the shape of logprobs, {tuple(logprobs.shape)}, got {tuple(values.shape)}"
            )
    trained = torch.ones_like(logprobs, dtype=torch.bool)
    if loss_mask is not None:
        flat = as_mask(loss_mask.flatten(), logprobs.flatten(), check=validate)
        assert flat is not None
        trained = flat.view(logprobs.shape)
    dtype = torch.promote_types(compute_dtype(logprobs.dtype), compute_dtype(sampler_logprobs.dtype))
    logp, logq = (v.detach().to(dtype) for v in (logprobs, sampler_logprobs))
    if validate:
        _check(trained, logp, "logprobs", "Mask the token, or compute its log-prob.")
        _check(trained, logq, "sampler_logprobs", "Mask the token, or record its log-prob.")
    log_ratio = logp - logq
    signs = torch.ones_like(log_ratio) if advantages is None else advantages.detach().to(dtype)
    return torch.where(trained, correction.rule.weight(log_ratio, signs), 0.0)


def _check(trained: Tensor, logprobs: Tensor, field: str, remedy: str) -> None:
    bad = trained & ~((logprobs > SENTINEL) & (logprobs <= LOGPROB_ABOVE_ZERO))
    if not bool(bad.any()):
        return
    position = bad.nonzero()[0].tolist()
    raise RecordError(
        "log-prob is above 0, not a number, or stands for a missing one",
        sample=position[0] if len(position) > 1 else None,
        token=position[-1],
        field=field,
        value=logprobs[tuple(position)].item(),
        remedy=remedy,
    )
