"""Adapter: `policy_loss`, the function that Miles calls under ``loss_type: custom_loss``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from offpolicy_corr.integrations._common.collectives import raise_together
from offpolicy_corr.integrations._common.errors import in_response, message_in_response
from offpolicy_corr.integrations._common.layout import RowLayout
from offpolicy_corr.integrations._common.ragged import scatter_rows
from offpolicy_corr.integrations._common.reducer import Reducer
from torch import Tensor

from offpolicy_corr.loss import policy_loss as core_policy_loss
from offpolicy_corr.numerics import safe_mul
from offpolicy_corr.records.errors import RecordError
from offpolicy_corr.records.record import SamplerRecord
from offpolicy_corr.result import PolicyLoss
from offpolicy_corr.settings import Settings

from .host import Batch, group_of, parallel_state
from .inputs import Inputs, read_inputs
from .layout import row_layout
from .metrics import Metrics
from .option_check import refuse
from .options import LOSS
from .sequence_weights import Responses, growth_of_kept, keep_samples
from .step_tokens import divide_by_step_tokens


def policy_loss(
    args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """The corrected loss of one micro-batch, reduced as Miles reduces, and its metrics.

    Set ``loss_type: custom_loss``, ``custom_loss_function_path: offpolicy_corr.integrations.miles.policy_loss`` and an
    ``offpolicy_corr:`` mapping (`Settings`) in the YAML of ``--custom-config-path``.

    Args:
        args: Miles' arguments. Read are ``offpolicy_corr``, ``qkv_format``, ``allgather_cp``, ``rollout_temperature``,
            ``rollout_top_p``, ``rollout_top_k``, ``vocab_size``, ``entropy_coef``, ``use_kl_loss``, ``kl_loss_coef``,
            ``kl_loss_type``, and the options of `option_table` and `option_rules`.
        batch: as Miles' ``get_batch`` makes it; never modified.
        logits: this rank's raw logits, before temperature: ``[1, T, V/TP]`` (thd) or ``[B, L, V/TP]`` (bshd), tail
            padding included; fp32 from Megatron, bf16 from torch-native trainers, fp64 in tests. The only
            differentiable input, written to only with ``inplace_logits``.
        sum_of_sample_mean: Miles' reducer, linear in its argument: what it multiplies each token by is taken from it,
            so that per-sample means, per-rollout means and per-token sums all hold.

    Returns:
        The 0-d loss, before Miles' own scaling, connected to ``logits`` on every rank; and detached 0-d sums under a
        set of keys that depends on ``args`` alone (`Metrics`).

    Raises:
        SettingsError: options that contradict the loss, before anything is computed.
        RecordError: a key that the batch lacks (with the versions of Miles that carry it and a remedy), or a bad
            record; names the sample and its response token.
        ValueError: logits that make a trained token's loss non-finite.
        UnknownVersion: a torch-native trainer that may divide by tokens itself.

        What one context-parallel rank finds is raised on all of them.
    """
    settings = _settings(args)
    state = parallel_state()
    metrics = Metrics.of(args, settings)
    if not state.is_pp_last_stage:
        return 0.0 * logits.sum(dtype=torch.float32), metrics.nothing(logits)
    cp_group, tp_group = group_of(state.cp), group_of(state.tp)

    def token_losses() -> tuple[RowLayout, Inputs, PolicyLoss]:
        layout = row_layout(args, batch, logits, state.cp.rank, state.cp.size)
        inputs = read_inputs(args, settings, batch, layout, logits, sum_of_sample_mean, cp_group)
        return layout, inputs, _evaluate(args, settings, layout, inputs, logits, tp_group)

    layout, inputs, out = raise_together(token_losses, cp_group, logits.device)
    rows = inputs.tokens.rows.to(logits.device)
    diagnostics = replace(
        out.diagnostics, **{name: value[rows] for name, value in vars(out.diagnostics).items()}
    )
    responses = Responses(layout, inputs.tokens, inputs.full_mask.to(logits.device), cp_group)
    weights = inputs.weights
    keep = keep_samples(settings, responses, diagnostics.log_ratio, inputs.advantages, inputs.full_lag)
    sample_kept = None if keep is None else responses.of_tokens(keep)
    if sample_kept is not None:
        weights = torch.where(sample_kept, weights, 0.0)
    if settings.denominator == "kept":
        weights = weights * growth_of_kept(responses, diagnostics.kept, weights.dtype)
    loss = safe_mul(weights, out.loss[rows]).sum()
    found = metrics.of_tokens(loss, diagnostics, inputs, weights, sample_kept)
    if inputs.step_tokens is not None:
        loss = divide_by_step_tokens(loss, inputs.step_tokens, state.intra_dp.size)
    return loss, found


def _settings(args: Any) -> Settings:
    settings = Settings.of(getattr(args, "offpolicy_corr", None))
    refuse(args, settings, LOSS, "this loss")
    return settings


def _evaluate(
    args: Any,
    settings: Settings,
    layout: RowLayout,
    inputs: Inputs,
    logits: Tensor,
    tp_group: dist.ProcessGroup | None,
) -> PolicyLoss:
    """The core's loss over all local rows: those of prompts and padding are masked, so nothing is sliced or copied."""
    size, rows = layout.local_rows, inputs.tokens.rows.to(logits.device)

    def at_rows(values: Tensor) -> Tensor:
        return values.new_zeros(size).index_copy_(0, rows, values)

    record = inputs.record
    assert record.logprobs is not None
    candidates = None if record.candidates is None else scatter_rows(record.candidates, rows, size)
    row_record = SamplerRecord(
        at_rows(record.tokens), at_rows(record.logprobs), candidates, record.temperature
    )
    use_kl = bool(getattr(args, "use_kl_loss", False)) and float(getattr(args, "kl_loss_coef", 0.0)) != 0.0
    try:
        return core_policy_loss(
            logits.reshape(size, logits.shape[-1]),
            row_record,
            at_rows(inputs.advantages),
            correction=settings.correction,
            loss_mask=at_rows(inputs.is_trained),
            reduction="none",
            sequence_ids=at_rows(inputs.tokens.sample.to(logits.device)),
            entropy_coef=float(getattr(args, "entropy_coef", 0.0) or 0.0),
            kl_coef=float(args.kl_loss_coef) if use_kl else 0.0,
            kl_estimator=args.kl_loss_type if use_kl else "k3",
            ref_logprobs=at_rows(inputs.ref_logprobs) if use_kl and inputs.ref_logprobs is not None else None,
            process_group=tp_group,
            vocab_size=settings.vocab_size or getattr(args, "vocab_size", None),
            backend=settings.backend,
            inplace=settings.inplace_logits,
            validate=settings.validate,
        )
    except RecordError as error:
        raise _explained(in_response(error, inputs.tokens)) from None
    except ValueError as error:
        raise ValueError(message_in_response(str(error), inputs.tokens)) from None


def _explained(error: RecordError) -> RecordError:
    """The same error, and what a vocabulary that is too small may mean under Miles."""
    if error.field not in ("tokens", "candidates.ids") or "id outside" not in error.problem:
        return error
    remedy = (
        f"{error.remedy or ''} Miles may have set args.vocab_size to the tokenizer's, which leaves added tokens out: "
        "set offpolicy_corr.vocab_size to the model's."
    )
    return RecordError(
        error.problem,
        sample=error.sample,
        token=error.token,
        field=error.field,
        value=error.value,
        remedy=remedy,
    )
