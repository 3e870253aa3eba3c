"""Adapter: how one option of Miles is judged, and the few of them that this loss computes with."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offpolicy_corr.settings import Settings, number, number_fault

from .host import torch_native

LOSS_OPTION, LOSS_PATH = "custom_loss_function_path", "offpolicy_corr.integrations.miles.policy_loss"
TIS_OPTION, TIS_PATH = "custom_tis_function_path", "offpolicy_corr.integrations.miles.tis_function"
CONVERTER_OPTION = "custom_convert_samples_to_train_data_path"
CONVERTER = "offpolicy_corr.integrations.miles.transport.convert_samples"
HOOK_OPTION, TRAINER_HOOK = (
    "custom_megatron_init_path",
    "offpolicy_corr.integrations.miles.transport.extend_trainer",
)
OWN_FUNCTIONS = {
    LOSS_OPTION: LOSS_PATH,
    TIS_OPTION: TIS_PATH,
    CONVERTER_OPTION: CONVERTER,
    HOOK_OPTION: TRAINER_HOOK,
}

LOSS, TIS = (
    "loss",
    "tis",
)  # what runs: `policy_loss` as Miles' custom loss, or `tis_function` inside Miles' own loss
LOSS_ONLY, TIS_ONLY, BOTH = frozenset({LOSS}), frozenset({TIS}), frozenset({LOSS, TIS})
Fault = tuple[str, str]  # what is wrong, and the remedy


@dataclass(frozen=True)
class Problem:
    """One refusal: what is wrong and why, the remedy, and the options that it is about."""

    names: tuple[str, ...]
    reason: str
    remedy: str

    def text(self, options: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> str:
        """The reason, each of its options that is given with value and source, the remedy."""
        sources = sources or {}
        given = [
            f"{name} = {_short(options[name])}" + (f" {sources[name]}" if name in sources else "")
            for name in self.names
            if options.get(name) is not None or name in sources
        ]
        values = f" ({'; '.join(given)})" if given else ""
        end = "" if self.remedy.endswith(("?", ".")) else "."
        return f"{self.reason}{values}. {self.remedy}{end}"


@dataclass(frozen=True)
class Option:
    """What may stand in one option.

    Args:
        fault: (what is wrong, remedy) of a value, its type, range or choice; None where nothing is wrong.
        runs: where the row holds, for `LOSS`, `TIS` or both.
        launch_only: judged by ``offpolicy-corr miles check`` alone, since the run would not reach the loss, or the loss
            cannot tell what was given from a default.
        is_switch: an option without a value on the launch line.
    """

    name: str
    fault: Callable[[Any], Fault | None]
    runs: frozenset[str]
    launch_only: bool = False
    is_switch: bool = False


@dataclass(frozen=True)
class Rule:
    """Options that need or exclude each other: ``broken`` gets all of them and the settings."""

    names: tuple[str, ...]
    broken: Callable[[Any, Settings], bool]
    reason: str
    remedy: str
    runs: frozenset[str]
    launch_only: bool = False


def drops_count(args: Any) -> bool:
    """Whether this trainer may forget to divide by the tokens of a step, which `step_tokens` finds out."""
    return torch_native(args) and bool(getattr(args, "calculate_per_token_loss", False))


def filters(args: Any) -> bool:
    """Whether Miles' samplers truncate: ``--rollout-top-p`` below 1 or a positive ``--rollout-top-k``."""
    return number_of(args, "rollout_top_p", 1.0) < 1.0 or number_of(args, "rollout_top_k", -1) > 0


def number_of(args: Any, name: str, default: float) -> float:
    """An option's number; the default where it is absent or null. Raises SettingsError where it is none."""
    value = getattr(args, name, None)
    return default if value is None else number(value, name)


def number_option(
    name: str,
    fits: Callable[[float], bool],
    reason: str,
    remedy: str,
    whole: bool = False,
    optional: bool = False,
    runs: frozenset[str] = BOTH,
    launch_only: bool = False,
) -> Option:
    """A finite number of its own range; ``whole``: an integer, as Miles' parser makes it; ``optional``: or null."""

    def fault(value: Any) -> Fault | None:
        if value is None:
            return (
                None
                if optional
                else (f"{name} is null, which Miles would use", "Leave it out or give a number")
            )
        wrong = number_fault(value)
        if wrong is not None and ".inf" not in wrong[1]:
            return f"{name} {wrong[0]}", wrong[1]
        if wrong is not None or math.isinf(value):
            return f"{name} must be finite", "Give a number"
        if whole and not isinstance(value, int):
            return f"{name} must be a whole number", "Give a whole number, without point and exponent"
        return None if fits(value) else (f"{name}: {reason}", remedy)

    return Option(name, fault, runs, launch_only)


def switch(name: str, runs: frozenset[str] = BOTH, launch_only: bool = False) -> Option:
    """true or false; null is false."""
    return Option(name, lambda value: _no_bool(name, value), runs, launch_only, is_switch=True)


def off(name: str, reason: str, remedy: str = "", runs: frozenset[str] = LOSS_ONLY) -> Option:
    """A switch that must be off, because it ``reason``."""

    def fault(value: Any) -> Fault | None:
        on = f"{name} must be off: it {reason}", remedy or f"Leave {name} out"
        return _no_bool(name, value) or (on if value else None)

    return Option(name, fault, runs, is_switch=True)


def unset(name: str, reason: str, remedy: str = "", runs: frozenset[str] = LOSS_ONLY) -> Option:
    """An option with a value that must not be given, because it ``reason``."""
    given = f"{name} must not be set: it {reason}", remedy or f"Leave {name} out"
    return Option(name, lambda value: given if value else None, runs)


def one_of(
    name: str,
    allowed: tuple[str, ...],
    runs: frozenset[str] = BOTH,
    launch_only: bool = False,
    hint: str = "",
    open_ended: bool = False,
) -> Option:
    """One of a few words; ``open_ended``: or one that looks like none of them, which a later Miles may know."""

    def fault(value: Any) -> Fault | None:
        if value is None or value in allowed:
            return None
        near = difflib.get_close_matches(str(value), allowed, 1)
        if open_ended and not near and isinstance(value, str):
            return None
        meant = f"Did you mean {near[0]}? " if near else ""
        return f"unknown {name}", f"{meant}Use one of {', '.join(allowed)}{hint}"

    return Option(name, fault, runs, launch_only)


def refused_word(name: str, word: str, reason: str, remedy: str) -> Option:
    """A word that Miles knows and that must not stand beside `policy_loss`."""
    return Option(name, lambda value: (f"{word} {reason}", remedy) if value == word else None, LOSS_ONLY)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _no_bool(name: str, value: Any) -> Fault | None:
    if value is None or isinstance(value, bool):
        return None
    return (
        f"{name} must be true or false (Miles takes any text as true)",
        "Write true or false, without quotes",
    )
