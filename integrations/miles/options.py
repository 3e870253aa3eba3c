"""Adapter: how one option of Miles is judged, and the few of them that this loss computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .host import torch_native
from .settings import Settings, SettingsError, number

LOSS_PATH = "offpolicy_corr.integrations.miles.policy_loss"
TIS_PATH = "offpolicy_corr.integrations.miles.tis_function"
CONVERTER = "offpolicy_corr.integrations.miles.transport.convert_samples"
TRAINER_HOOK = "offpolicy_corr.integrations.miles.transport.extend_trainer"
CONVERTER_OPTION, HOOK_OPTION = "custom_convert_samples_to_train_data_path", "custom_megatron_init_path"

LOSS, TIS, LAUNCH, LAUNCH_LOSS = "loss", "tis", "launch", "launch of the loss"  # who checks a row


@dataclass(frozen=True)
class Problem:
    """One refusal: the options it is about, and a sentence with value, reason and remedy."""

    names: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Option:
    """What may stand in one option. ``allowed`` gets the value and returns what is wrong with it, or None."""

    name: str
    allowed: Callable[[Any], str | None]
    at: frozenset[str]
    is_number: bool = False


@dataclass(frozen=True)
class Rule:
    """Options that need or exclude each other: ``broken`` gets all of them and the settings."""

    names: tuple[str, ...]
    broken: Callable[[Any, Settings], bool]
    problem: str
    at: frozenset[str]


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


def at(*places: str) -> frozenset[str]:
    """The checkers of a row."""
    return frozenset(places)


EVERYWHERE = at(LOSS, TIS, LAUNCH, LAUNCH_LOSS)


def number_option(
    name: str, fits: Callable[[float], bool] = lambda x: True, wants: str = "", whole: bool = False
) -> Option:
    """A finite number of its own range; ``wants`` says which."""

    def allowed(value: Any) -> str | None:
        if value is None:
            return "is null, which Miles would take: leave it out or give a number"
        try:
            given = number(value, name)
        except SettingsError as error:
            return str(error).removeprefix(f"{name} ")
        if whole and given != int(given):
            return f"is {value}: give a whole number"
        return None if fits(given) else f"is {value}: {wants}"

    return Option(name, allowed, EVERYWHERE, is_number=True)


def switch(name: str) -> Option:
    """true or false."""

    def allowed(value: Any) -> str | None:
        if value is None or isinstance(value, bool):
            return None
        return f"is {value!r}: write true or false, without quotes (any text counts as true in Miles)"

    return Option(name, allowed, EVERYWHERE)


def off(name: str, reason: str) -> Option:
    """An option that must not be used with this loss, because it ``reason``."""
    return Option(name, lambda value: f"must be off: it {reason}" if value else None, at(LOSS, LAUNCH_LOSS))


def one_of(
    name: str, allowed: tuple[str, ...], refused: Mapping[str, str] | None = None, default: str = ""
) -> Option:
    """One of a few words; ``refused`` gives the reason against words that Miles knows."""

    def check(value: Any) -> str | None:
        if value is None or value in allowed:
            return None
        reason = (refused or {}).get(value) if isinstance(value, str) else None
        if reason is not None:
            return f"{value!r} {reason}"
        return f"is {value!r}: use one of {', '.join(allowed)}{default}"

    return Option(name, check, at(LOSS, LAUNCH_LOSS))
