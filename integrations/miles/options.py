"""Options of Miles that contradict this loss, each with its reason.

Checked at every loss call and by ``offpolicy-corr miles check``: Miles applies the YAML behind most of its own
argument checks, so that an option set there bypasses them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from offpolicy_corr.kl import KL_ESTIMATORS

from .host import torch_native
from .settings import Settings, SettingsError, number

LOSS_PATH = "offpolicy_corr.integrations.miles.policy_loss"
TIS_PATH = "offpolicy_corr.integrations.miles.tis_function"

# switches that must be off under loss_type: custom_loss
_NO_EFFECT = "acts inside Miles' own policy_loss, which does not run: it would be silently without effect"
_MUST_BE_OFF: dict[str, str] = {
    "use_tis": "weights by the same ratio a second time in policy_loss, and Miles forbids it with use_rollout_logprobs",
    "get_mismatch_metrics": _NO_EFFECT + "; the loss reports its own mismatch metrics",
    "custom_tis_function_path": _NO_EFFECT,
    "custom_pg_loss_reducer_function_path": _NO_EFFECT,
    "use_opsm": _NO_EFFECT + "; use guards: off_policy",
    "use_opd": "mixes a teacher into the advantages at the trainer's own log-probs, not checked with this loss",
    "use_unbiased_kl": "weights the KL by a ratio to another old policy; the KL here is unweighted",
    "true_on_policy_mode": "rounds logits and log-probs to half precision before the loss",
    "recompute_logprobs_via_prefill": "replaces q, which was sampled from, by the log-probs of a later pass",
    "skip_actor_forward_only": "is for policy_loss alone in Miles",
    "sglang_speculative_algorithm": "leaves open whether recorded log-probs are those of what was drawn from",
    "multi_lora": "normalizes per adapter behind the loss, not checked with this loss",
}
_NUMBERS = (
    "rollout_temperature",
    "rollout_top_p",
    "rollout_top_k",
    "rollout_min_p",
    "rollout_top_logprobs_num",
    "entropy_coef",
    "kl_coef",
    "kl_loss_coef",
)
_SEQUENCE_LEVEL = {"gspo": "weights whole sequences inside policy_loss", "cispo": "clips inside policy_loss"}


DROPPED_COUNT = (
    "calculate_per_token_loss on a torch-native trainer: Miles drops the token count, so that the gradient grows with "
    "the number of tokens (radixark/miles issue 3231)"
)


def drops_count(args: Any) -> bool:
    """Whether Miles forgets to divide by the tokens of a step."""
    return torch_native(args) and bool(getattr(args, "calculate_per_token_loss", False))


def filters(args: Any) -> bool:
    """Whether Miles' samplers truncate: ``--rollout-top-p`` below 1 or a positive ``--rollout-top-k``."""
    return number_of(args, "rollout_top_p", 1.0) < 1.0 or number_of(args, "rollout_top_k", -1) > 0


def refusals(args: Any, settings: Settings) -> list[str]:
    """Why this loss must not run under ``args``; empty where it may."""
    found = []
    if getattr(args, "loss_type", "custom_loss") != "custom_loss":
        found.append(
            f"loss_type is {args.loss_type!r}: set loss_type: custom_loss and custom_loss_function_path: {LOSS_PATH}"
        )
    for name, reason in _MUST_BE_OFF.items():
        if getattr(args, name, None):
            found.append(f"{name} must be off: it {reason}")
    estimator = str(getattr(args, "advantage_estimator", None))
    if estimator in _SEQUENCE_LEVEL:
        found.append(
            f"advantage_estimator {estimator!r} {_SEQUENCE_LEVEL[estimator]}: use grpo, for example without its std"
        )
    found += _sampling(args) + _kl(args, settings) + _inplace(args, settings)
    return found


def tis_refusals(args: Any, settings: Settings) -> list[str]:
    """Why `tis_function` must not run under ``args``."""
    found = []
    if settings.correction.center:
        found.append(
            "score centering needs logits, which this hook does not get: set loss_type: custom_loss and "
            f"custom_loss_function_path: {LOSS_PATH}, or an uncentered correction (mis, tis, clamp)"
        )
    if type(settings.correction.rule).__name__ == "PPOClip":
        found.append(
            "correction ppo needs advantages, which the hook does not get; Miles' policy_loss clips by itself"
        )
    if settings.candidates not in (None, "none"):
        found.append("candidates have no effect in tis_function: leave them out")
    if settings.inplace_logits:
        found.append("inplace_logits has no effect in tis_function: it sees no logits")
    if settings.vocab_size is not None or settings.backend != "auto":
        found.append("vocab_size and backend have no effect in tis_function: it sees no logits")
    if settings.groups:
        found.append("groups have no effect in tis_function: it does not get the converter's keys")
    reasons = {
        "off_policy": "advantages, which the hook does not get; use Miles' --use-opsm",
        "behind_newest_sampler": "weight versions, which the hook does not get",
    }
    found += [f"guards: {name} needs {reasons[name]}" for name, _ in settings.guards if name in reasons]
    if drops_count(args):
        found.append(f"{DROPPED_COUNT}; this hook cannot mend it")
    if getattr(args, "use_rollout_logprobs", False):
        found.append(
            "use_rollout_logprobs makes trainer and sampler log-probs the same tensor: every ratio would be 1"
        )
    return found


def environment_refusals(environment: Mapping[str, str] | None = None) -> list[str]:
    """What in the environment of the samplers contradicts the record."""
    environment = os.environ if environment is None else environment
    if environment.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "0").lower() in ("1", "true"):
        return ["SGLANG_RETURN_ORIGINAL_LOGPROB=1 makes SGLang report log-probs before temperature: unset it"]
    return []


def _sampling(args: Any) -> list[str]:
    found = []
    temperature = number_of(args, "rollout_temperature", 1.0)
    if not temperature > 0:
        found.append(
            f"rollout_temperature is {temperature}: greedy decoding has no q to correct with, sample at T > 0"
        )
    if number_of(args, "rollout_top_p", 1.0) < 1.0 and not number_of(args, "rollout_top_k", -1) > 0:
        found.append(
            "rollout_top_p < 1 needs a positive rollout_top_k: no released engine records a support without one"
        )
    if number_of(args, "rollout_min_p", 0.0) > 0:
        found.append("rollout_min_p > 0 truncates without a recorded support: use top-p with top-k")
    return found


def _kl(args: Any, settings: Settings) -> list[str]:
    found = []
    over_support = filters(args) or settings.candidates == "supports"
    if over_support and number_of(args, "kl_coef", 0.0) != 0.0:
        found.append(
            "kl_coef with top-p or top-k: the reference is scored over the vocabulary, q over the support"
        )
    if not getattr(args, "use_kl_loss", False):
        return found
    kind = getattr(args, "kl_loss_type", "k1")
    if kind not in KL_ESTIMATORS:
        found.append(f"kl_loss_type {kind!r} is not known: use one of {', '.join(KL_ESTIMATORS)}")
    if over_support:
        found.append(
            "use_kl_loss with top-p or top-k: the reference is scored over the vocabulary, p over the support"
        )
    return found


def _inplace(args: Any, settings: Settings) -> list[str]:
    if not settings.inplace_logits:
        return []
    found = []
    if getattr(args, "recompute_loss_function", False):
        found.append("inplace_logits with recompute_loss_function: what is recomputed must keep its inputs")
    return found


def number_of(args: Any, name: str, default: float) -> float:
    """An option's number; the default where it is absent or null. Raises SettingsError where it is none."""
    value = getattr(args, name, None)
    return default if value is None else number(value, name)


def not_numbers(args: Any) -> list[str]:
    """Options that were given, that this loss computes with, and that hold no number."""
    found = []
    for name in _NUMBERS:
        if getattr(args, name, 0.0) is None:
            found.append(f"{name} is null, which Miles would take: leave it out or give a number")
        try:
            number_of(args, name, 0.0)
        except SettingsError as error:
            found.append(str(error))
    return found
