"""Adapter: `tis_function`, importance sampling inside Miles' own policy loss, for ``--custom-tis-function-path``.

The hook sees log-probs alone, so there is MIS, TIS and sequence guards here, and no centering. Both denominators are
put into ``pg_loss`` and the masks are returned as they came: what Miles divides by when a mask shrinks differs between
its Megatron backend (the whole rollout) and its torch-native one (what is left of the mask).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from offpolicy_corr.integrations._common.collectives import raise_together
from offpolicy_corr.integrations._common.errors import check_row_lengths
from offpolicy_corr.integrations._common.layout import RowLayout
from torch import Tensor

from offpolicy_corr.records.errors import RecordError
from offpolicy_corr.settings import Settings

from .host import group_of
from .layout import list_layout
from .metrics import PREFIX, mismatch
from .option_check import refuse
from .options import TIS
from .sequence_weights import Responses, growth_of_kept, keep_samples


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
    refuse(args, settings, TIS, "tis_function")
    group, device = group_of(parallel_state.cp), pg_loss.device

    def read() -> tuple[Responses, Tensor, Tensor]:
        layout = list_layout(
            args,
            total_lengths,
            response_lengths,
            max_seq_lens,
            parallel_state.cp.rank,
            parallel_state.cp.size,
        )
        full_mask = _full_mask(loss_masks, layout.responses, device)
        is_trained = full_mask[layout.list_tokens.index(layout).to(device)]
        log_ratio = _log_ratio(layout, train_log_probs, rollout_log_probs, is_trained, settings.validate)
        return Responses(layout, layout.list_tokens, full_mask, group), is_trained, log_ratio

    responses, is_trained, log_ratio = raise_together(read, group, device)
    weight = settings.correction.rule.weight(log_ratio, torch.ones_like(log_ratio))
    weight = torch.where(is_trained, weight, 0.0)
    keep = keep_samples(settings, responses, log_ratio)
    sample_kept = torch.ones_like(is_trained) if keep is None else responses.of_tokens(keep)
    columns = {**mismatch(log_ratio, weight, settings.band), "sequence_kept": sample_kept}
    metrics = {
        PREFIX + key: torch.where(is_trained, value.to(weight.dtype), 0.0) for key, value in columns.items()
    }
    if not getattr(args, "use_tis", True):
        return pg_loss, loss_masks, metrics
    factor = torch.where(sample_kept, weight, 0.0)
    if settings.denominator == "kept":
        factor = factor * growth_of_kept(responses, weight > 0, weight.dtype)
    # replaced, not multiplied: at a masked token the loss itself may be NaN
    clean = torch.where(factor > 0, pg_loss, torch.zeros((), dtype=pg_loss.dtype, device=device))
    return clean * factor.to(pg_loss.dtype), loss_masks, metrics


def _full_mask(loss_masks: list[Tensor], responses: Sequence[int], device: torch.device) -> Tensor:
    check_row_lengths(
        "loss_masks", loss_masks, responses, "The mask must grow with the response (partial rollouts)."
    )
    parts = [torch.as_tensor(mask).to(device) != 0 for mask in loss_masks]
    return torch.cat([torch.zeros(0, dtype=torch.bool, device=device), *parts])


def _log_ratio(
    layout: RowLayout, train: list[Tensor], rollout: list[Tensor], is_trained: Tensor, validate: bool
) -> Tensor:
    """log p_old − log q, ``[C]``, 0 at masked tokens. ``validate`` waits for the device."""
    columns = []
    for key, values in (("log_probs", train), ("rollout_log_probs", rollout)):
        if values is None or any(value is None for value in values):
            remedy = "Have the rollout record log-probs of every sample; leave skip_actor_forward_only off."
            raise RecordError(f"the hook got no {key}", field=key, remedy=remedy)
        check_row_lengths(key, values, layout.list_lengths, "CP-local lists, as Miles slices them.")
        columns.append(torch.cat([is_trained.new_zeros(0, dtype=torch.float32), *values]).detach())
    log_ratio = torch.where(is_trained, columns[0] - columns[1], 0.0)
    bad = log_ratio.isnan()
    if validate and bool(bad.any()):
        at = int(bad.nonzero()[0, 0])
        raise RecordError(
            "log-prob is not a number at a trained token",
            sample=int(layout.list_tokens.sample[at]),
            token=int(layout.list_tokens.position[at]),
            field="rollout_log_probs",
            remedy="Mask tokens whose log-prob is missing.",
        )
    return log_ratio
