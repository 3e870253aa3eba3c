"""Records: `inspect` looks for faults that no single token shows, in a record and between a record and the trainer.

They are suspicions, so they warn (`RecordWarning`) unless a policy says otherwise. Structural faults always raise: see
`SamplerRecord.validate`.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kl import kl_estimate
from .errors import RecordError, RecordWarning
from .findings import (
    Finding,
    Thresholds,
    Tokens,
    by_group,
    find_above_gate,
    find_outlying_groups,
    find_outlying_samples,
    find_quantized,
    find_ratio,
    find_shifts,
    find_uniform,
    find_wild,
    group_name,
    trained_tokens,
)
from .record import SamplerRecord
from .zero_runs import unsupported_zero_runs


@dataclass(frozen=True)
class GroupSummary:
    """One group's trained tokens. Divergences in nats; NaN without trainer log-probs.

    Attributes:
        abs_mismatch: mean |log p − log q|.
        kl: KL(q‖p) by the estimator k3.
        mean_ratio: mean of r = p/q, 1 in expectation on complete sets.
        zeros: share of log q that are exactly 0.
    """

    group: str
    tokens: int
    mean_logprob: float
    zeros: float
    abs_mismatch: float = math.nan
    kl: float = math.nan
    mean_ratio: float = math.nan


@dataclass(frozen=True)
class Inspection:
    """What `inspect` saw: a summary per group, the findings, and a table of both as text (``str()``)."""

    summaries: tuple[GroupSummary, ...]
    findings: tuple[Finding, ...] = field(default=())

    def __str__(self) -> str:
        rows = [f"{'group':24} {'tokens':>9} {'log q':>8} {'zeros':>7} {'|d|':>8} {'KL':>9} {'mean r':>7}"]
        rows += [
            f"{s.group[:24]:24} {s.tokens:9d} {s.mean_logprob:8.3f} {s.zeros:7.2%} "
            f"{s.abs_mismatch:8.4f} {s.kl:9.2e} {s.mean_ratio:7.3f}"
            for s in self.summaries
        ]
        return "\n".join(rows + [f"{f.kind}: {f.message}" for f in self.findings])


def inspect(
    record: SamplerRecord,
    loss_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    trainer_logprobs: Tensor | None = None,
    thresholds: Thresholds | None = None,
    on_finding: str = "warn",
) -> Inspection:
    """Look for statistical faults, per group and per sample; groups are never averaged before they are judged.

    Kinds: ``"unsupported_zeros"``, ``"quantized"``, ``"uniform"``; with the trainer's log-probs also
    ``"lag"`` (in some samples log q belongs to a token up to three positions away), ``"wild_ratio"`` (more tokens with
    a large p/q than an honest q can give), ``"mismatch"`` (above the gate), ``"mean_ratio"`` (E_q[p/q] ≠ 1: log q
    is not that of the sampler), ``"outlying_sample"`` and ``"outlier"`` (a sample, or a group or one of its
    versions, far from the others).

    Args:
        record: with log-probs ``[T]``.
        loss_mask: bool or {0, 1} ``[T]``.
        sequence_ids: int ``[T]``; without it the record is one sample.
        trainer_logprobs: ``[T]``, nats, over what the record says (the support on complete rows).
        on_finding: ``"warn"``, ``"raise"`` (a `RecordError` for the first), or ``"ignore"`` (only report).

    Raises:
        RecordError: ``on_finding="raise"`` and something was found. ``field`` names the kind, ``value`` the
            group.
    """
    if on_finding not in ("warn", "raise", "ignore"):
        raise ValueError(f"on_finding must be 'warn', 'raise' or 'ignore', got {on_finding!r}")
    limits = thresholds or Thresholds()
    tokens = trained_tokens(record, loss_mask, sequence_ids, trainer_logprobs)
    groups = by_group(record, tokens)
    findings = find_unsupported_zeros(record, loss_mask, sequence_ids, limits.zero_run)
    large = [(name, members) for name, members in groups if len(members) >= limits.min_tokens]
    for name, members in large:
        findings += find_quantized(name, members, limits) + find_uniform(name, members, limits)
    if trainer_logprobs is not None and len(tokens) >= limits.min_tokens:
        findings += find_shifts(record, tokens, limits)
    if trainer_logprobs is not None:
        for name, members in large:
            findings += find_wild(record, name, members, limits)
            findings += find_above_gate(name, members, limits) + find_ratio(name, members, limits)
        findings += find_outlying_samples(record, tokens, limits) + find_outlying_groups(large, limits)
    report = Inspection(tuple(_summarize(name, members) for name, members in groups), tuple(findings))
    for finding in findings:
        if on_finding == "raise":
            remedy = "inspect(..., on_finding='ignore') gives the table of groups and every finding."
            raise RecordError(
                finding.message, sample=finding.sample, field=finding.kind, value=finding.group, remedy=remedy
            )
        if on_finding == "warn":
            warnings.warn(RecordWarning(f"{finding.kind}: {finding.message}"), stacklevel=2)
    return report


def find_unsupported_zeros(
    record: SamplerRecord, loss_mask: Tensor | None = None, sequence_ids: Tensor | None = None, run: int = 2
) -> list[Finding]:
    """One finding for each sample that `unsupported_zero_runs` marks."""
    marked = unsupported_zero_runs(record, loss_mask, sequence_ids, run).nonzero().squeeze(1)
    owner = torch.zeros_like(marked) if sequence_ids is None else sequence_ids[marked]
    samples, index, counts = torch.unique(owner, return_inverse=True, return_counts=True)
    last = torch.zeros_like(counts).scatter_reduce(0, index, marked, "amax")
    found = []
    for sample, count, token in zip(samples.tolist(), counts.tolist(), last.tolist(), strict=True):
        message = f"sample {sample} ends in {count} log-probs of exactly 0.0 that no candidate confirms"
        found.append(
            Finding(
                "unsupported_zeros", group_name(record, token), message, value=float(count), sample=sample
            )
        )
    return found


def _summarize(name: str, tokens: Tokens) -> GroupSummary:
    mean, zeros = float(tokens.logq.mean()), float((tokens.logq == 0).double().mean())
    if tokens.logp is None:
        return GroupSummary(name, len(tokens), mean, zeros)
    diff = tokens.diff()
    kl = float(kl_estimate("k3", -diff).mean())
    return GroupSummary(
        name, len(tokens), mean, zeros, float(diff.abs().mean()), kl, float(diff.exp().mean())
    )
