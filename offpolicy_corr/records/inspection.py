"""Faults that no single token shows: patterns in a record, and between a record and the trainer, per sampler
group.

They are suspicions, so they warn (`RecordWarning`) unless a policy says otherwise. Structural faults are
`SamplerRecord.validate`'s business and always raise.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..csr import segment_max
from .errors import RecordError
from .record import SamplerRecord
from .validation import as_mask


class RecordWarning(UserWarning):
    """A record looks wrong in a way that only its statistics show."""


@dataclass(frozen=True)
class Thresholds:
    """Where a pattern becomes a finding.

    Args:
        min_tokens: a group with fewer trained tokens is not judged.
        lag_factor: log q fits a neighbor's log p this many times better than its own token's.
        quantized_share: share of log-probs that half precision can hold exactly.
        uniform_spread: standard deviation (nats) below which all log q are one number; ``uniform_level`` is
            the level (nats) that they must lie below.
        zero_run: length of a run of exact zeros at the end of a sample.
        group_factor: a group's mean |log p − log q| over the median of the other groups' …
        group_floor: … and above this many nats.
        gate: mean |log p − log q| (nats) above which a group is refused: slime and vime use 0.1 in CI, Miles
            0.03.
        ratio_errors: standard errors by which a group's mean p/q may differ from 1, and ``ratio_floor`` the
            difference that is always allowed.
    """

    min_tokens: int = 64
    lag_factor: float = 3.0
    quantized_share: float = 0.999
    uniform_spread: float = 0.05
    uniform_level: float = -5.0
    zero_run: int = 2
    group_factor: float = 5.0
    group_floor: float = 0.05
    gate: float = 0.1
    ratio_errors: float = 6.0
    ratio_floor: float = 0.05


@dataclass(frozen=True)
class Finding:
    """One suspicion: its ``kind``, the ``group`` (and ``version``, if judged per version), a sentence."""

    kind: str
    group: str
    message: str
    version: str | None = None
    value: float = math.nan


@dataclass(frozen=True)
class GroupSummary:
    """One group's trained tokens. Divergences in nats; NaN without trainer log-probs.

    Attributes:
        abs_mismatch: mean |log p − log q|.
        kl: KL(q‖p), the mean of r − 1 − log r.
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


@dataclass(frozen=True, eq=False)
class _Group:
    """Trained tokens of one group, fp64, in order; ``adjacent`` marks neighbors of one sample."""

    name: str
    logq: Tensor
    logp: Tensor | None
    version: Tensor | None
    version_names: tuple[str, ...] | None
    adjacent: Tensor

    def diff(self) -> Tensor:
        assert self.logp is not None
        return self.logp - self.logq


def inspect(
    record: SamplerRecord,
    loss_mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    trainer_logprobs: Tensor | None = None,
    thresholds: Thresholds | None = None,
    on_finding: str = "warn",
) -> Inspection:
    """Look for statistical faults, group by group; groups are never averaged before they are judged.

    Kinds: ``"unwitnessed_zeros"``, ``"quantized"``, ``"uniform"``; with the trainer's log-probs also
    ``"lag"`` (log q belongs to the neighboring token), ``"mismatch"`` (above the gate), ``"outlier"`` (one
    group, or one version of a group, far from the others), ``"mean_ratio"`` (E_q[p/q] ≠ 1: log q is not that
    of the sampler).

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
    groups = _split(record, loss_mask, sequence_ids, trainer_logprobs)
    findings = find_unwitnessed_zeros(record, loss_mask, sequence_ids, limits.zero_run)
    large = [group for group in groups if len(group.logq) >= limits.min_tokens]
    for group in large:
        findings += _find_quantized(group, limits) + _find_uniform(group, limits)
        if group.logp is not None:
            findings += (
                _find_lag(group, limits) + _find_above_gate(group, limits) + _find_ratio(group, limits)
            )
    if trainer_logprobs is not None:
        findings += _find_outliers(large, limits)
    report = Inspection(tuple(_summarize(group) for group in groups), tuple(findings))
    for finding in findings:
        if on_finding == "raise":
            remedy = (
                "See offpolicy_corr.statistics.inspect(..., on_finding='ignore') for the table of groups."
            )
            raise RecordError(finding.message, field=finding.kind, value=finding.group, remedy=remedy)
        if on_finding == "warn":
            warnings.warn(RecordWarning(f"{finding.kind}: {finding.message}"), stacklevel=2)
    return report


def unwitnessed_zero_runs(
    record: SamplerRecord, loss_mask: Tensor | None = None, sequence_ids: Tensor | None = None, run: int = 2
) -> Tensor:
    """Tokens of runs of exact 0.0 that end a sample with nothing in the record that says so: bool ``[T]``.

    Frameworks fill missing values with 0.0, and 0.0 is also a true log q where one candidate survived. A
    support of one id, or an entry of at least −1e-6 among the candidates, is the witness that tells them
    apart. A run has at least ``run`` tokens.
    """
    found = torch.zeros_like(record.tokens, dtype=torch.bool)
    trained = as_mask(loss_mask, record.tokens)
    trained = ~found if trained is None else trained
    suspicious = trained if record.logprobs is None else trained & (record.logprobs == 0)
    if record.logprobs is None or not bool(suspicious.any()):
        return found
    suspicious = suspicious & ~_witnessed(record)
    sequence = torch.zeros_like(record.tokens) if sequence_ids is None else sequence_ids
    order = sequence.argsort(stable=True)
    order = order[trained[order]]
    zero, position = suspicious[order], torch.arange(len(order), device=order.device)
    _, sample = torch.unique_consecutive(sequence[order], return_inverse=True)
    other = torch.where(zero, -1, position)
    last_other = torch.full_like(other, -1).scatter_reduce(0, sample, other, "amax")  # one slot a sample
    trailing = zero & (position > last_other[sample])
    length = torch.zeros_like(other).index_add(0, sample, trailing.long())
    found[order] = trailing & (length[sample] >= run)
    return found


def find_unwitnessed_zeros(
    record: SamplerRecord, loss_mask: Tensor | None = None, sequence_ids: Tensor | None = None, run: int = 2
) -> list[Finding]:
    """One finding for each sample that `unwitnessed_zero_runs` marks."""
    marked = unwitnessed_zero_runs(record, loss_mask, sequence_ids, run).nonzero().squeeze(1)
    owner = torch.zeros_like(marked) if sequence_ids is None else sequence_ids[marked]
    samples, index, counts = torch.unique(owner, return_inverse=True, return_counts=True)
    last = torch.zeros_like(counts).scatter_reduce(0, index, marked, "amax")
    found = []
    for sample, count, token in zip(samples.tolist(), counts.tolist(), last.tolist(), strict=True):
        message = f"sample {sample} ends in {count} log-probs of exactly 0.0 that nothing else supports"
        found.append(Finding("unwitnessed_zeros", _name(record, token), message, value=float(count)))
    return found


def warn_unwitnessed_zeros(record: SamplerRecord, loss_mask: Tensor | None, stacklevel: int = 2) -> None:
    """Warn about `find_unwitnessed_zeros` of one answer."""
    for finding in find_unwitnessed_zeros(record, loss_mask):
        remedy = " (padding? record candidates, or mask these tokens)"
        warnings.warn(RecordWarning(finding.message + remedy), stacklevel=stacklevel + 1)


def _witnessed(record: SamplerRecord) -> Tensor:
    candidates = record.candidates
    if candidates is None:
        return torch.zeros_like(record.tokens, dtype=torch.bool)
    single = candidates.complete & (candidates.offsets.diff() == 1)
    if candidates.logprobs is None:
        return single
    return single | (segment_max(candidates.logprobs, candidates.offsets) >= -1e-6)


def _name(record: SamplerRecord, token: int) -> str:
    if record.group is None:
        return "all"
    index = int(record.group[token])
    return record.group_names[index] if 0 <= index < len(record.group_names) else str(index)


def _split(
    record: SamplerRecord, loss_mask: Tensor | None, sequence_ids: Tensor | None, logp: Tensor | None
) -> list[_Group]:
    if record.logprobs is None:
        raise ValueError("there are no log-probs to inspect")
    trained = as_mask(loss_mask, record.tokens)
    trained = torch.ones_like(record.tokens, dtype=torch.bool) if trained is None else trained
    sequence = torch.zeros_like(record.tokens) if sequence_ids is None else sequence_ids
    group = torch.zeros_like(record.tokens) if record.group is None else record.group
    result = []
    for index in torch.unique(group[trained]).tolist():
        at = (trained & (group == index)).nonzero().squeeze(1)
        result.append(
            _Group(
                _name(record, int(at[0])),
                record.logprobs[at].double(),
                None if logp is None else logp.detach()[at].double(),
                None if record.weight_version is None else record.weight_version[at],
                record.version_names,
                (at.diff() == 1) & (sequence[at].diff() == 0),
            )
        )
    return result


def _summarize(group: _Group) -> GroupSummary:
    mean, zeros = float(group.logq.mean()), float((group.logq == 0).double().mean())
    if group.logp is None:
        return GroupSummary(group.name, len(group.logq), mean, zeros)
    d = group.diff()
    kl = float((d.exp() - 1 - d).mean())
    return GroupSummary(group.name, len(d), mean, zeros, float(d.abs().mean()), kl, float(d.exp().mean()))


def _find_quantized(group: _Group, limits: Thresholds) -> list[Finding]:
    values = group.logq[group.logq != 0].float()
    if len(values) < limits.min_tokens:
        return []
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        share = float((values.to(dtype).float() == values).double().mean())
        if share >= limits.quantized_share:
            message = (
                f"group {group.name}: log-probs were rounded to {name}; a ratio is then off by up to 1 %"
            )
            return [Finding("quantized", group.name, message, value=share)]
    return []


def _find_uniform(group: _Group, limits: Thresholds) -> list[Finding]:
    spread, level = float(group.logq.std()), float(group.logq.mean())
    if spread >= limits.uniform_spread or level >= limits.uniform_level:
        return []
    message = (
        f"group {group.name}: every log q is about {level:.3f}, uniform over {math.exp(-level):.0f} ids: "
        "did the engine load its weights?"
    )
    return [Finding("uniform", group.name, message, value=level)]


def _find_lag(group: _Group, limits: Thresholds) -> list[Finding]:
    assert group.logp is not None
    logp, logq, pair = group.logp, group.logq, group.adjacent
    if int(pair.sum()) < limits.min_tokens:
        return []
    own = float((logp - logq).abs().median())
    for shift, there in ((1, (logp[:-1] - logq[1:])[pair]), (-1, (logp[1:] - logq[:-1])[pair])):
        other = float(there.abs().median())
        if own > limits.lag_factor * other and own > limits.group_floor:
            message = (
                f"group {group.name}: log q fits the {'previous' if shift == 1 else 'next'} token (median "
                f"mismatch {other:.4f}) better than its own ({own:.4f}): the record is shifted by one"
            )
            return [Finding("lag", group.name, message, value=float(shift))]
    return []


def _find_ratio(group: _Group, limits: Thresholds) -> list[Finding]:
    ratio = group.diff().exp()
    mean, error = float(ratio.mean()), float(ratio.std()) / math.sqrt(len(ratio))
    off = abs(mean - 1)
    if not math.isfinite(mean) or off > max(limits.ratio_floor, limits.ratio_errors * error):
        message = (
            f"group {group.name}: mean p/q is {mean:.3f} ± {error:.3f}, not 1: log q is not the sampler's"
        )
        return [Finding("mean_ratio", group.name, message, value=mean)]
    return []


def _find_above_gate(group: _Group, limits: Thresholds) -> list[Finding]:
    size = float(group.diff().abs().mean())
    if size <= limits.gate:
        return []
    message = f"group {group.name}: mean |log p − log q| is {size:.4f}, above the gate {limits.gate}"
    return [Finding("mismatch", group.name, message, value=size)]


def _find_outliers(groups: Sequence[_Group], limits: Thresholds) -> list[Finding]:
    cells: list[tuple[str, str | None, float]] = []
    for group in groups:
        size = group.diff().abs()
        versions = [] if group.version is None else torch.unique(group.version).tolist()
        if len(versions) < 2:
            cells.append((group.name, None, float(size.mean())))
            continue
        for version in versions:
            assert group.version is not None
            members = size[group.version == version]
            label = group.version_names[version] if group.version_names and version >= 0 else str(version)
            if len(members) >= limits.min_tokens:
                cells.append((group.name, label, float(members.mean())))
    found = []
    for index, (name, label, own) in enumerate(cells):
        others = [cell[2] for position, cell in enumerate(cells) if position != index]
        usual = float(torch.tensor(others).median()) if others else math.inf
        if own > limits.group_floor and own > limits.group_factor * usual:
            where = f"group {name}" + ("" if label is None else f", weight version {label}")
            message = f"{where}: mean |log p − log q| is {own:.4f}, the others' median {usual:.4f}"
            found.append(Finding("outlier", name, message, label, own))
    return found
