"""Records: what makes the statistics of a record suspicious, one function per kind of suspicion.

Nothing here may be moved by a few values: shifts and mismatches are judged by means of errors clipped to one nat,
and wild ratios by their number, which an honest sampler bounds. Under q the ratio r = p/q has mean at most 1, so
that by Markov's inequality a token has r ≥ e^x with probability at most e^−x, whatever p is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .record import SamplerRecord
from .validation import as_mask

_SHIFTS = (1, -1, 2, -2, 3, -3)
_CLIP = 1.0  # nats: an error beyond counts as this much
_UNCERTAIN = -0.05  # nats: a token the trainer is less sure of than this tells one position from another
_LARGEST_RATIO = 10.0  # ratios are cut here before their mean is taken, which bounds its error
_SMALLEST_ROUNDED = 1e-4  # nats: closer to 0, fp32 log-probs lie on a half-precision grid by themselves


@dataclass(frozen=True)
class Thresholds:
    """Where a pattern becomes a finding.

    Args:
        min_tokens: a group with fewer trained tokens is not judged.
        min_sample_tokens: nor is a sample with fewer trained tokens (for shifts: fewer uncertain ones).
        lag_factor: log q fits another token's log p this many times better than its own.
        quantized_share: share of log-probs that half precision can hold exactly; chance gives 0.01 %.
        uniform_spread: standard deviation (nats) below which all log q are one number; ``uniform_level`` is
            the level (nats) that they must lie below.
        zero_run: length of a run of exact zeros at the end of a sample.
        group_factor: a group's mean |log p − log q| over the median of the other groups', a sample's over the median of
            the other samples';
        group_floor: and above this many nats.
        gate: mean |log p − log q| (nats) above which a group is refused: slime and vime use 0.1 in CI, Miles
            0.03.
        ratio_errors: standard errors by which a group's mean p/q may differ from 1, and ``ratio_floor`` the
            difference that is always allowed.
        wild_chance: probability below which the number of large ratios is no chance.
    """

    min_tokens: int = 64
    min_sample_tokens: int = 16
    lag_factor: float = 3.0
    quantized_share: float = 0.5
    uniform_spread: float = 0.05
    uniform_level: float = -5.0
    zero_run: int = 2
    group_factor: float = 5.0
    group_floor: float = 0.05
    gate: float = 0.1
    ratio_errors: float = 6.0
    ratio_floor: float = 0.05
    wild_chance: float = 1e-6


@dataclass(frozen=True)
class Finding:
    """One suspicion: its ``kind``, the ``group`` (and ``version``, if judged per version), a sentence.

    ``sample`` is the sequence id of the first sample concerned, where the suspicion is about samples.
    """

    kind: str
    group: str
    message: str
    version: str | None = None
    value: float = math.nan
    sample: int | None = None


@dataclass(frozen=True, eq=False)
class Tokens:
    """Trained tokens with their log-probs, fp64, in order of position; all ``[N]``."""

    logq: Tensor
    logp: Tensor | None
    sample: Tensor
    position: Tensor
    version: Tensor | None
    version_names: tuple[str, ...] | None

    def __len__(self) -> int:
        return self.logq.numel()

    def diff(self) -> Tensor:
        """log p − log q."""
        assert self.logp is not None
        return self.logp - self.logq

    def at(self, index: Tensor) -> Tokens:
        """The tokens ``index``."""
        return Tokens(
            self.logq[index],
            None if self.logp is None else self.logp[index],
            self.sample[index],
            self.position[index],
            None if self.version is None else self.version[index],
            self.version_names,
        )


def group_name(record: SamplerRecord, token: int) -> str:
    """The name of a token's group; its number where it has none, "all" without groups."""
    if record.group is None:
        return "all"
    index = int(record.group[token])
    return record.group_names[index] if 0 <= index < len(record.group_names) else str(index)


def trained_tokens(
    record: SamplerRecord, loss_mask: Tensor | None, sequence_ids: Tensor | None, logp: Tensor | None
) -> Tokens:
    """The tokens that are judged. Raises ValueError where the record has no log-probs."""
    if record.logprobs is None:
        raise ValueError("there are no log-probs to inspect")
    trained = as_mask(loss_mask, record.tokens)
    trained = torch.ones_like(record.tokens, dtype=torch.bool) if trained is None else trained
    at = trained.nonzero().squeeze(1)
    return Tokens(
        record.logprobs[at].double(),
        None if logp is None else logp.detach()[at].double(),
        torch.zeros_like(at) if sequence_ids is None else sequence_ids[at].to(torch.int64),
        at,
        None if record.weight_version is None else record.weight_version[at],
        record.version_names,
    )


def by_group(record: SamplerRecord, tokens: Tokens) -> list[tuple[str, Tokens]]:
    """The tokens of each group, under its name."""
    if record.group is None:
        return [("all", tokens)] if len(tokens) else []
    group = record.group[tokens.position]
    members = [(group == index).nonzero().squeeze(1) for index in torch.unique(group).tolist()]
    return [(group_name(record, int(tokens.position[at[0]])), tokens.at(at)) for at in members]


def find_quantized(name: str, tokens: Tokens, limits: Thresholds) -> list[Finding]:
    """Log-probs that were rounded to half precision."""
    values = tokens.logq[tokens.logq.abs() > _SMALLEST_ROUNDED].float()
    if len(values) < limits.min_tokens:
        return []
    for dtype, label in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        share = float((values.to(dtype).float() == values).double().mean())
        if share >= limits.quantized_share:
            message = (
                f"group {name}: {share:.0%} of log-probs were rounded to {label}: ratios are off by up to 1 %"
            )
            return [Finding("quantized", name, message, value=share)]
    return []


def find_uniform(name: str, tokens: Tokens, limits: Thresholds) -> list[Finding]:
    """An engine whose q is uniform: it did not load its weights."""
    spread, level = float(tokens.logq.std()), float(tokens.logq.mean())
    if spread >= limits.uniform_spread or level >= limits.uniform_level:
        return []
    message = (
        f"group {name}: every log q is about {level:.3f}, uniform over {math.exp(-level):.0f} ids: "
        "did the engine load its weights?"
    )
    return [Finding("uniform", name, message, value=level)]


def find_shifts(record: SamplerRecord, tokens: Tokens, limits: Thresholds) -> list[Finding]:
    """Samples in which log q belongs to tokens a few positions away, joined per group and shift.

    Only tokens of which the trainer is not nearly certain are compared: two certain neighbors fit in any order.
    """
    assert tokens.logp is not None
    found: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    taken: set[int] = set()
    for shift in _SHIFTS:
        for sample, first, own, other in _shifted_samples(tokens, shift, limits):
            if sample not in taken:
                taken.add(sample)
                found.setdefault((group_name(record, first), shift), []).append((sample, own, other))
    findings = []
    for (name, shift), samples in found.items():
        sample, own, other = samples[0]
        steps = "one" if abs(shift) == 1 else f"{abs(shift)} tokens"
        beside = f" and {len(samples) - 1} more" if len(samples) > 1 else ""
        message = (
            f"group {name}: in sample {sample}{beside} log q fits the {'previous' if shift > 0 else 'next'} token "
            f"(mean clipped mismatch {other:.4f}) better than its own ({own:.4f}): the record is shifted by {steps}"
        )
        findings.append(Finding("lag", name, message, value=float(shift), sample=sample))
    return findings


def _shifted_samples(
    tokens: Tokens, shift: int, limits: Thresholds
) -> Iterator[tuple[int, int, float, float]]:
    """(sample, position of a token, own error, error at the shift) of samples that fit better at ``shift``."""
    assert tokens.logp is not None
    step = abs(shift)
    early, late = slice(None, -step), slice(step, None)
    here, there = (early, late) if shift > 0 else (late, early)
    neighbors = (tokens.position[late] - tokens.position[early] == step) & (
        tokens.sample[late] == tokens.sample[early]
    )
    logp = tokens.logp[here]
    used = (neighbors & (logp < _UNCERTAIN)).nonzero().squeeze(1)
    samples, index, counts = torch.unique(tokens.sample[here][used], return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(samples), dtype=torch.float64, device=logp.device)
    errors = ((logp - tokens.logq[part]).abs().clamp(max=_CLIP)[used] for part in (here, there))
    own, other = (zeros.index_add(0, index, error) / counts for error in errors)
    first = torch.full_like(counts, len(tokens)).scatter_reduce(0, index, used, "amin")
    bad = (own > limits.lag_factor * other) & (own > limits.group_floor)
    bad = bad & (counts >= limits.min_sample_tokens)
    for i in bad.nonzero().squeeze(1).tolist():
        yield int(samples[i]), int(tokens.position[here][first[i]]), float(own[i]), float(other[i])


def find_wild(record: SamplerRecord, name: str, tokens: Tokens, limits: Thresholds) -> list[Finding]:
    """More tokens with a large ratio than an honest q can give, however few they are."""
    diff = tokens.diff()
    largest, order = diff.sort(descending=True)
    largest = largest[largest > 1.0]
    rank = torch.arange(1, len(largest) + 1, dtype=torch.float64, device=diff.device)
    # the chance of k tokens with r ≥ e^x among N is at most (N e^−x)^k / k!; factors k (k + 1) pay for trying every k
    log_chance = rank * (math.log(len(diff)) - largest) - torch.lgamma(rank + 1) + (rank * (rank + 1)).log()
    log_chance = torch.where(largest.isnan(), -torch.inf, log_chance)
    if not len(log_chance) or float(log_chance.min()) >= math.log(limits.wild_chance):
        return []
    count = int(log_chance.argmin()) + 1
    level, token = float(largest[count - 1]), int(tokens.position[order[0]])
    sample = int(tokens.sample[order[0]])
    expected = len(diff) * math.exp(-level)
    message = (
        f"group {name}: {count} of {len(diff)} tokens have p/q above e^{level:.1f}, where an honest q gives at most "
        f"{expected:.1e}; the largest is token {token} of sample {sample}: its log q is not the sampler's"
    )
    return [Finding("wild_ratio", name, message, value=float(count), sample=sample)]


def find_ratio(name: str, tokens: Tokens, limits: Thresholds) -> list[Finding]:
    """A mean of p/q that is not 1; above 1 also as the mean of ratios cut at 10, which few tokens cannot hide."""
    ratio = tokens.diff().exp()
    for values, both_sides in ((ratio.clamp(max=_LARGEST_RATIO), False), (ratio, True)):
        mean, error = float(values.mean()), float(values.std()) / math.sqrt(len(values))
        off = abs(mean - 1) if both_sides else mean - 1
        if not math.isfinite(mean) or off > max(limits.ratio_floor, limits.ratio_errors * error):
            message = f"group {name}: mean p/q is {mean:.3f} ± {error:.3f}, not 1: log q is not the sampler's"
            return [Finding("mean_ratio", name, message, value=mean)]
    return []


def find_above_gate(name: str, tokens: Tokens, limits: Thresholds) -> list[Finding]:
    """A group whose mean mismatch is above the gate."""
    size = float(tokens.diff().abs().mean())
    if size <= limits.gate:
        return []
    message = f"group {name}: mean |log p − log q| is {size:.4f}, above the gate {limits.gate}"
    return [Finding("mismatch", name, message, value=size)]


def find_outlying_samples(record: SamplerRecord, tokens: Tokens, limits: Thresholds) -> list[Finding]:
    """Samples whose mismatch is far above that of the others, joined per group."""
    error = tokens.diff().abs().clamp(max=_CLIP)
    samples, index, counts = torch.unique(tokens.sample, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(samples), dtype=torch.float64, device=error.device)
    mean = zeros.index_add(0, index, error) / counts
    judged = counts >= limits.min_sample_tokens
    if int(judged.sum()) < 3:
        return []
    usual = float(mean[judged].median())
    far = judged & (mean > limits.gate) & (mean > limits.group_factor * usual)
    found: dict[str, list[int]] = {}
    for i in far.nonzero().squeeze(1).tolist():
        first = int(tokens.position[(index == i).nonzero()[0, 0]])
        found.setdefault(group_name(record, first), []).append(i)
    findings = []
    for name, members in found.items():
        worst = max(members, key=lambda i: float(mean[i]))
        sample, size = int(samples[worst]), float(mean[worst])
        beside = f" (and {len(members) - 1} more)" if len(members) > 1 else ""
        message = (
            f"group {name}: sample {sample}{beside} has a mean clipped |log p − log q| of {size:.4f}, "
            f"the samples' median is {usual:.4f}"
        )
        findings.append(Finding("outlying_sample", name, message, value=size, sample=sample))
    return findings


def find_outlying_groups(groups: Sequence[tuple[str, Tokens]], limits: Thresholds) -> list[Finding]:
    """Groups, or weight versions of a group, whose mismatch is far above the median of the others."""
    cells: list[tuple[str, str | None, float]] = []
    for name, tokens in groups:
        size = tokens.diff().abs()
        versions = [] if tokens.version is None else torch.unique(tokens.version).tolist()
        if len(versions) < 2:
            cells.append((name, None, float(size.mean())))
            continue
        for version in versions:
            assert tokens.version is not None
            members = size[tokens.version == version]
            label = tokens.version_names[version] if tokens.version_names and version >= 0 else str(version)
            if len(members) >= limits.min_tokens:
                cells.append((name, label, float(members.mean())))
    found = []
    for index, (name, label, own) in enumerate(cells):
        others = [cell[2] for position, cell in enumerate(cells) if position != index]
        usual = float(torch.tensor(others).median()) if others else math.inf
        if own > limits.group_floor and own > limits.group_factor * usual:
            where = f"group {name}" + ("" if label is None else f", weight version {label}")
            message = f"{where}: mean |log p − log q| is {own:.4f}, the others' median {usual:.4f}"
            found.append(Finding("outlier", name, message, label, own))
    return found
