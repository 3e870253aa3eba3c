"""Preparation: check a call and build its per-token constants, before the trainer's logits are read."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import backend as backends
from .correction import Correction
from .kl import KL_ESTIMATORS
from .loss_inputs import LossConfig, LossInputs, LossProblem, VocabShard
from .numerics import in_band
from .records.candidates import is_integer
from .records.errors import RecordError, RecordWarning
from .records.record import SamplerRecord
from .records.validation import (
    LOGPROB_ABOVE_ZERO,
    Check,
    as_mask,
    check_lengths,
    check_values,
)
from .reduction import check_reduction, token_scale
from .result import FIELDS, PolicyLoss, as_diagnostics, bad_tokens, raise_not_finite

# a call whose ratios mostly leave this band trains on almost nothing; below so many tokens chance can do it
_WIDE_BAND = (0.2, 5.0)
_TOO_FEW_TO_JUDGE = 16


@dataclass(frozen=True, eq=False)
class LossOptions:
    """The keywords that all entrances share; documented at `policy_loss`."""

    correction: Correction | str | None
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

    def config(self) -> LossConfig:
        """The settings that every token shares. Raises ValueError where two options contradict each other."""
        if self.kl_estimator not in KL_ESTIMATORS:
            known = ", ".join(KL_ESTIMATORS)
            raise ValueError(f"kl_estimator must be one of {known}, got {self.kl_estimator!r}")
        for name in ("entropy_coef", "kl_coef"):
            if not -math.inf < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        if self.kl_estimator != "k3" and not self.kl_coef:
            raise ValueError("kl_estimator has no effect without kl_coef")
        if self.kl_coef and self.ref_logprobs is None:
            raise ValueError("kl_coef needs ref_logprobs, the reference policy's log-probs of the tokens")
        if self.ref_logprobs is not None and not self.kl_coef:
            raise ValueError("ref_logprobs has no effect without kl_coef")
        correction = Correction.of(self.correction)
        return LossConfig(correction, float(self.entropy_coef), float(self.kl_coef), self.kl_estimator)


@dataclass(frozen=True, eq=False)
class PreparedLoss:
    """A checked call: the problem, the backend that solves it, and how its result is reduced."""

    problem: LossProblem
    backend: str
    reduce: bool
    divide_by_kept: bool
    sequence_ids: Tensor | None
    validate: bool

    def finish(self, loss: Tensor, results: Tensor) -> PolicyLoss:
        """Check the results, divide by the kept tokens where asked, name the diagnostics. One host sync."""
        if self.validate:
            self._check(results)
        diagnostics = as_diagnostics(results, self.problem.trained)
        if self.divide_by_kept:
            loss = loss / diagnostics.kept.sum().clamp(min=1)
        return PolicyLoss(loss, diagnostics)

    def _check(self, results: Tensor) -> None:
        trained, scale = self.problem.trained, self.problem.inputs.scale
        bad = bad_tokens(results, trained, scale)
        log_ratio = results[FIELDS.index("log_ratio")]
        known = ~log_ratio.isnan() if trained is None else trained & ~log_ratio.isnan()
        inside = known & in_band(log_ratio, *_WIDE_BAND)
        any_bad, num_known, num_inside = torch.stack([bad.any(), known.sum(), inside.sum()]).tolist()
        if any_bad:
            raise_not_finite(results, bad, self.sequence_ids)
        if num_known >= _TOO_FEW_TO_JUDGE and 2 * num_inside < num_known:
            low, high = _WIDE_BAND
            warnings.warn(
                RecordWarning(
                    f"{num_known - num_inside} of {num_known} trained tokens have a ratio p/q outside "
                    f"[{low}, {high}]: trainer and sampler disagree about most tokens. Look whether the logits are "
                    "shifted by one token (row t must be the distribution that token t was drawn from), and whether "
                    "temperature and weights are those of the sampler"
                ),
                stacklevel=4,
            )


def prepare(
    record: SamplerRecord,
    advantages: Tensor,
    options: LossOptions,
    shard: VocabShard | None,
    device_ref: Tensor,
    vocab_size: int | None,
) -> PreparedLoss:
    """Check a call and build its constants. ``device_ref`` is the trainer's tensor, ``[T, …]``.

    Raises:
        RecordError: a bad record, a record that lacks what the correction needs.
        ValueError: options that contradict each other or the record; advantages that are not finite.
    """
    if options.validate:
        refuse_capture(device_ref)
    config = options.config()
    backend = backends.choose(options.backend, device_ref, config.correction.rule)
    check_reduction(options.reduction, options.denominator, options.sequence_ids)
    check_lengths(record)
    _check_shapes(record, advantages, options, device_ref)
    trained = as_mask(options.loss_mask, record.tokens)
    _check_needs(record, config.correction)
    if options.validate:
        also = _loss_checks(record, advantages, config, options, trained)
        check_values(record, vocab_size, options.loss_mask, options.sequence_ids, also)
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
    inputs = LossInputs(
        record.tokens,
        logq.detach(),
        advantages.detach(),
        scale,
        record.temperature,
        record.candidates,
        None if reference is None else reference.detach(),
    )
    whole = VocabShard(0, vocab_size or 0, vocab_size or 0) if shard is None else shard
    return PreparedLoss(
        LossProblem(inputs, trained, config, whole),
        backend,
        options.reduction != "none",
        isinstance(options.denominator, str),
        options.sequence_ids,
        options.validate,
    )


def check_matrix(name: str, values: Tensor, shape: str) -> None:
    """Raise ValueError unless ``values`` is a floating matrix, rows by columns as ``shape`` says."""
    if values.dim() == 2 and values.dtype.is_floating_point:
        return
    remedy = ""
    if values.dim() == 3:
        remedy = f": use {name}.flatten(0, 1), and flatten everything per token likewise (see flatten_batch)"
    raise ValueError(f"{name} must be floating {shape}, got {values.dtype} {tuple(values.shape)}{remedy}")


def refuse_capture(tensor: Tensor) -> None:
    """Raises RuntimeError where the tensor's stream is being captured into a CUDA graph: checks wait for it."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "validation waits for the device, which a stream capture cannot: pass validate=False"
        )


def _check_shapes(
    record: SamplerRecord, advantages: Tensor, options: LossOptions, device_ref: Tensor
) -> None:
    size = device_ref.shape[0]
    if record.tokens.device != device_ref.device:
        raise RecordError(
            "devices differ",
            field="tokens",
            value=record.tokens.device,
            remedy=f"The trainer's side is on {device_ref.device}: use record.to.",
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
            raise ValueError(
                f"{name} must be [T] = ({size},), got {tuple(values.shape)}{_per_token(values, size)}"
            )
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


def _per_token(values: Tensor, size: int) -> str:
    """How to make one value per token of values of another shape; nothing where that is unclear."""
    if values.numel() == size:
        return ": use .flatten()"
    if values.dim() == 1 and values.numel() < size:
        return ": repeat a sequence's value over its tokens, as flatten_batch does"
    return ""


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


def _loss_checks(
    record: SamplerRecord,
    advantages: Tensor,
    config: LossConfig,
    options: LossOptions,
    trained: Tensor | None,
) -> list[Check]:
    """Checks that belong to this loss rather than to the record."""
    remedy = "Look at how rewards were turned into advantages."
    checks = [Check(~advantages.isfinite(), "advantages", advantages, "advantage is not finite", remedy)]
    if config.correction.center:
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
    if trained is None:
        return checks
    return [replace(check, bad=check.bad & trained) for check in checks]
