"""Everything that is settled before the trainer's numbers are read: options, checks, per-token constants."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import backend as backends
from .correction import Correction
from .kl import KL_ESTIMATORS
from .loss_inputs import Settings, Terms
from .records.errors import RecordError
from .records.record import SamplerRecord
from .records.validation import (
    LOGPROB_ABOVE_ZERO,
    Check,
    as_mask,
    check_lengths,
    check_record,
    is_integer,
    raise_first,
)
from .reduction import check_reduction, token_scale
from .result import PolicyLoss, as_diagnostics, check_finite
from .torch_loss import Job
from .vocab_parallel import VocabShard

_DEFAULT = Correction()  # made once: torch.compile cannot follow how it is made


@dataclass(frozen=True, eq=False)
class LossOptions:
    """The keywords that all entrances share; documented at `policy_loss`."""

    correction: Correction | None
    loss_mask: Tensor | None
    reduction: str
    sequence_ids: Tensor | None
    sequence_keep: Tensor | None
    denominator: str | float | Tensor | None
    entropy_coef: float
    kl_coef: float
    kl_estimator: str
    ref_logprobs: Tensor | None
    backend: str
    validate: bool

    def settings(self) -> Settings:
        """The settings of every token. Raises ValueError where two options contradict each other."""
        if self.kl_estimator not in KL_ESTIMATORS:
            known = ", ".join(KL_ESTIMATORS)
            raise ValueError(f"kl_estimator must be one of {known}, got {self.kl_estimator!r}")
        if not isinstance(self.correction, Correction | None):
            raise TypeError(
                f"correction must be a Correction, got {self.correction!r}: see Correction.from_name"
            )
        for name in ("entropy_coef", "kl_coef"):
            if not -math.inf < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        if self.kl_estimator != "k3" and not self.kl_coef:
            raise ValueError("kl_estimator has no effect without kl_coef")
        if self.kl_coef and self.ref_logprobs is None:
            raise ValueError("kl_coef needs ref_logprobs, the reference policy's log-probs of the tokens")
        if self.ref_logprobs is not None and not self.kl_coef:
            raise ValueError("ref_logprobs has no effect without kl_coef")
        correction = _DEFAULT if self.correction is None else self.correction
        return Settings(correction, float(self.entropy_coef), float(self.kl_coef), self.kl_estimator)


@dataclass(frozen=True, eq=False)
class Plan:
    """A checked call: the job, who does it, and what happens to its result."""

    job: Job
    backend: str
    reduce: bool
    divide_by_kept: bool
    sequence_ids: Tensor | None
    validate: bool

    def finish(self, loss: Tensor, results: Tensor) -> PolicyLoss:
        """Check the results, divide by the kept tokens where asked, name the diagnostics."""
        if self.validate:
            check_finite(results, self.job.trained, self.job.terms.scale, self.sequence_ids)
        tokens = as_diagnostics(results, self.job.trained)
        if self.divide_by_kept:
            loss = loss / tokens.kept.sum().clamp(min=1)
        return PolicyLoss(loss, tokens)


def prepare(
    record: SamplerRecord,
    advantages: Tensor,
    options: LossOptions,
    shard: VocabShard | None,
    like: Tensor,
    vocab_size: int | None,
) -> Plan:
    """Check a call and settle its constants. ``like`` is the trainer's tensor, ``[T, …]``.

    Raises:
        RecordError: a bad record, a record that lacks what the correction needs.
        ValueError: options that contradict each other or the record; advantages that are not finite.
    """
    if options.validate:
        refuse_capture(like)
    settings = options.settings()
    chosen = backends.choose(options.backend, like, settings.correction.rule)
    check_reduction(options.reduction, options.denominator, options.sequence_ids)
    check_lengths(record)
    _check_shapes(record, advantages, options, like)
    trained = as_mask(options.loss_mask, record.tokens)
    _check_needs(record, settings.correction)
    if options.validate:
        check_record(record, vocab_size, options.loss_mask, options.sequence_ids)
        _check_values(record, advantages, settings, options, trained)
    scale = token_scale(
        options.reduction,
        record.tokens,
        trained,
        options.denominator,
        options.sequence_ids,
        options.sequence_keep,
    )
    reference, logq = options.ref_logprobs, record.logprobs
    if logq is None:
        logq = torch.full(record.tokens.shape, torch.nan, device=record.tokens.device)
    terms = Terms(
        record.tokens,
        logq.detach(),
        advantages.detach(),
        scale,
        record.temperature,
        record.candidates,
        None if reference is None else reference.detach(),
    )
    whole = VocabShard(0, vocab_size or 0, vocab_size or 0) if shard is None else shard
    return Plan(
        Job(terms, trained, settings, whole),
        chosen,
        options.reduction != "none",
        isinstance(options.denominator, str),
        options.sequence_ids,
        options.validate,
    )


def refuse_capture(tensor: Tensor) -> None:
    """Raises RuntimeError where the tensor's stream is being captured into a CUDA graph: checks wait for it."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "validation waits for the device, which a stream capture cannot: pass validate=False"
        )


def _check_shapes(record: SamplerRecord, advantages: Tensor, options: LossOptions, like: Tensor) -> None:
    size = like.shape[0]
    if record.tokens.device != like.device:
        raise RecordError(
            "devices differ",
            field="tokens",
            value=record.tokens.device,
            remedy=f"The trainer's side is on {like.device}: use record.to.",
        )
    if len(record) != size:
        raise RecordError(
            "lengths disagree",
            field="tokens",
            value=len(record),
            remedy=f"The trainer's side has {size} rows: one for each token of the packed row.",
        )
    given = {
        "advantages": advantages,
        "sequence_ids": options.sequence_ids,
        "ref_logprobs": options.ref_logprobs,
    }
    given["loss_mask"] = options.loss_mask
    for name, values in given.items():
        if values is None:
            continue
        if not isinstance(values, Tensor):
            raise TypeError(f"{name} must be a tensor [T], got {type(values).__name__}")
        if values.shape != (size,):
            raise ValueError(f"{name} must be [T] = ({size},), got {tuple(values.shape)}")
        if values.device != record.tokens.device:
            raise ValueError(f"{name} is on {values.device}, the record's tokens on {record.tokens.device}")
    if options.sequence_ids is not None and not is_integer(options.sequence_ids):
        raise ValueError(f"sequence_ids must be integers, int32 or int64, got {options.sequence_ids.dtype}")
    keep = options.sequence_keep
    if keep is not None:
        if options.sequence_ids is None:
            raise ValueError("sequence_keep needs sequence_ids")
        if keep.dtype != torch.bool or keep.dim() != 1:
            raise ValueError(f"sequence_keep must be bool [number of sequences], got {keep.dtype}")


def _check_needs(record: SamplerRecord, correction: Correction) -> None:
    """What the correction needs and the record as a whole does not have."""
    rule = type(correction.rule).__name__
    if getattr(correction.rule, "uses_ratio", True) and record.logprobs is None:
        remedy = "Record the sampler's log-probs, or use Unweighted."
        raise RecordError(f"{rule} weights by p/q and the record has no q", field="logprobs", remedy=remedy)
    if not correction.center:
        return
    if record.candidates is None:
        remedy = "Record a head or a support, or use center=False."
        raise RecordError("a centered loss needs candidates", field="candidates", remedy=remedy)
    if record.candidates.logprobs is None:
        remedy = "Ids alone can be replayed: record their log-probs too, or use center=False."
        raise RecordError(
            "a centered loss needs log-probs of candidates", field="candidates.logprobs", remedy=remedy
        )


def _check_values(
    record: SamplerRecord,
    advantages: Tensor,
    settings: Settings,
    options: LossOptions,
    trained: Tensor | None,
) -> None:
    """Checks that belong to this loss rather than to the record; one host sync."""
    remedy = "Look at how rewards were turned into advantages."
    checks = [Check(~advantages.isfinite(), "advantages", advantages, "advantage is not finite", remedy)]
    if settings.correction.center:
        assert record.candidates is not None
        counts = record.candidates.offsets.diff()
        problem = "a trained token of a centered loss has no candidates"
        remedy = "Record a head for it, mask it, or use center=False."
        checks.append(Check(counts == 0, "candidates.offsets", counts, problem, remedy))
    if options.ref_logprobs is not None:
        bad = ~(options.ref_logprobs.isfinite() & (options.ref_logprobs <= LOGPROB_ABOVE_ZERO))
        problem = "the reference's log-prob is not finite, or above 0"
        remedy = "Mask the token, or use the reference's own support."
        checks.append(Check(bad, "ref_logprobs", options.ref_logprobs, problem, remedy))
    ids = options.sequence_ids
    if ids is not None:
        outside = ids < 0
        if options.sequence_keep is not None:
            outside = outside | (ids >= options.sequence_keep.numel())
        problem = "sequence id is negative, or has no entry in sequence_keep"
        checks.append(Check(outside, "sequence_ids", ids, problem, "Number the sequences from 0."))
    if trained is not None:
        checks = [Check(c.bad & trained, c.field, c.values, c.problem, c.remedy) for c in checks]
    for check, hit in zip(checks, torch.stack([c.bad.any() for c in checks]).tolist(), strict=True):
        if hit:
            raise_first(check, ids)
