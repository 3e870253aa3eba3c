"""Row passes: the weight rules on the device, `offpolicy_corr.weights` elementwise and in fp32, for one rule kind
at a time.

The kind is a compile-time constant; the bounds are scalars, so that a new bound does not compile a new kernel.
"""

# device functions have no types that mypy could check
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from offpolicy_corr.numerics import inverse_bound, log_bound
from offpolicy_corr.weights import (
    ClampedIS,
    FullIS,
    MaskedIS,
    PPOClip,
    TruncatedIS,
    Unweighted,
    WeightRule,
)

UNWEIGHTED = tl.constexpr(0)
FULL = tl.constexpr(1)
TRUNCATED = tl.constexpr(2)
MASKED = tl.constexpr(3)
CLAMPED = tl.constexpr(4)
PPO = tl.constexpr(5)


class FusedRule(NamedTuple):
    """A rule as a kernel takes it: its kind, and its bounds on r, on log r, and on ρ = 1/r."""

    kind: int
    low: float = 0.0
    high: float = float("inf")

    @classmethod
    def of(cls, rule: WeightRule) -> FusedRule:
        """Raises TypeError for a rule that is not one of the library's own."""
        if type(rule) is Unweighted:
            return cls(UNWEIGHTED.value)
        if type(rule) is FullIS or (type(rule) is TruncatedIS and rule.cap == float("inf")):
            return cls(FULL.value)
        if type(rule) is TruncatedIS:
            return cls(TRUNCATED.value, 0.0, rule.cap)
        if type(rule) is MaskedIS:
            return cls(MASKED.value, rule.low, rule.high)
        if type(rule) is ClampedIS:
            return cls(CLAMPED.value, rule.low, rule.high)
        if type(rule) is PPOClip:
            return cls(PPO.value, 1.0 - rule.low, 1.0 + rule.high)
        raise TypeError(f"{type(rule).__name__} is not one of the fused weight rules")

    @property
    def bounds(self) -> tuple[float, float, float, float, float, float]:
        """(low, high, log low, log high, 1/high, 1/low), rounded once, on the host, as the torch path does."""
        low, high = self.low, self.high
        return low, high, log_bound(low), log_bound(high), inverse_bound(high), inverse_bound(low)

    @property
    def tail_scale_grows(self) -> bool:
        """Whether α can exceed 1, so that the trainer's tail mass must be summed directly where it is small."""
        return self.kind == UNWEIGHTED.value or (self.kind == CLAMPED.value and self.low > 0.0)


@triton.jit
def token_weight(log_ratio, advantage, log_low, log_high, RULE: tl.constexpr):
    """f(r) from log r; a NaN ratio is in no band and passes through a clamp."""
    if RULE == UNWEIGHTED:
        weight = tl.full(log_ratio.shape, 1.0, tl.float32)
    elif RULE == FULL:
        weight = tl.exp(log_ratio)
    elif RULE == TRUNCATED:
        weight = tl.exp(tl.where(log_ratio > log_high, log_high, log_ratio))
    elif RULE == CLAMPED:
        raised = tl.where(log_ratio < log_low, log_low, log_ratio)
        weight = tl.exp(tl.where(raised > log_high, log_high, raised))
    else:
        keep = _keeps(log_ratio, advantage, log_low, log_high, RULE)
        # masked before the exponential, so that nothing overflows
        weight = tl.where(keep, tl.exp(tl.where(keep, log_ratio, 0.0)), 0.0)
    return weight


@triton.jit
def weighted_prob(logp, logq, advantage, low, high, log_low, log_high, RULE: tl.constexpr):
    """q·f(p/q), finite for every log-prob ≤ 0, −inf included."""
    if RULE == UNWEIGHTED:
        weighted = tl.exp(logq)
    elif RULE == FULL:
        weighted = tl.exp(logp)
    elif RULE == TRUNCATED:
        weighted = tl.minimum(tl.exp(logp), high * tl.exp(logq))
    elif RULE == CLAMPED:
        q = tl.exp(logq)
        raised = tl.maximum(tl.exp(logp), low * q)
        # an open upper side must not become inf · 0
        weighted = tl.where(high == float("inf"), raised, tl.minimum(raised, high * q))
    else:
        keep = _keeps(logp - logq, advantage, log_low, log_high, RULE)
        weighted = tl.where(keep, tl.exp(logp), 0.0)
    return weighted


@triton.jit
def tail_scale(rho, advantage, low, high, tail_low, tail_high, RULE: tl.constexpr):
    """α = ρ·f(1/ρ) of one row."""
    if RULE == UNWEIGHTED:
        alpha = rho
    elif RULE == FULL:
        alpha = rho * 0.0 + 1.0
    elif RULE == TRUNCATED:
        alpha = tl.minimum(high * rho, 1.0)
    elif RULE == CLAMPED:
        alpha = tl.minimum(tl.maximum(low * rho, 1.0), high * rho)
    elif RULE == MASKED:
        alpha = tl.where((rho >= tail_low) & (rho <= tail_high), 1.0, 0.0)
    else:
        alpha = tl.where(tl.where(advantage >= 0, rho >= tail_low, rho <= tail_high), 1.0, 0.0)
    return alpha


@triton.jit
def _keeps(log_ratio, advantage, log_low, log_high, RULE: tl.constexpr):
    if RULE == MASKED:
        keep = (log_ratio >= log_low) & (log_ratio <= log_high)
    else:
        keep = tl.where(advantage >= 0, log_ratio <= log_high, log_ratio >= log_low)
    return keep
