"""Adapter: options judged by `option_table` and `option_rules`, for the loss, the TIS hook and ``miles check``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from offpolicy_corr.settings import Settings, SettingsError

from .option_rules import RULES
from .option_table import OPTIONS
from .options import LOSS, Problem, Rule


def problems(args: Any, settings: Settings | None, run: str = LOSS, *, launch: bool = False) -> list[Problem]:
    """What is wrong with ``args`` for a run of `LOSS` or `TIS`; empty where nothing is.

    Args:
        settings: None where they could not be read: then no rule is asked.
        launch: judge the rows that only a launch can break, too.
    """
    found = []
    for option in OPTIONS:
        if run in option.runs and (launch or not option.launch_only) and hasattr(args, option.name):
            fault = option.fault(getattr(args, option.name))
            if fault is not None:
                found.append(Problem((option.name,), *fault))
    if settings is None:
        return found
    for rule in RULES:
        if run in rule.runs and (launch or not rule.launch_only) and _broken(rule, args, settings):
            found.append(Problem(rule.names, rule.reason, rule.remedy))
    return found


def _broken(rule: Rule, args: Any, settings: Settings) -> bool:
    try:
        return rule.broken(args, settings)
    except SettingsError:  # a number that is none: its own row says so
        return False


def refuse(args: Any, settings: Settings, run: str, what: str) -> None:
    """Raise `SettingsError` with all that is wrong with the options of a run; ``what`` says who refuses."""
    found = problems(args, settings, run)
    if found:
        texts = [problem.text(vars(args)) for problem in found]
        raise SettingsError("\n- ".join([f"{what} must not run as configured:", *texts]))


def environment_problems(environment: Mapping[str, str] | None = None) -> list[Problem]:
    """What in the environment of the samplers contradicts the record."""
    name = "SGLANG_RETURN_ORIGINAL_LOGPROB"
    environment = os.environ if environment is None else environment
    if environment.get(name, "0").lower() in ("1", "true"):
        return [Problem((), f"{name}=1 makes SGLang report log-probs before temperature", f"Unset {name}")]
    return []
