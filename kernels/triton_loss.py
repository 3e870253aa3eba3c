"""Row passes: the fused loss on the device, of a whole vocabulary or of a shard of it.

The PyTorch twin is `offpolicy_corr.torch_loss`; the kernel is `fused_loss`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offpolicy_corr.kl import KL_ESTIMATORS
from offpolicy_corr.loss_inputs import LossProblem
from offpolicy_corr.result import FIELDS

from .fused_loss import fused_loss
from .launch import contiguous, define, log2e_over_temperature, on_device_of, sampler_tail_mass, tiles_for
from .vocab_parallel import shared_row_stats
from .weights import FusedRule


def loss_and_grad(logits: Tensor, problem: LossProblem, gradient: Tensor | None) -> Tensor:
    """As the twin's: results ``[len(FIELDS), T]`` in fp32, and the gradient where one is wanted.

    One launch; with a process group one for the shard's sums, two collectives, and one for the rest.
    Nothing waits for the device, and besides the gradient nothing is larger than ``[nnz]``.
    """
    inputs, config, shard = problem.inputs, problem.config, problem.shard
    candidates, correction = inputs.candidates, config.correction
    if gradient is not None and shard.width < gradient.shape[1]:
        gradient[:, shard.width :].zero_()
    rule = FusedRule.of(correction.rule)
    log2e_over_temps = log2e_over_temperature(inputs, logits.device)
    exact_tail = correction.center and candidates is not None and rule.tail_scale_grows
    ids = candidate_logq = offsets = complete = sampler_tail = row_stats = candidate_logits = None
    if candidates is not None:
        ids, offsets = candidates.ids.contiguous(), candidates.offsets.contiguous()
        complete = candidates.complete.contiguous()
        candidate_logits = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        if candidates.logprobs is not None:
            candidate_logq, sampler_tail = candidates.logprobs.contiguous(), sampler_tail_mass(candidates)
    if shard.group is not None:
        floor = correction.tail_floor if exact_tail else None
        stats = shared_row_stats(logits, inputs, problem.trained, shard, log2e_over_temps, floor)
        candidate_logits = stats.candidate_logits if candidates is not None else None
        row_stats = torch.stack(
            [stats.row_max, stats.sum_exp, stats.tail_sum_exp, stats.sum_d_exp, stats.token_logit]
        )
    results: Tensor = _LOSS(
        logits, gradient, candidate_logits, inputs.tokens.contiguous(), contiguous(problem.trained),
        inputs.logq.contiguous(), inputs.advantages.contiguous(), inputs.scale.contiguous(), log2e_over_temps,
        contiguous(inputs.ref_logprobs), ids, candidate_logq, offsets, complete, sampler_tail, row_stats,
        shard.width, shard.first_id, [correction.tail_floor, config.entropy_coef, config.kl_coef, *rule.bounds],
        rule.kind, 1 + KL_ESTIMATORS.index(config.kl_estimator) if config.kl_coef else 0,
        correction.center, exact_tail,
    )  # fmt: skip
    return results


def _launch(
    logits: Tensor, gradient: Tensor | None, candidate_logits: Tensor | None, tokens: Tensor, trained: Tensor | None,
    logq: Tensor, advantages: Tensor, scale: Tensor, log2e_over_temps: Tensor, ref_logprobs: Tensor | None,
    ids: Tensor | None, candidate_logq: Tensor | None, offsets: Tensor | None, complete: Tensor | None,
    sampler_tail: Tensor | None, row_stats: Tensor | None, width: int, first_id: int,
    scalars: list[float], rule: int, kl: int, center: bool, exact_tail: bool,
) -> Tensor:  # fmt: skip
    results = torch.empty(len(FIELDS), len(tokens), dtype=torch.float32, device=logits.device)
    strides = logits.stride()
    out_strides = strides if gradient is None else gradient.stride()
    outputs = [] if gradient is None else [gradient]
    tiles = tiles_for(width, logits, *outputs, twice=bool(outputs) and row_stats is None)
    if len(tokens):
        with on_device_of(logits):
            fused_loss[(len(tokens),)](
                logits, gradient, results, candidate_logits, tokens, trained, logq, advantages, scale,
                log2e_over_temps, ref_logprobs, ids, candidate_logq, offsets, complete, sampler_tail, row_stats,
                len(tokens), *strides, *out_strides, width, first_id, *scalars,
                RULE=rule, KL=kl, CENTER=center, ENTROPY=scalars[1] != 0.0, EXACT_TAIL=exact_tail,
                K_BLOCK=tiles.candidates, **tiles.lanes(logits.dtype),
                **tiles.options(logits.dtype, strides[1] == 1 and out_strides[1] == 1),
            )  # fmt: skip
    return results


def _fake(
    logits: Tensor, gradient: Tensor | None, candidate_logits: Tensor | None, tokens: Tensor, *_: object
) -> Tensor:
    return logits.new_empty((len(FIELDS), tokens.shape[0]), dtype=torch.float32)


_LOSS = define(
    "loss",
    "(Tensor logits, Tensor(a!)? gradient, Tensor(b!)? candidate_logits, Tensor tokens, Tensor? trained, "
    "Tensor logq, Tensor advantages, Tensor scale, Tensor log2e_over_temps, Tensor? ref_logprobs, Tensor? ids, "
    "Tensor? candidate_logq, Tensor? offsets, Tensor? complete, Tensor? sampler_tail, Tensor? row_stats, "
    "SymInt width, SymInt first_id, float[] scalars, int rule, int kl, bool center, bool exact_tail) -> Tensor",
    ("gradient", "candidate_logits"),
    _launch,
    _fake,
)
