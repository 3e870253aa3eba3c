"""`Correction`: which weight rule, and whether the score is centered."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .weights import ClampedIS, FullIS, MaskedIS, PPOClip, TruncatedIS, Unweighted, WeightRule

_RULES: dict[str, type[WeightRule]] = {
    "none": Unweighted,
    "is": FullIS,
    "tis": TruncatedIS,
    "mis": MaskedIS,
    "clamp": ClampedIS,
    "ppo": PPOClip,
}


@dataclass(frozen=True)
class Correction:
    """How off-policy tokens are used. The default, SC + MIS, is what stays stable.

    Args:
        rule: f, that multiplies a token's term by f(p/q).
        center: subtract, at every position, the expected score under q, weighted by the same rule: removes
            drift whatever the rule drops (score centering, https://arxiv.org/abs/2609.20807).
        tail_floor: ε below which neither side's tail mass is allowed to fall in ρ.
    """

    rule: WeightRule = field(default_factory=MaskedIS)
    center: bool = True
    tail_floor: float = 1e-6

    def __post_init__(self) -> None:
        if isinstance(self.rule, type) or not isinstance(self.rule, WeightRule):
            raise TypeError(f"rule must have weight, weighted_prob and tail_scale, got {self.rule!r}")
        if not 0.0 < self.tail_floor < 1.0:
            raise ValueError(f"tail_floor must lie in (0, 1), got {self.tail_floor}")

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> Correction:
        """``none is mis tis clamp ppo``, each also as ``sc+…``; ``sc`` alone is ``sc+none``.

        Keywords (``low=``, ``high=``, ``cap=``) go to the rule, ``tail_floor=`` to the correction.

        Raises:
            ValueError: an unknown name, or a keyword that the named rule does not have.
        """
        center = name == "sc" or name.startswith("sc+")
        rule_name = "none" if name == "sc" else name.removeprefix("sc+")
        rule = _RULES.get(rule_name)
        if rule is None:
            raise ValueError(
                f"unknown correction {name!r}: use one of {', '.join(_RULES)}, or 'sc+' before it"
            )
        own = {"tail_floor": overrides.pop("tail_floor")} if "tail_floor" in overrides else {}
        known = [f.name for f in fields(rule)]  # type: ignore[arg-type]
        unknown = sorted(set(overrides) - set(known))
        if unknown:
            has = ", ".join(known) or "no settings"
            raise ValueError(f"{name!r} has no setting {', '.join(unknown)}: {rule.__name__} has {has}")
        return cls(rule(**overrides), center, **own)
