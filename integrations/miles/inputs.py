"""Adapter: what a batch of Miles says about the response tokens of one rank, checked and in one order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from offpolicy_corr.integrations._common.collectives import all_reduce, raise_together
from offpolicy_corr.integrations._common.errors import check_row_lengths
from offpolicy_corr.integrations._common.layout import ResponseTokens, RowLayout
from offpolicy_corr.integrations._common.reducer import Reducer, reducer_weights
from torch import Tensor

from offpolicy_corr.numerics import compute_dtype
from offpolicy_corr.records.errors import RecordError
from offpolicy_corr.records.record import SamplerRecord
from offpolicy_corr.settings import Settings

from .candidates import read_candidates
from .host import GROUP_KEY, LAG_KEY, STEP_TOKENS_KEY, Batch, need_per_sample
from .options import drops_count, filters


@dataclass(frozen=True, eq=False)
class Inputs:
    """Numbers of the response ``tokens`` whose rows this rank's logits hold, in their order, on the logits' device.

    Args:
        is_trained: bool; False where ``loss_masks`` is 0. What stands there is never looked at.
        weights: what Miles' reducer multiplies each token by; 0 where it is not trained.
        record: tokens, log q and candidates.
        advantages, ref_logprobs: ``ref_logprobs`` is None without ``use_kl_loss``.
        groups: index of each token's sampler group, None without groups.
        full_mask: bool, trained tokens of full responses laid end to end, CPU.
        lag: int64, how many weight versions the sampler of each token was behind the newest sampler; None where no
            guard reads it. ``full_lag``: the same of full responses, CPU.
        step_tokens: trained tokens of the whole optimizer step, None where Miles divides by them itself.
    """

    tokens: ResponseTokens
    is_trained: Tensor
    weights: Tensor
    record: SamplerRecord
    advantages: Tensor
    ref_logprobs: Tensor | None
    groups: Tensor | None
    full_mask: Tensor
    lag: Tensor | None
    full_lag: Tensor | None
    step_tokens: int | None


def read_inputs(
    args: Any,
    settings: Settings,
    batch: Batch,
    layout: RowLayout,
    logits: Tensor,
    reducer: Reducer,
    group: dist.ProcessGroup | None,
) -> Inputs:
    """Read a micro-batch. Under all-gather context parallelism one collective over ``group``.

    Raises:
        RecordError: a missing key, lists of another length, half precision, a damaged array.
    """
    tokens, device, count = layout.row_tokens, logits.device, len(layout.responses)
    masks = need_per_sample(batch, "loss_masks", count)
    check_row_lengths(
        "loss_masks", masks, layout.responses, "The mask must grow with the response (partial rollouts)."
    )
    columns = _columns(args, batch, layout, logits, reducer, group)
    full_mask = _cpu(masks) != 0
    index = tokens.index(layout)
    kind = settings.kind_of_candidates(filters(args))
    candidates = read_candidates(batch, layout, tokens, full_mask, kind, settings.correction.center)
    record = SamplerRecord(
        _sampled_ids(batch, layout)[index].to(device),
        columns[1],
        None if candidates is None else candidates.to(device),
        float(args.rollout_temperature),
    )
    groups = _groups(batch, layout, full_mask, settings)
    lag = _lags(batch, layout, full_mask, settings)
    return Inputs(
        tokens,
        full_mask[index].to(device),
        columns[0],
        record,
        columns[2],
        columns[3] if len(columns) > 3 else None,
        None if groups is None else groups[index].to(device),
        full_mask,
        None if lag is None else lag[index].to(device),
        lag,
        _step_tokens(batch, count) if drops_count(args) else None,
    )


def _columns(
    args: Any, batch: Batch, layout: RowLayout, logits: Tensor, reducer: Reducer, group: Any
) -> list[Tensor]:
    """Reducer weights, log q, advantages and, with a reference, its log-probs: one column each, in order of rows."""
    dtype, device = compute_dtype(logits.dtype), logits.device
    keys = ["rollout_log_probs", "advantages"]
    keys += ["ref_log_probs"] if getattr(args, "use_kl_loss", False) else []

    def of_lists() -> list[Tensor]:
        weights = reducer_weights(reducer, len(layout.list_tokens), dtype, device)
        return [weights, *(_list_column(batch, layout, key).to(device, dtype) for key in keys)]

    if not layout.allgather:
        return of_lists()
    # lists and rows are cut differently here: no rank may be missing in the exchange
    columns = raise_together(of_lists, group, device)
    full = columns[0].new_zeros(len(columns), sum(layout.responses))
    full[:, layout.list_tokens.index(layout).to(device)] = torch.stack(columns)
    all_reduce(full, group)
    return list(full[:, layout.row_tokens.index(layout).to(device)].unbind(0))


def _list_column(batch: Batch, layout: RowLayout, key: str) -> Tensor:
    """A context-parallel rank's per-token lists, end to end."""
    values = need_per_sample(batch, key, len(layout.responses))
    remedy = "The list must be sliced as Miles slices it for this context-parallel rank, and no further."
    check_row_lengths(key, values, layout.list_lengths, remedy)
    parts = [value if isinstance(value, Tensor) else torch.as_tensor(value) for value in values]
    for sample, part in enumerate(parts):
        if part.dtype in (torch.float16, torch.bfloat16):
            remedy = (
                "Half precision moves a log-prob of −9.77 by 0.02: keep float32, without true_on_policy_mode."
            )
            raise RecordError(
                "half-precision values", sample=sample, field=key, value=part.dtype, remedy=remedy
            )
    return torch.cat([part.detach() for part in parts]) if parts else torch.zeros(0)


def _sampled_ids(batch: Batch, layout: RowLayout) -> Tensor:
    """Response tokens of all samples, end to end, int64, CPU."""
    tokens = need_per_sample(batch, "unconcat_tokens", len(layout.responses))
    check_row_lengths("unconcat_tokens", tokens, layout.totals, "Prompt and response, whole.")
    whole = zip(tokens, layout.responses, strict=True)
    return _cpu([ids[len(ids) - length :] for ids, length in whole]).long()


def _groups(batch: Batch, layout: RowLayout, full_mask: Tensor, settings: Settings) -> Tensor | None:
    """Index of each response token's sampler group, 0 where it is not trained; None without groups."""
    if not settings.groups:
        return None
    group = _full_integers(batch, layout, GROUP_KEY, "and groups are configured")
    bad = full_mask & ((group < 0) | (group >= len(settings.groups)))
    if bool(bad.any()):
        remedy = f"groups names {len(settings.groups)}: {', '.join(settings.groups)}."
        raise _at_first(bad, layout, "a token of an unknown group", GROUP_KEY, group, remedy)
    return torch.where(full_mask, group, 0)


def _lags(batch: Batch, layout: RowLayout, full_mask: Tensor, settings: Settings) -> Tensor | None:
    """Versions behind the newest sampler, int64 over full responses; None where no guard reads them."""
    if not settings.guards_sampler_lag():
        return None
    lag = _full_integers(batch, layout, LAG_KEY, "and the guard behind_newest_sampler is configured")
    bad = full_mask & (lag < 0)
    if bool(bad.any()):
        remedy = "Samplers must report numbered weight versions; 'default' means that nobody named one."
        raise _at_first(bad, layout, "a trained token declares no weight version", LAG_KEY, lag, remedy)
    return lag


def _full_integers(batch: Batch, layout: RowLayout, key: str, why: str) -> Tensor:
    """A key with one integer for every response token, all samples end to end, int64, CPU."""
    values = need_per_sample(batch, key, len(layout.responses), why)
    check_row_lengths(key, values, layout.responses, "One integer for every response token.")
    return _cpu(values).long()


def _at_first(
    bad: Tensor, layout: RowLayout, problem: str, field: str, values: Tensor, remedy: str
) -> RecordError:
    """The error of the first bad token of full responses."""
    at = int(bad.nonzero()[0, 0])
    sample = int(layout.samples[at])
    token = at - int(layout.starts[sample])
    return RecordError(problem, sample=sample, token=token, field=field, value=int(values[at]), remedy=remedy)


def _step_tokens(batch: Batch, count: int) -> int:
    """Trained tokens of the whole step, which Miles divides by on Megatron and nowhere else."""
    why = "and calculate_per_token_loss divides by it"
    tokens = {int(value[0]) for value in need_per_sample(batch, STEP_TOKENS_KEY, count, why)}
    if len(tokens) > 1:
        remedy = "A micro-batch belongs to one step: was the batch cut otherwise than Miles cuts it?"
        raise RecordError(
            "token counts of several steps", field=STEP_TOKENS_KEY, value=sorted(tokens), remedy=remedy
        )
    return max([1, *tokens])


def _cpu(values: list[Any]) -> Tensor:
    """A list of all samples, end to end, on the CPU: the device is waited for once."""
    return (
        torch.cat([torch.as_tensor(value).detach() for value in values]).cpu() if values else torch.zeros(0)
    )
