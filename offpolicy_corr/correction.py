"""Rules: `Correction`, which weight rule is used and whether the score is centered."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .weights import ClampedIS, FullIS, MaskedIS, PPOClip, TruncatedIS, Unweighted, WeightRule

# every rule of the library by its name; papers' own names stand behind the rule that they publish
RULES: dict[str, type[WeightRule]] = {
    "none": Unweighted,
    "is": FullIS,
    "tis": TruncatedIS,
    "mis": MaskedIS,
    "clamp": ClampedIS,
    "ppo": PPOClip,
    "icepop": MaskedIS,
    "cispo": TruncatedIS,
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
        """A correction by name: a rule of `RULES`, with ``sc+`` before it to center; ``sc`` alone is ``sc+none``.

        ``icepop`` is ``mis`` (Ling team, 2025), ``cispo`` is ``tis``: CISPO's ratio clipped from above at
        ``cap`` = 1 + ε_high (MiniMax-M1, https://arxiv.org/abs/2506.13585). Keywords (``low=``, ``high=``, ``cap=``) go
        to the rule, ``tail_floor=`` to the correction.

        Raises:
            ValueError: an unknown name, or a keyword that the named rule does not have.
        """
        center = name == "sc" or name.startswith("sc+")
        rule_name = "none" if name == "sc" else name.removeprefix("sc+")
        rule = RULES.get(rule_name)
        if rule is None:
            raise ValueError(
                f"unknown correction {name!r}: use one of {', '.join(RULES)}, or 'sc+' before it"
            )
        own = {"tail_floor": overrides.pop("tail_floor")} if "tail_floor" in overrides else {}
        known = [f.name for f in fields(rule)]  # type: ignore[arg-type]
        unknown = sorted(set(overrides) - set(known))
        if unknown:
            has = ", ".join(known) or "no settings"
            raise ValueError(f"{name!r} has no setting {', '.join(unknown)}: {rule.__name__} has {has}")
        return cls(rule(**overrides), center, **own)

    @classmethod
    def of(cls, correction: Correction | str | None) -> Correction:
        """What a ``correction=`` argument means: itself, a name (see `from_name`), or for None the default, SC + MIS.

        Raises:
            TypeError: anything else, a rule or a class among them.
        """
        if correction is None:
            return _DEFAULT
        if isinstance(correction, str):
            return cls.from_name(correction)
        if not isinstance(correction, Correction):
            raise TypeError(
                f"correction must be a Correction or a name such as 'sc+mis', got {correction!r}: a rule goes "
                "into Correction(rule)"
            )
        return correction


_DEFAULT = Correction()  # made once: torch.compile cannot trace its construction
