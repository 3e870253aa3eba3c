"""Public: the settings that every framework's configuration holds under ``offpolicy_corr:``, read and checked.

A framework hands the mapping over as it parsed it (YAML, OmegaConf, JSON); what its own options say is the adapter's.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .backend import BACKENDS
from .correction import Correction

CANDIDATES = ("heads", "supports", "none")
DENOMINATORS = ("all", "kept")
GUARDS: dict[str, tuple[str, ...]] = {
    "geometric_mean": ("low", "high"),
    "product": ("low", "high"),
    "outlier": ("low", "high"),
    "off_policy": ("delta",),
    "behind_newest_sampler": ("max_lag",),
}
_RULE_KEYS = ("low", "high", "cap", "tail_floor")
# what a reader takes for a number, and what YAML 1.1 does: a decimal point before an exponent, and a sign in it
_NUMBER = re.compile(r"([+-]?)(\d*)\.?(\d*)(?:[eE]([+-]?)(\d+))?")
_YAML_NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)|([+-]?\d+\.\d*|\.\d+)([eE][+-]\d+)?")


class SettingsError(ValueError):
    """The ``offpolicy_corr:`` mapping is wrong. The message names the key and what may stand there."""


@dataclass(frozen=True)
class Settings:
    """What the mapping says.

    Args:
        correction: from ``correction`` (a name of `Correction.from_name`, default ``sc+mis``) and its bounds
            ``low``, ``high``, ``cap``, ``tail_floor``.
        candidates: what samplers record beside the sampled token, ``"heads"``, ``"supports"`` or ``"none"``. None, the
            default: supports where the samplers use top-p or top-k, else heads for a centered correction, else none.
        denominator: ``"all"``: a token that the rule drops stays in its sample's mean; ``"kept"``: a sample's
            surviving tokens share its whole weight.
        band: ratios outside are reported as out of band, whatever the rule does.
        guards: sequence guards, each with its bounds.
        groups: names of the sampler groups, in the order of the indices that travel with the tokens.
        vocab_size: true vocabulary. None: the framework's, else every column of the logits.
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
                "no offpolicy_corr: mapping was given. Put one into the configuration; offpolicy_corr: {} is SC + MIS"
            )
        if not isinstance(mapping, Mapping):
            raise SettingsError(f"offpolicy_corr must be a mapping of settings, got {mapping!r}")
        given = dict(mapping)
        known = [f.name for f in fields(cls)] + list(_RULE_KEYS)
        for key in given:
            if key not in known:
                raise SettingsError(f"offpolicy_corr has no setting {key!r}: {nearest(key, known)}")
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
                "be over the vocabulary. Use candidates: supports, or sample without top-p and top-k"
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
    """A number, not a bool, NaN or text."""
    wrong = number_fault(value)
    if wrong is not None:
        raise SettingsError(f"{key} {wrong[0]}, got {value!r}. {wrong[1]}")
    return float(value)


def number_fault(value: Any) -> tuple[str, str] | None:
    """(what is wrong, remedy) where ``value`` is no number; None where it is one."""
    if isinstance(value, str):
        return "must be a number", number_remedy(value) or "Give a number"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "must be a number", "Give a number"
    if value != value:
        return "must be a number", "NaN is none: give a number"
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return "must be a number that fits 64 bits", "Give a smaller one"
    return None


def number_remedy(text: str) -> str | None:
    """How to write a ``text`` that a reader takes for a number so that YAML does so too; None for any other text."""
    if _YAML_NUMBER.fullmatch(text):
        return f"Remove the quotes: {text}"
    found = _NUMBER.fullmatch(text)
    if found and (found[2] or found[3]):
        sign, whole, fraction, exponent_sign, exponent = found.groups()
        mantissa = f"{sign}{whole or '0'}.{fraction or '0'}"
        if exponent is None:
            return f"Write {mantissa} without quotes"
        spelled = f"{mantissa}e{exponent_sign or '+'}{exponent}"
        return f"YAML reads {text} as text: write it with a point and a signed exponent, {spelled}"
    if re.fullmatch(r"[+-]?\d+,\d+", text):
        return f"Write it with a point: {text.replace(',', '.')}"
    if text.lower() in ("inf", "+inf", "-inf", ".inf", "-.inf", "+.inf"):
        return f"Write {'-' * text.startswith('-')}.inf without quotes"
    return None


def nearest(name: Any, known: Iterable[str]) -> str:
    """ "did you mean …?" with the closest known name, or all of them where none is close."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, 1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"


def _choice(given: dict[str, Any], key: str, allowed: tuple[str, ...], default: str | None) -> str | None:
    value = given.get(key, default)
    if value is not None and value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, 1)
        hint = f": did you mean {near[0]}?" if near else ""
        raise SettingsError(f"{key} must be one of {', '.join(allowed)}, got {value!r}{hint}")
    return value


def _flag(given: dict[str, Any], key: str, default: bool) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise SettingsError(f"{key} must be true or false, without quotes, got {value!r}")
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _band(value: Any) -> tuple[float, float]:
    if not _is_list(value) or len(value) != 2:
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
            raise SettingsError(f"unknown guard {name!r}: {nearest(name, GUARDS)}")
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
    if not _is_list(value) or not all(isinstance(name, str) and name for name in value):
        raise SettingsError(f"groups must be a list of names, got {value!r}")
    if len(set(value)) != len(value):
        raise SettingsError(f"groups has a name twice: {value!r}")
    return tuple(value)


def _vocab_size(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        hint = number_remedy(value) if isinstance(value, str) else None
        raise SettingsError(
            f"vocab_size must be a positive integer, got {value!r}{f'. {hint}' if hint else ''}"
        )
    return value
