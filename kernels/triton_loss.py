"""`visit` on the device: the fused loss of a block of logits, whole or vocabulary-parallel."""

from __future__ import annotations

import torch
from torch import Tensor

from offpolicy_corr.kl import KL_ESTIMATORS
from offpolicy_corr.result import FIELDS
from offpolicy_corr.torch_loss import Job

from .fused_loss import fused_loss
from .launch import contiguous, define, on_device_of, sharpness, tiles_for, unrecorded_mass
from .vocab_parallel import shared_statistics
from .weights import FusedRule


def visit(logits: Tensor, job: Job, gradient: Tensor | None) -> Tensor:
    """`offpolicy_corr.dense.visit`: results ``[len(FIELDS), T]`` in fp32, and the gradient where one is wanted.

    One launch; with a process group one for the shard's statistics, two collectives, and one for the rest.
    Nothing waits for the device, and besides the gradient nothing is larger than ``[nnz]``.
    """
    terms, settings, shard = job.terms, job.settings, job.shard
    candidates, correction = terms.candidates, settings.correction
    if gradient is not None and shard.width < gradient.shape[1]:
        gradient[:, shard.width :].zero_()
    rule = FusedRule.of(correction.rule)
    heat = sharpness(terms, logits.device)
    exact_tail = correction.center and candidates is not None and rule.tail_scale_grows
    ids = candidate_logq = offsets = complete = q_tail = statistics = shifted = None
    if candidates is not None:
        ids, offsets = candidates.ids.contiguous(), candidates.offsets.contiguous()
        complete = candidates.complete.contiguous()
        shifted = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        if candidates.logprobs is not None:
            candidate_logq, q_tail = candidates.logprobs.contiguous(), unrecorded_mass(candidates)
    if shard.group is not None:
        floor = correction.tail_floor if exact_tail else None
        stats = shared_statistics(logits, terms, job.trained, shard, heat, floor)
        shifted = stats.candidates if candidates is not None else None
        statistics = torch.stack([stats.peak, stats.total, stats.tail, stats.moment, stats.token])
    results: Tensor = _LOSS(
        logits, gradient, shifted,
        terms.tokens.contiguous(), contiguous(job.trained), terms.logq.contiguous(), terms.advantages.contiguous(),
        terms.scale.contiguous(), heat, contiguous(terms.ref_logprobs),
        ids, candidate_logq, offsets, complete, q_tail, statistics, shard.width, shard.first_id,
        [correction.tail_floor, settings.entropy_coef, settings.kl_coef, *rule.bounds],
        rule.kind, 1 + KL_ESTIMATORS.index(settings.kl_estimator) if settings.kl_coef else 0,
        correction.center, exact_tail,
    )  # fmt: skip
    return results


def _launch(
    logits: Tensor, gradient: Tensor | None, shifted: Tensor | None,
    tokens: Tensor, trained: Tensor | None, logq: Tensor, advantages: Tensor, scale: Tensor, heat: Tensor,
    reference: Tensor | None, ids: Tensor | None, candidate_logq: Tensor | None, offsets: Tensor | None,
    complete: Tensor | None, q_tail: Tensor | None, statistics: Tensor | None, width: int, first_id: int,
    scalars: list[float], rule: int, kl: int, center: bool, exact_tail: bool,
) -> Tensor:  # fmt: skip
    results = torch.empty(len(FIELDS), len(tokens), dtype=torch.float32, device=logits.device)
    strides = logits.stride()
    out_strides = strides if gradient is None else gradient.stride()
    outputs = [] if gradient is None else [gradient]
    tiles = tiles_for(width, logits, *outputs, twice=bool(outputs) and statistics is None)
    if len(tokens):
        with on_device_of(logits):
            fused_loss[(len(tokens),)](
                logits, gradient, results, shifted, tokens, trained, logq, advantages, scale, heat, reference,
                ids, candidate_logq, offsets, complete, q_tail, statistics,
                len(tokens), *strides, *out_strides, width, first_id, *scalars,
                RULE=rule, KL=kl, CENTER=center, ENTROPY=scalars[1] != 0.0, EXACT_TAIL=exact_tail,
                K_BLOCK=tiles.candidates, **tiles.lanes(logits.dtype),
                **tiles.options(logits.dtype, strides[1] == 1 and out_strides[1] == 1),
            )  # fmt: skip
    return results


def _fake(
    logits: Tensor, gradient: Tensor | None, shifted: Tensor | None, tokens: Tensor, *_: object
) -> Tensor:
    return logits.new_empty((len(FIELDS), tokens.shape[0]), dtype=torch.float32)


_LOSS = define(
    "loss",
    "(Tensor logits, Tensor(a!)? gradient, Tensor(b!)? shifted, Tensor tokens, Tensor? trained, Tensor logq, "
    "Tensor advantages, Tensor scale, Tensor heat, Tensor? reference, Tensor? ids, Tensor? candidate_logq, "
    "Tensor? offsets, Tensor? complete, Tensor? q_tail, Tensor? statistics, SymInt width, SymInt first_id, "
    "float[] scalars, int rule, int kl, bool center, bool exact_tail) -> Tensor",
    ("gradient", "shifted"),
    _launch,
    _fake,
)
