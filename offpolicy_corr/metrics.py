"""Public: one dictionary of numbers that says how far the samplers are from the trainer, per sampler group too."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .correction import Correction
from .kl import kl_estimate
from .numerics import check_band, in_band
from .records.record import SamplerRecord
from .records.validation import as_mask
from .result import TokenDiagnostics

_QUANTILES = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))


def summarize(
    tokens: TokenDiagnostics,
    record: SamplerRecord,
    loss_mask: Tensor | None = None,
    advantages: Tensor | None = None,
    band: tuple[float, float] = (0.2, 5.0),
    correction: Correction | str | None = None,
) -> dict[str, float]:
    """Diagnostics over trained tokens, overall and as ``group/<name>/<key>`` where the record has groups.

    Keys (nats where they are entropies or divergences):

    - ``tokens``, and per group ``token_share``: how many trained tokens.
    - ``kl_k1``, ``kl_k3``: KL(q‖p) estimated from tokens drawn by q: mean of −log r, and of r − 1 − log r.
    - ``mean_ratio``: mean of r, 1 in expectation when records and supports are right.
    - ``out_of_band``: share of tokens whose ratio leaves ``band`` (inclusive), a fixed yardstick whatever the
      correction's own band; per group also ``out_of_band_share``: its part of all tokens outside.
    - ``kept``: share with a weight above 0; ``ess``: (Σr)² / (N Σr²), on raw ratios, in (0, 1].
    - ``entropy``; ``sampler_head_mass``, ``trainer_head_mass`` (means over rows with a head).
    - ``tail_ratio_p50``, ``_p99``, ``_max`` and ``tail_ratio_of_sums`` = Σ(1−Q_H)/Σ(1−P_H): a mean of ratios would
      be made by a handful of tokens.
    - ``certificate``: mean bound on the drift that the modeled tail leaves, times |advantage| where
      ``advantages`` ``[T]`` are given, for the rule and tail floor of ``correction`` (default SC + MIS).
    - ``advantage_abs``: mean |advantage|, where given.

    A key is NaN where nothing can be said: no trained token, no recorded log-prob, no head.

    Args:
        tokens: ``out.diagnostics`` of a loss.
        record: the record it was computed from.
        loss_mask: the same mask as in the loss.

    Source: k1 and k3 http://joschu.net/blog/kl-approx.html; ess as Kong 1992.
    """
    check_band(*band)
    if advantages is not None and advantages.shape != record.tokens.shape:
        raise ValueError(f"advantages must be [T] = ({len(record)},), got {tuple(advantages.shape)}")
    trained = as_mask(loss_mask, record.tokens, check=True)
    trained = torch.ones_like(record.tokens, dtype=torch.bool) if trained is None else trained
    columns = _columns(tokens, record, advantages, band, Correction.of(correction))
    columns = {name: values[trained] for name, values in columns.items()}
    result = _describe(columns)
    if record.group is None:
        return result
    group = record.group[trained]
    outside = float(columns["outside"].nansum())
    # only groups that occur or are named; an unnamed one goes by its number
    labels = dict(enumerate(record.group_names)) or {int(g): str(int(g)) for g in group.unique()}
    for index, label in labels.items():
        members = group == index
        own = {name: values[members] for name, values in columns.items()}
        described = _describe(own)
        described["token_share"] = described["tokens"] / max(result["tokens"], 1.0)
        described["out_of_band_share"] = float(own["outside"].nansum()) / outside if outside else math.nan
        result.update({f"group/{label}/{key}": value for key, value in described.items()})
    return result


def _columns(
    tokens: TokenDiagnostics,
    record: SamplerRecord,
    advantages: Tensor | None,
    band: tuple[float, float],
    correction: Correction,
) -> dict[str, Tensor]:
    """Everything that is summarized, as fp64 ``[T]``."""
    log_ratio = tokens.log_ratio.double()
    outside = (~in_band(log_ratio, *band)).double()
    head = tokens.sampler_head_mass.double()
    is_head = ~head.isnan()
    if record.candidates is not None:
        is_head = is_head & ~record.candidates.complete
    unknown = torch.full_like(log_ratio, math.nan)
    columns = {
        "log_ratio": log_ratio,
        "outside": outside.masked_fill(log_ratio.isnan(), math.nan),
        "kept": tokens.kept.double(),
        "entropy": tokens.entropy.double(),
        "sampler_head_mass": torch.where(is_head, head, unknown),
        "trainer_head_mass": torch.where(is_head, tokens.trainer_head_mass.double(), unknown),
        "tail_ratio": torch.where(is_head, tokens.tail_ratio.double(), unknown),
    }
    columns.update(_tails(record, columns["tail_ratio"], correction.tail_floor))
    size = torch.ones_like(log_ratio)
    if advantages is not None:
        size = columns["advantage"] = advantages.double().abs()
    candidates = record.candidates
    has_bound = (
        hasattr(correction.rule, "drift_bound") and candidates is not None and candidates.logprobs is not None
    )
    certificate = unknown
    if has_bound:
        assert candidates is not None
        signs = None if advantages is None else advantages.double()
        trainer_tail = (1.0 - tokens.trainer_head_mass.double()).clamp(min=0.0).nan_to_num(1.0)
        certificate = (
            candidates.certificate(correction.rule, signs, trainer_tail, correction.tail_floor) * size
        )
    columns["certificate"] = certificate
    return columns


def _tails(record: SamplerRecord, rho: Tensor, tail_floor: float) -> dict[str, Tensor]:
    """1 − Q_H from the record, and 1 − P_H from ρ: a difference of masses in fp32 would lose a small tail."""
    unknown = torch.full_like(rho, math.nan)
    if record.candidates is None or record.candidates.logprobs is None:
        return {"sampler_tail": unknown, "trainer_tail": unknown}
    sampler = (1.0 - record.candidates.mass()).clamp(min=tail_floor)
    sampler = torch.where(rho.isnan(), unknown, sampler)
    return {"sampler_tail": sampler, "trainer_tail": sampler / rho}


def _describe(columns: dict[str, Tensor]) -> dict[str, float]:
    log_ratio = columns["log_ratio"]
    ratio = log_ratio.exp()
    known = log_ratio[~log_ratio.isnan()]
    # (Σr)² / (N Σr²) in logarithms: a ratio that overflows is just the case in which it matters
    log_ess = 2 * known.logsumexp(0) - (2 * known).logsumexp(0) - math.log(max(known.numel(), 1))
    out = {
        "tokens": float(log_ratio.numel()),
        "kl_k1": _mean(kl_estimate("k1", -log_ratio)),
        "kl_k3": _mean(kl_estimate("k3", -log_ratio)),
        "mean_ratio": _mean(ratio),
        "out_of_band": _mean(columns["outside"]),
        "kept": _mean(columns["kept"]),
        "ess": float(log_ess.exp()) if known.numel() else math.nan,
        "entropy": _mean(columns["entropy"]),
        "sampler_head_mass": _mean(columns["sampler_head_mass"]),
        "trainer_head_mass": _mean(columns["trainer_head_mass"]),
        "certificate": _mean(columns["certificate"]),
    }
    out.update(_tail_ratio(columns))
    if "advantage" in columns:
        out["advantage_abs"] = _mean(columns["advantage"])
    return out


def _tail_ratio(columns: dict[str, Tensor]) -> dict[str, float]:
    rho = columns["tail_ratio"]
    rho = rho[~rho.isnan()].sort().values
    out = {
        f"tail_ratio_{name}": float(rho[round(level * (rho.numel() - 1))]) if rho.numel() else math.nan
        for name, level in _QUANTILES
    }
    sampler, trainer = (float(columns[name].nansum()) for name in ("sampler_tail", "trainer_tail"))
    out["tail_ratio_of_sums"] = sampler / trainer if trainer > 0 else math.nan
    return out


def _mean(values: Tensor) -> float:
    return float(values.nanmean()) if values.numel() else math.nan
