"""Adapter: the ``offpolicy_corr:`` mapping of the YAML that Miles reads through ``--custom-config-path``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from offpolicy_corr.backend import BACKENDS
from offpolicy_corr.correction import Correction

CANDIDATES = ("heads", "supports", "none")
DENOMINATORS = ("all", "kept")
GUARDS: dict[str, tuple[str, ...]] = {
    "geometric_mean": ("low", "high"),
    "product": ("low", "high"),
    "outlier": ("low", "high"),
    "off_policy": ("delta",),
    "behind_newest_sampler": ("max_lag",),
}
EXPONENT = re.compile(r"[+-]?\d+[eE][+-]?\d+")  # a number to most readers, text to YAML 1.1
_RULE_KEYS = ("low", "high", "cap", "tail_floor")


class SettingsError(ValueError):
    """The ``offpolicy_corr:`` mapping is wrong. The message names the key and what may stand there."""


@dataclass(frozen=True)
class Settings:
    """What the mapping says.

    Args:
        correction: from ``correction`` (a name of `Correction.from_name`, default ``sc+mis``) and its bounds
            ``low``, ``high``, ``cap``, ``tail_floor``.
        candidates: ``"heads"`` (rollout_topk_*), ``"supports"`` (rollout_sampling_mask_*), ``"none"``. None, the
            default: supports where Miles samples with top-p or top-k, else heads for a centered correction, else
            none.
        denominator: ``"all"``: a token that the rule drops stays in its sample's mean; ``"kept"``: a sample's
            surviving tokens share its whole weight. Both Miles backends then agree.
        band: ratios outside are reported as out of band, whatever the rule does.
        guards: sequence guards, each with its bounds.
        groups: names of the sampler groups, in the order of the converter's indices; needs the transport extension.
        vocab_size: true vocabulary. None: ``args.vocab_size``, else every column of the logits.
        backend: ``"auto"``, ``"torch"``, ``"triton"``.
        inplace_logits: write the gradient over the logits.
        validate: check record and logits at every call.
    """

    correction: Correction = field(default_factory=Correction)
    candidates: str | None = None
    denominator: str = "all"
    band: tuple[float, float] = (0.2, 5.0)
    guards: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()
    groups: tuple[str, ...] = ()
    vocab_size: int | None = None
    backend: str = "auto"
    inplace_logits: bool = False
    validate: bool = True

    @classmethod
    def of(cls, mapping: Any) -> Settings:
        """Read the mapping; an absent one is the defaults.

        Raises:
            SettingsError: an unknown key, a wrong type, a value out of range, settings that contradict each other.
        """
        if isinstance(mapping, Settings):
            return mapping
        if mapping is None:
            raise SettingsError(
                "no offpolicy_corr: mapping was given. Put one into the YAML; offpolicy_corr: {} is SC + MIS"
            )
        if not isinstance(mapping, Mapping):
            raise SettingsError(f"offpolicy_corr must be a mapping of settings, got {mapping!r}")
        given = dict(mapping)
        known = [f.name for f in fields(cls)] + list(_RULE_KEYS)
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
                raise SettingsError(f"offpolicy_corr has no setting {key!r}: {hint}")
        settings = cls(
            _correction(given),
            _choice(given, "candidates", CANDIDATES, None),
            _choice(given, "denominator", DENOMINATORS, "all") or "all",
            _band(given.get("band", (0.2, 5.0))),
            _guards(given.get("guards")),
            _names(given.get("groups")),
            _vocab_size(given.get("vocab_size")),
            _choice(given, "backend", BACKENDS, "auto") or "auto",
            _flag(given, "inplace_logits", False),
            _flag(given, "validate", True),
        )
        settings._check_together()
        return settings

    def _check_together(self) -> None:
        centered = self.correction.center
        if centered and self.candidates == "none":
            raise SettingsError("a centered correction needs candidates: heads or supports, not none")
        if centered and self.denominator == "kept":
            reason = "a centered correction trains on dropped tokens too, so they stay in the denominator"
            raise SettingsError(
                f"denominator: kept contradicts correction: sc+…: {reason}. Use denominator: all"
            )

    def guards_sampler_lag(self) -> bool:
        """Whether a guard reads weight versions."""
        return any(name == "behind_newest_sampler" for name, _ in self.guards)

    def kind_of_candidates(self, filters: bool) -> str:
        """``"heads"``, ``"supports"`` or ``"none"`` for samplers that filter (top-p, top-k) or do not.

        Raises:
            SettingsError: filtered samplers with heads or nothing: p over the vocabulary would meet q over a support.
        """
        derived = "supports" if filters else "heads" if self.correction.center else "none"
        kind = self.candidates or derived
        if filters and kind != "supports":
            raise SettingsError(
                f"candidates: {kind} cannot serve top-p or top-k: the samplers' q is over a support, and p would "
                "be over the vocabulary. Use candidates: supports, or --rollout-top-p 1 --rollout-top-k -1"
            )
        return kind


def _correction(given: dict[str, Any]) -> Correction:
    name = given.get("correction", "sc+mis")
    if not isinstance(name, str):
        raise SettingsError(f"correction must be a name, for example sc+mis, got {name!r}")
    bounds = {key: number(given[key], key) for key in _RULE_KEYS if key in given}
    try:
        return Correction.from_name(name, **bounds)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"correction: {error}") from None


def number(value: Any, key: str) -> float:
    """A number, not a bool, and not YAML's idea of ``1e-4``, which is a string."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        hint = ""
        if isinstance(value, str) and EXPONENT.fullmatch(value):
            hint = f". YAML reads {value} as text: write it with a point, for example 1.0e-4"
        elif isinstance(value, str) and _is_float(value):
            hint = f". Remove the quotes: {value}"
        raise SettingsError(f"{key} must be a number, got {value!r}{hint}")
    if value != value:
        raise SettingsError(f"{key} must be a number, got NaN")
    return float(value)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _choice(given: dict[str, Any], key: str, allowed: tuple[str, ...], default: str | None) -> str | None:
    value = given.get(key, default)
    if value is not None and value not in allowed:
        raise SettingsError(f"{key} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def _flag(given: dict[str, Any], key: str, default: bool) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise SettingsError(f"{key} must be true or false, got {value!r}")
    return value


def _band(value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise SettingsError(f"band must be [low, high], got {value!r}")
    low, high = (number(bound, "band") for bound in value)
    if not 0.0 <= low <= high:
        raise SettingsError(f"band must satisfy 0 <= low <= high, got {value!r}")
    return low, high


def _guards(value: Any) -> tuple[tuple[str, tuple[tuple[str, float], ...]], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise SettingsError(
            f"guards must be a mapping, for example geometric_mean: {{low: 0.9, high: 1.1}}, got {value!r}"
        )
    read = []
    for name, bounds in value.items():
        if name not in GUARDS:
            raise SettingsError(f"unknown guard {name!r}: known are {', '.join(GUARDS)}")
        wanted = GUARDS[name]
        if not isinstance(bounds, Mapping) or set(bounds) != set(wanted):
            raise SettingsError(f"guards.{name} needs exactly {', '.join(wanted)}, got {bounds!r}")
        numbers = {key: number(bounds[key], f"guards.{name}.{key}") for key in wanted}
        if "low" in numbers and not 0.0 <= numbers["low"] <= numbers["high"]:
            raise SettingsError(f"guards.{name} must satisfy 0 <= low <= high, got {bounds!r}")
        if min(numbers.get("delta", 0.0), numbers.get("max_lag", 0.0)) < 0.0:
            raise SettingsError(f"guards.{name} must be >= 0, got {bounds!r}")
        read.append((name, tuple(numbers.items())))
    return tuple(read)


def _names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) and name for name in value):
        raise SettingsError(f"groups must be a list of names, got {value!r}")
    if len(set(value)) != len(value):
        raise SettingsError(f"groups has a name twice: {value!r}")
    return tuple(value)


def _vocab_size(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"vocab_size must be a positive integer, got {value!r}")
    return value
