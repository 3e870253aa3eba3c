"""`tis_function`: importance sampling inside Miles' own policy loss, through ``--custom-tis-function-path``.

The hook sees log-probs alone, so there is MIS, TIS and sequence guards here, and no centering. Both denominators are
put into ``pg_loss`` and the masks are returned as they came: what Miles divides by when a mask shrinks differs between
its Megatron backend (the whole rollout) and its torch-native one (what is left of the mask).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from offpolicy_corr import guards
from offpolicy_corr.records.errors import RecordError

from .host import all_reduce, check_row_lengths, group_of
from .layout import Layout, Tokens
from .options import tis_refusals
from .report import LARGEST_LOG_RATIO
from .settings import Settings, SettingsError


def tis_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    parallel_state: Any,
    max_seq_lens: list[int] | None = None,
    **unused: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Weight Miles' token losses by f(p_old/q), drop guarded sequences, report the mismatch.

    Args:
        args: Miles' arguments; read are ``offpolicy_corr`` (an uncentered correction), ``use_tis``, ``qkv_format``.
            Without ``use_tis`` Miles wants metrics alone: ``pg_loss`` is handed back untouched.
        pg_loss: token losses of the context-parallel slice, ``[C]``, differentiable.
        train_log_probs, rollout_log_probs: log p of the trainer's old policy and log q, CP-local lists, constants.
        loss_masks: full responses, CPU or GPU; what stands at masked positions is never read.
        total_lengths, response_lengths, max_seq_lens, parallel_state: the layout.
        unused: whatever later versions of Miles add.

    Returns:
        ``(pg_loss, loss_masks, metrics)``: 0 at masked tokens and dropped sequences; the masks unchanged; metrics
        under one fixed set of keys, ``[C]`` each, which Miles reduces with the same masks.

    Raises:
        SettingsError: a correction that needs logits or advantages; ``use_rollout_logprobs``, under which both
            log-probs are the same.
        RecordError: lists that are missing or of another length.
    """
    settings = Settings.of(getattr(args, "offpolicy_corr", None))
    problems = tis_refusals(args, settings)
    if problems:
        raise SettingsError("tis_function must not run as configured:\n- " + "\n- ".join(problems))
    layout, listed = _layout(args, total_lengths, response_lengths, max_seq_lens, parallel_state)
    masks = _full_mask(loss_masks, response_lengths, pg_loss.device)
    trained = masks[listed.flat(layout).to(pg_loss.device)]
    log_ratio = _log_ratio(layout, train_log_probs, rollout_log_probs, trained, settings.validate)
    weight = settings.correction.rule.weight(log_ratio, torch.ones_like(log_ratio))
    weight = torch.where(trained, weight, 0.0)
    group = group_of(parallel_state.cp)
    keep = _keep(settings, layout, listed, log_ratio, masks, group)
    sample = listed.sample.to(pg_loss.device)
    metrics = _metrics(settings, log_ratio, weight, trained, keep[sample])
    if not getattr(args, "use_tis", True):
        return pg_loss, loss_masks, metrics
    factor = torch.where(keep[sample], weight, 0.0)
    if settings.denominator == "kept":
        (kept,) = _whole([(weight > 0).to(weight.dtype)], layout, listed, group)
        total = layout.per_sample(masks.to(weight.dtype))
        factor = factor * (total / layout.per_sample(kept).clamp(min=1.0))[sample]
    # replaced, not multiplied: at a masked token the loss itself may be NaN
    live = trained & (factor > 0)
    clean = torch.where(live, pg_loss, torch.zeros((), dtype=pg_loss.dtype, device=pg_loss.device))
    return clean * factor.to(pg_loss.dtype), loss_masks, metrics


def _layout(
    args: Any, totals: list[int], responses: list[int], padded: list[int] | None, state: Any
) -> tuple[Layout, Tokens]:
    form = getattr(args, "qkv_format", "thd")
    if form == "bshd" and padded is None:
        raise RecordError(
            "the hook got no max_seq_lens under qkv_format bshd",
            field="max_seq_lens",
            remedy="Upgrade Miles.",
        )
    layout = Layout(
        tuple(int(n) for n in totals),
        tuple(int(n) for n in responses),
        state.cp.rank,
        state.cp.size,
        False,  # log-probs are in zigzag order under every context parallelism
        0,
        None,
        tuple(int(n) for n in padded) if form == "bshd" and padded is not None else None,
    )
    return layout, layout.listed()


def _full_mask(loss_masks: list[Tensor], responses: list[int], device: torch.device) -> Tensor:
    check_row_lengths(
        "loss_masks", loss_masks, responses, "The mask must grow with the response (partial rollouts)."
    )
    parts = [torch.as_tensor(mask).to(device) != 0 for mask in loss_masks]
    return torch.cat([torch.zeros(0, dtype=torch.bool, device=device), *parts])


def _log_ratio(
    layout: Layout, train: list[Tensor], rollout: list[Tensor], trained: Tensor, validate: bool
) -> Tensor:
    """log p_old − log q, ``[C]``, 0 at masked tokens. ``validate`` waits for the device."""
    flat = []
    for key, values in (("log_probs", train), ("rollout_log_probs", rollout)):
        if values is None or any(value is None for value in values):
            remedy = "Have the rollout record log-probs of every sample; leave skip_actor_forward_only off."
            raise RecordError(f"the hook got no {key}", field=key, remedy=remedy)
        check_row_lengths(key, values, layout.listed_lengths(), "CP-local lists, as Miles slices them.")
        flat.append(torch.cat([trained.new_zeros(0, dtype=torch.float32), *values]).detach())
    log_ratio = torch.where(trained, flat[0] - flat[1], 0.0)
    bad = log_ratio.isnan()
    if validate and bool(bad.any()):
        where = int(bad.nonzero()[0, 0])
        remedy = "Mask tokens whose log-prob is missing."
        raise RecordError(
            "log-prob is not a number at a trained token",
            token=where,
            field="rollout_log_probs",
            remedy=remedy,
        )
    return log_ratio


def _keep(
    settings: Settings, layout: Layout, listed: Tokens, log_ratio: Tensor, masks: Tensor, group: Any
) -> Tensor:
    """Which samples the guards keep, bool ``[B]``."""
    count = len(layout.responses)
    keep = torch.ones(count, dtype=torch.bool, device=log_ratio.device)
    if not settings.guards:
        return keep
    (whole,) = _whole([log_ratio], layout, listed, group)
    sequence = layout.samples().to(whole.device)
    for name, bounds in settings.guards:
        verdict = getattr(guards, name)(whole, sequence, masks, **dict(bounds))
        keep[: verdict.numel()] &= verdict
    return keep


def _whole(columns: list[Tensor], layout: Layout, listed: Tokens, group: Any) -> list[Tensor]:
    full = torch.zeros(len(columns), sum(layout.responses), dtype=columns[0].dtype, device=columns[0].device)
    full[:, listed.flat(layout).to(full.device)] = torch.stack(columns)
    return list(all_reduce(full, group).unbind(0))


def _metrics(
    settings: Settings, log_ratio: Tensor, weight: Tensor, trained: Tensor, keep: Tensor
) -> dict[str, Tensor]:
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    low, high = (math.log(bound) if bound > 0 else -math.inf for bound in settings.band)
    columns = {
        "kl_k1": -log_ratio,
        "kl_k3": ratio - 1.0 - log_ratio.clamp(max=LARGEST_LOG_RATIO),
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "weight": weight,
        "kept": weight > 0,
        "out_of_band": (log_ratio < low) | (log_ratio > high),
        "sequence_kept": keep,
    }
    return {f"offpolicy_corr/{k}": torch.where(trained, v.to(ratio.dtype), 0.0) for k, v in columns.items()}
