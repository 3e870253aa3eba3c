"""`policy_loss`: the function that Miles calls under ``loss_type: custom_loss``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from offpolicy_corr.loss import policy_loss as core_policy_loss
from offpolicy_corr.numerics import safe_mul
from offpolicy_corr.records.errors import RecordError
from offpolicy_corr.records.record import SamplerRecord
from offpolicy_corr.result import PolicyLoss

from .candidates import read_candidates, spread
from .host import (
    GROUP_KEY,
    LAG_KEY,
    STEP_TOKENS_KEY,
    Batch,
    all_reduce,
    check_row_lengths,
    group_of,
    need_per_sample,
    parallel_state,
)
from .layout import Layout, Tokens
from .options import drops_count, filters, refusals
from .report import Report
from .settings import Settings, SettingsError
from .weighting import keep_sequences, reducer_weights, share_of_kept

Reducer = Callable[[Tensor], Tensor]


def policy_loss(
    args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """The corrected loss of one micro-batch, reduced as Miles reduces, and its metrics.

    Set ``loss_type: custom_loss``, ``custom_loss_function_path: offpolicy_corr.integrations.miles.policy_loss`` and an
    ``offpolicy_corr:`` mapping (`Settings`) in the YAML of ``--custom-config-path``.

    Args:
        args: Miles' arguments. Read are ``offpolicy_corr``, ``qkv_format``, ``allgather_cp``, ``rollout_temperature``,
            ``rollout_top_p``, ``rollout_top_k``, ``vocab_size``, ``entropy_coef``, ``use_kl_loss``, ``kl_loss_coef``,
            ``kl_loss_type``, and the options that `refusals` names.
        batch: as Miles' ``get_batch`` makes it; never modified.
        logits: this rank's raw logits, before temperature: ``[1, T, V/TP]`` (thd) or ``[B, L, V/TP]`` (bshd), tail
            padding included; fp32 from Megatron, bf16 from torch-native trainers, fp64 in tests. The only
            differentiable input, written to only with ``inplace_logits``.
        sum_of_sample_mean: Miles' reducer, linear in its argument: what it multiplies each token by is taken from it,
            so that per-sample means, per-rollout means and per-token sums all hold.

    Returns:
        The 0-d loss, before Miles' own scaling, connected to ``logits`` on every rank; and detached 0-d sums under a
        set of keys that depends on ``args`` alone (`report`).

    Raises:
        SettingsError: options that contradict the loss, before anything is computed.
        RecordError: a key that the batch lacks (with the versions of Miles that carry it and a remedy), or a bad
            record; names the sample and its response token.
        ValueError: logits that make a trained token's loss non-finite.
    """
    settings = _settings(args)
    state = parallel_state()
    report = Report.of(args, settings)
    if not state.is_pp_last_stage:
        return 0.0 * logits.sum(dtype=torch.float32), report.nothing(logits)
    layout = Layout.of(args, batch, logits, state.cp.rank, state.cp.size)
    inputs = _read(args, settings, batch, layout, logits, sum_of_sample_mean, group_of(state.cp))
    out = _evaluate(args, settings, layout, inputs, logits, group_of(state.tp))
    rows = inputs.held.rows.to(logits.device)
    tokens = replace(out.diagnostics, **{name: value[rows] for name, value in vars(out.diagnostics).items()})
    cp_group = group_of(state.cp)
    weights = inputs.weights
    keep = keep_sequences(settings, layout, inputs, tokens, cp_group)
    if keep is not None:
        weights = torch.where(keep[inputs.held.sample.to(keep.device)], weights, 0.0)
    if settings.denominator == "kept":
        weights = weights * share_of_kept(layout, inputs, tokens.kept, cp_group)
    loss = safe_mul(weights, out.loss[rows]).sum()
    metrics = report.of_tokens(loss, tokens, inputs, weights, keep)
    if drops_count(args):
        loss = loss * (state.intra_dp.size / _step_tokens(batch, len(layout.responses)))
    return loss, metrics


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the batch says about the ``held`` tokens, in their order, on the logits' device.

    ``trained`` bool and ``weights`` (what the reducer multiplies by) are 0 at masked positions; ``full_mask`` bool is
    over full responses laid end to end, on the CPU.
    """

    held: Tokens
    trained: Tensor
    weights: Tensor
    record: SamplerRecord
    advantages: Tensor
    reference: Tensor | None
    groups: Tensor | None
    full_mask: Tensor
    full_lag: Tensor | None


def _settings(args: Any) -> Settings:
    settings = Settings.of(getattr(args, "offpolicy_corr", None))
    problems = refusals(args, settings)
    if problems:
        raise SettingsError("this loss must not run as configured:\n- " + "\n- ".join(problems))
    return settings


def _read(
    args: Any, settings: Settings, batch: Batch, layout: Layout, logits: Tensor, reducer: Reducer, group: Any
) -> Inputs:
    held, device = layout.held(), logits.device
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    count = len(layout.responses)
    masks = need_per_sample(batch, "loss_masks", count)
    check_row_lengths(
        "loss_masks", masks, layout.responses, "The mask must grow with the response (partial rollouts)."
    )
    tokens = need_per_sample(batch, "unconcat_tokens", count)
    check_row_lengths("unconcat_tokens", tokens, layout.totals, "Prompt and response, whole.")
    # replace, never multiply: what a masked position holds may be anything
    columns = [reducer_weights(reducer, layout, dtype, device)]
    columns += [_listed(batch, layout, key).to(device, dtype) for key in _listed_keys(args)]
    columns = _where_rows_are(columns, layout, held, group)
    full_mask = _cpu(masks) != 0
    flat = held.flat(layout)
    trained = full_mask[flat].to(device)
    weights = columns[0]
    sampled = [
        tokens_i[-length:] if length else tokens_i[:0]
        for tokens_i, length in zip(tokens, layout.responses, strict=True)
    ]
    ids = _cpu(sampled)[flat].long()
    kind = settings.kind_of_candidates(filters(args))
    candidates = read_candidates(batch, layout, held, full_mask, kind, settings.correction.center)
    record = SamplerRecord(
        ids.to(device),
        columns[1],
        None if candidates is None else candidates.to(device),
        float(args.rollout_temperature),
    )
    groups = _groups(batch, layout, flat, full_mask, settings)
    return Inputs(
        held,
        trained,
        weights,
        record,
        columns[2],
        columns[3] if len(columns) > 3 else None,
        None if groups is None else groups.to(device),
        full_mask,
        _lags(batch, layout, full_mask, settings),
    )


def _listed_keys(args: Any) -> list[str]:
    return ["rollout_log_probs", "advantages"] + (
        ["ref_log_probs"] if getattr(args, "use_kl_loss", False) else []
    )


def _listed(batch: Batch, layout: Layout, key: str) -> Tensor:
    """A CP-local list, end to end."""
    values = need_per_sample(batch, key, len(layout.responses))
    remedy = "The list must be sliced as Miles slices it for this context-parallel rank, and no further."
    check_row_lengths(key, values, layout.listed_lengths(), remedy)
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


def _where_rows_are(columns: list[Tensor], layout: Layout, held: Tokens, group: Any) -> list[Tensor]:
    """Per-token numbers, from the order of the lists to the ranks and order of the rows."""
    if not layout.allgather:
        return columns
    full = torch.zeros(len(columns), sum(layout.responses), dtype=columns[0].dtype, device=columns[0].device)
    full[:, layout.listed().flat(layout).to(full.device)] = torch.stack(columns)
    all_reduce(full, group)
    return list(full[:, held.flat(layout).to(full.device)].unbind(0))


def _groups(
    batch: Batch, layout: Layout, flat: Tensor, full_mask: Tensor, settings: Settings
) -> Tensor | None:
    """Index of each held token's sampler group; 0 where it is not trained."""
    if not settings.groups:
        return None
    key = GROUP_KEY
    values = need_per_sample(batch, key, len(layout.responses), "and groups are configured")
    check_row_lengths(key, values, layout.responses, "One group index for every response token.")
    group = torch.cat(
        [torch.zeros(0, dtype=torch.int64), *(torch.as_tensor(value).long() for value in values)]
    )
    bad = full_mask & ((group < 0) | (group >= len(settings.groups)))
    if bool(bad.any()):
        value = int(group[bad][0])
        remedy = f"groups names {len(settings.groups)}: {', '.join(settings.groups)}."
        raise RecordError("a token of an unknown group", field=key, value=value, remedy=remedy)
    return torch.where(full_mask, group, 0)[flat]


def _step_tokens(batch: Batch, count: int) -> int:
    """The trained tokens of the whole step, which Miles divides by on Megatron and nowhere else."""
    why = "and calculate_per_token_loss divides by it"
    tokens = {int(value[0]) for value in need_per_sample(batch, STEP_TOKENS_KEY, count, why)}
    if len(tokens) > 1:
        remedy = "A micro-batch belongs to one step: was the batch cut otherwise than Miles cuts it?"
        raise RecordError(
            "token counts of several steps", field=STEP_TOKENS_KEY, value=sorted(tokens), remedy=remedy
        )
    return max([1, *tokens])


def _lags(batch: Batch, layout: Layout, full_mask: Tensor, settings: Settings) -> Tensor | None:
    """Versions behind the batch's newest, int64 over full responses; None where no guard reads it."""
    if not settings.guards_staleness():
        return None
    values = need_per_sample(batch, LAG_KEY, len(layout.responses), "and the staleness guard is configured")
    check_row_lengths(LAG_KEY, values, layout.responses, "One lag for every response token.")
    lag = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.as_tensor(value).long() for value in values)])
    if bool((full_mask & (lag < 0)).any()):
        remedy = "Samplers must report numbered weight versions; 'default' means that nobody named one."
        raise RecordError(
            "a trained token declares no weight version", field=LAG_KEY, value=-1, remedy=remedy
        )
    return lag


def _evaluate(
    args: Any, settings: Settings, layout: Layout, inputs: Inputs, logits: Tensor, tp_group: Any
) -> PolicyLoss:
    """The core's loss over all local rows: those of prompts and padding are masked, so nothing is sliced or copied."""
    size, rows = layout.local_rows, inputs.held.rows.to(logits.device)

    def at_rows(values: Tensor) -> Tensor:
        return values.new_zeros(size).index_copy_(0, rows, values)

    record = inputs.record
    candidates = record.candidates
    assert record.logprobs is not None
    widened = SamplerRecord(
        at_rows(record.tokens),
        at_rows(record.logprobs),
        None if candidates is None else spread(candidates, rows, size),
        record.temperature,
    )
    use_kl = bool(getattr(args, "use_kl_loss", False)) and float(getattr(args, "kl_loss_coef", 0.0)) != 0.0
    assert inputs.reference is not None or not use_kl
    try:
        return core_policy_loss(
            logits.reshape(size, logits.shape[-1]),
            widened,
            at_rows(inputs.advantages),
            correction=settings.correction,
            loss_mask=at_rows(inputs.trained),
            reduction="none",
            sequence_ids=at_rows(inputs.held.sample.to(logits.device)),
            entropy_coef=float(getattr(args, "entropy_coef", 0.0) or 0.0),
            kl_coef=float(args.kl_loss_coef) if use_kl else 0.0,
            kl_estimator=args.kl_loss_type if use_kl else "k3",
            ref_logprobs=at_rows(inputs.reference) if use_kl and inputs.reference is not None else None,
            process_group=tp_group,
            vocab_size=settings.vocab_size or getattr(args, "vocab_size", None),
            backend=settings.backend,
            inplace=settings.inplace_logits,
            validate=settings.validate,
        )
    except RecordError as error:
        raise _in_response(error, inputs.held) from None
    except ValueError as error:
        raise ValueError(_recount(str(error), inputs.held)) from None


def _in_response(error: RecordError, held: Tokens) -> RecordError:
    """The same error with the token counted within its response, and what a too small vocabulary may mean."""
    token, sample = error.token, error.sample
    if token is not None:
        at = (held.rows == token).nonzero()
        if at.numel():
            token, sample = int(held.position[at[0, 0]]), int(held.sample[at[0, 0]])
    remedy = error.remedy or ""
    if error.field in ("tokens", "candidates.ids") and "id outside" in error.problem:
        remedy += (
            " Miles may have set args.vocab_size to the tokenizer's, which leaves added tokens out: set "
            "offpolicy_corr.vocab_size to the model's."
        )
    return RecordError(
        error.problem, sample=sample, token=token, field=error.field, value=error.value, remedy=remedy or None
    )


def _recount(message: str, held: Tokens) -> str:
    """The core counts rows of the packed logits; readers count tokens of a response."""

    def replace_token(found: re.Match[str]) -> str:
        at = (held.rows == int(found[2])).nonzero()
        return f"{found[1]}, response token {int(held.position[at[0, 0]])}" if at.numel() else found[0]

    return re.sub(r"(sample \d+), token (\d+)", replace_token, message)


def _cpu(values: list[Any]) -> Tensor:
    """A list of all samples, end to end, on the CPU: the device is waited for once."""
    return (
        torch.cat([torch.as_tensor(value).detach() for value in values]).cpu() if values else torch.zeros(0)
    )
