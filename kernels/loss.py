"""`visit` on the device: the fused loss of a block of logits, whole or vocabulary-parallel."""

from __future__ import annotations

import torch
from torch import Tensor

from offpolicy_corr.dense import Job
from offpolicy_corr.regularizers import KL_ESTIMATORS
from offpolicy_corr.result import FIELDS

from .fused import fused_loss
from .launch import contiguous, on_device_of, sharpness, tiles_for, unrecorded_mass
from .rules import FusedRule
from .shards import shared_statistics


def visit(logits: Tensor, job: Job, gradient: Tensor | None) -> Tensor:
    """`offpolicy_corr.dense.visit`: results ``[len(FIELDS), T]`` in fp32, and the gradient where one is wanted.

    One launch; with a process group one for the shard's statistics, two collectives, and one for the rest.
    Nothing waits for the device, and besides the gradient nothing is larger than ``[nnz]``.
    """
    terms, settings, shard = job.terms, job.settings, job.shard
    candidates, correction = terms.candidates, settings.correction
    results = torch.empty(len(FIELDS), len(terms), dtype=torch.float32, device=logits.device)
    if gradient is not None and shard.width < gradient.shape[1]:
        gradient[:, shard.width :].zero_()
    if len(terms) == 0:
        return results
    rule = FusedRule.of(correction.weight)
    heat = sharpness(terms, logits.device)
    ids = candidate_logq = offsets = complete = q_tail = statistics = shifted = None
    if candidates is not None:
        ids, offsets, complete = (
            x.contiguous() for x in (candidates.ids, candidates.offsets, candidates.complete)
        )
        shifted = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        if candidates.logprobs is not None:
            candidate_logq, q_tail = candidates.logprobs.contiguous(), unrecorded_mass(candidates)
    exact_tail = correction.center and candidates is not None and rule.tail_scale_grows
    if shard.group is not None:
        floor = correction.tail_floor if exact_tail else None
        stats = shared_statistics(logits, terms, job.trained, shard, heat, floor)
        shifted = stats.candidates
        statistics = torch.stack([stats.peak, stats.total, stats.tail, stats.moment, stats.token])
    strides = logits.stride()
    out_strides = strides if gradient is None else gradient.stride()
    tiles = tiles_for(logits.dtype, shard.width)
    with on_device_of(logits):
        fused_loss[(len(terms),)](
            logits, gradient, results, shifted,
            terms.tokens.contiguous(), contiguous(job.trained), terms.logq.contiguous(), terms.advantages.contiguous(),
            terms.scale.contiguous(), heat, contiguous(terms.ref_logprobs),
            ids, candidate_logq, offsets, complete, q_tail, statistics,
            len(terms), *strides, *out_strides, shard.width, shard.first_id,
            correction.tail_floor, settings.entropy_coef, settings.kl_coef, *rule.bounds,
            RULE=rule.kind,
            KL=1 + KL_ESTIMATORS.index(settings.kl_estimator) if settings.kl_coef else 0,
            CENTER=correction.center,
            ENTROPY=settings.entropy_coef != 0.0,
            EXACT_TAIL=exact_tail,
            CONTIGUOUS=strides[1] == 1 and out_strides[1] == 1,
            **tiles.options,
        )  # fmt: skip
    return results
