"""Rules: the importance weight f(r) of one token, given its ratio ``r = p / q``.

``p`` is the trainer's probability of the token, ``q`` the probability with which the sampler drew it. A rule
is any object with three elementwise methods (see `WeightRule`); the ones here are frozen dataclasses.

Each rule states the same function f three times, in the form that is safe where it is used:

=====================  =========================  ==================  =========================
rule                   f(r)                       q·f(p/q)            tail scale ρ·f(1/ρ)
=====================  =========================  ==================  =========================
Unweighted             1                          q                   ρ
FullIS                 r                          p                   1
TruncatedIS(c)         min(r, c)                  min(p, c·q)         min(1, c·ρ)
MaskedIS(lo, hi)       r·1[lo ≤ r ≤ hi]           p·1[in band]        1[1/hi ≤ ρ ≤ 1/lo]
ClampedIS(lo, hi)      clamp(r, lo, hi)           clamp(p, lo·q, hi·q)  clamp(1, lo·ρ, hi·ρ)
PPOClip(lo, hi)        r·1[keep(r)]               p·1[keep(p/q)]      1[keep(1/ρ)]
=====================  =========================  ==================  =========================

``drift_bound`` is the largest L1 norm, per unit of advantage, of the drift that remains when everything but a
recorded head is modeled (see `CandidateSet.certificate`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from .numerics import check_band, in_band, inverse_bound, log_bound


@runtime_checkable
class WeightRule(Protocol):
    """What a weight rule must offer. All methods are elementwise and are never differentiated through.

    A rule that ignores the ratio may set ``uses_ratio = False``; it then works on records without log-probs.
    """

    def weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """f(r) from ``log_ratio = log p − log q`` (nats), same shape."""
        ...

    def weighted_prob(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        """q·f(p/q), finite for every ``logp``, ``logq`` ≤ 0 including −inf."""
        ...

    def tail_scale(self, rho: Tensor, advantages: Tensor) -> Tensor:
        """α = ρ·f(1/ρ), where ρ is the sampler's tail mass over the trainer's."""
        ...


def _ratio(log_ratio: Tensor, keep: Tensor) -> Tensor:
    """exp(log_ratio) where kept, 0 elsewhere; masked before the exponential so that nothing overflows."""
    return torch.where(keep, log_ratio.masked_fill(~keep, 0.0).exp(), torch.zeros_like(log_ratio))


def _prob(logp: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, logp.exp(), torch.zeros_like(logp))


@dataclass(frozen=True)
class Unweighted:
    """f(r) = 1: the plain policy gradient. With centering and an exact support its gradient is A(q − e_y)."""

    uses_ratio: ClassVar[bool] = False

    def weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        return torch.ones_like(log_ratio)

    def weighted_prob(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        return logq.exp()

    def tail_scale(self, rho: Tensor, advantages: Tensor) -> Tensor:
        return rho

    def drift_bound(self, q_tail: Tensor, p_tail: Tensor, advantages: Tensor) -> Tensor:
        return 2.0 * q_tail


@dataclass(frozen=True)
class FullIS:
    """f(r) = r: exact importance sampling of one token; centering changes nothing."""

    def weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        return log_ratio.exp()

    def weighted_prob(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        return logp.exp()

    def tail_scale(self, rho: Tensor, advantages: Tensor) -> Tensor:
        return torch.ones_like(rho)

    def drift_bound(self, q_tail: Tensor, p_tail: Tensor, advantages: Tensor) -> Tensor:
        return torch.zeros_like(q_tail)


@dataclass(frozen=True)
class TruncatedIS:
    """f(r) = min(r, cap), ``cap > 0`` (inf allowed). Source: Ionides 2008, "Truncated Importance Sampling"."""

    cap: float = 2.0

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ValueError(f"cap must be positive, got {self.cap}")

    def weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        return log_ratio.clamp(max=math.log(self.cap)).exp()

    def weighted_prob(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        if math.isinf(self.cap):
            return logp.exp()
        return torch.minimum(logp.exp(), self.cap * logq.exp())

    def tail_scale(self, rho: Tensor, advantages: Tensor) -> Tensor:
        return (self.cap * rho).clamp(max=1.0)

    def drift_bound(self, q_tail: Tensor, p_tail: Tensor, advantages: Tensor) -> Tensor:
        return 2.0 * torch.minimum(p_tail, self.cap * q_tail)


@dataclass(frozen=True)
class MaskedIS:
    """f(r) = r inside [low, high], 0 outside: tokens whose ratio left the band are dropped (MIS).

    The band is inclusive and tested on log r against the logarithms of the bounds. A bound of 0 or inf opens
    that side. Source: IcePop (Ling team, 2025); the same rule as "masked importance sampling" in TRL and verl.
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        check_band(self.low, self.high)

    def _keep(self, log_ratio: Tensor) -> Tensor:
        return in_band(log_ratio, self.low, self.high)

    def weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        return _ratio(log_ratio, self._keep(log_ratio))

    def weighted_prob(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        return _prob(logp, self._keep(logp - logq))

    def tail_scale(self, rho: Tensor, advantages: Tensor) -> Tensor:
        return ((rho >= inverse_bound(self.high)) & (rho <= inverse_bound(self.low))).to(rho.dtype)

    def drift_bound(self, q_tail: Tensor, p_tail: Tensor, advantages: Tensor) -> Tensor:
        return 2.0 * torch.minimum(p_tail, self.high * q_tail)


@dataclass(frozen=True)
class ClampedIS:
    """f(r) = clamp(r, low, high): ratios are pulled to the band's edge instead of dropped."""

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        check_band(self.low, self.high)

    def weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        return log_ratio.clamp(log_bound(self.low), log_bound(self.high)).exp()

    def weighted_prob(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        p, q = logp.exp(), logq.exp()
        raised = torch.maximum(p, self.low * q)
        return raised if math.isinf(self.high) else torch.minimum(raised, self.high * q)

    def tail_scale(self, rho: Tensor, advantages: Tensor) -> Tensor:
        raised = (self.low * rho).clamp(min=1.0)
        return raised if math.isinf(self.high) else torch.minimum(raised, self.high * rho)

    def drift_bound(self, q_tail: Tensor, p_tail: Tensor, advantages: Tensor) -> Tensor:
        return 2.0 * torch.minimum(self.high * q_tail, p_tail + self.low * q_tail)


@dataclass(frozen=True)
class PPOClip:
    """f(r) = r where PPO's clipped objective still has a gradient, 0 where it has none.

    With A ≥ 0 a token is kept while ``r ≤ 1 + high``, with A < 0 while ``r ≥ 1 − low``. The old policy of the
    ratio is the sampler. Bounds: 0 ≤ low ≤ 1, high ≥ 0, inf allowed for high. Source: Schulman et al. 2017,
    https://arxiv.org/abs/1707.06347; asymmetric bounds as in DAPO, https://arxiv.org/abs/2503.14476.
    """

    low: float = 0.2
    high: float = 0.28

    def __post_init__(self) -> None:
        if not (0.0 <= self.low <= 1.0) or not self.high >= 0.0:
            raise ValueError(
                f"bounds must satisfy 0 <= low <= 1 and high >= 0, got low={self.low}, high={self.high}"
            )

    def _keep(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        return torch.where(
            advantages >= 0, log_ratio <= log_bound(1.0 + self.high), log_ratio >= log_bound(1.0 - self.low)
        )

    def weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        return _ratio(log_ratio, self._keep(log_ratio, advantages))

    def weighted_prob(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        return _prob(logp, self._keep(logp - logq, advantages))

    def tail_scale(self, rho: Tensor, advantages: Tensor) -> Tensor:
        keep = torch.where(
            advantages >= 0, rho >= 1.0 / (1.0 + self.high), rho <= inverse_bound(1.0 - self.low)
        )
        return keep.to(rho.dtype)

    def drift_bound(self, q_tail: Tensor, p_tail: Tensor, advantages: Tensor) -> Tensor:
        return torch.where(
            advantages >= 0, 2.0 * torch.minimum(p_tail, (1.0 + self.high) * q_tail), 2.0 * p_tail
        )
