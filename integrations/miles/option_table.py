"""Adapter: what Miles' options may be under this loss, each with its reason, in one table.

`OPTIONS` says what may stand in one option, `RULES` which options need or exclude each other. The loss and the TIS hook
check the rows marked with their name whenever they are called; ``offpolicy-corr miles check`` checks those rows
before the launch, and the rows that only a launch can break. Miles applies the YAML of ``--custom-config-path``
behind most of its own argument checks, so that an option set there bypasses them: they are repeated here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from offpolicy_corr.kl import KL_ESTIMATORS
from offpolicy_corr.weights import PPOClip

from .host import torch_native
from .options import (
    CONVERTER,
    CONVERTER_OPTION,
    HOOK_OPTION,
    LAUNCH,
    LAUNCH_LOSS,
    LOSS,
    LOSS_PATH,
    TIS,
    TRAINER_HOOK,
    Option,
    Problem,
    Rule,
    at,
    drops_count,
    filters,
    number_of,
    number_option,
    off,
    one_of,
    switch,
)
from .settings import Settings, SettingsError

_NO_EFFECT = "acts inside Miles' own policy_loss, which does not run: it would be silently without effect"

OPTIONS: tuple[Option, ...] = (
    number_option(
        "rollout_temperature", lambda x: x > 0, "greedy decoding has no q to correct with, sample at T > 0"
    ),
    number_option("rollout_top_p", lambda x: 0 < x <= 1, "it lies in (0, 1]; 1 is off"),
    number_option("rollout_top_k", whole=True),
    number_option(
        "rollout_min_p", lambda x: x == 0, "it truncates without a recorded support: use top-p with top-k"
    ),
    number_option(
        "rollout_top_logprobs_num", lambda x: x >= 0, "it counts the ids of a head; 0 is off", whole=True
    ),
    number_option("entropy_coef"),
    number_option("kl_coef"),
    number_option("kl_loss_coef"),
    switch("use_rollout_logprobs"),
    switch("use_kl_loss"),
    switch("calculate_per_token_loss"),
    switch("recompute_loss_function"),
    switch("use_tis"),
    off(
        "use_tis",
        "weights by the same ratio a second time in policy_loss, and excludes use_rollout_logprobs: the two "
        "exclude each other in Miles",
    ),
    off("get_mismatch_metrics", _NO_EFFECT + "; the loss reports its own mismatch metrics"),
    off("custom_tis_function_path", _NO_EFFECT),
    off("custom_pg_loss_reducer_function_path", _NO_EFFECT),
    off("use_opsm", _NO_EFFECT + "; use guards: off_policy"),
    off(
        "use_opd",
        "mixes a teacher into the advantages at the trainer's own log-probs, not checked with this loss",
    ),
    off("use_unbiased_kl", "weights the KL by a ratio to another old policy; the KL here is unweighted"),
    off("true_on_policy_mode", "rounds logits and log-probs to half precision before the loss"),
    off(
        "recompute_logprobs_via_prefill",
        "replaces q, which was sampled from, by the log-probs of a later pass",
    ),
    off("skip_actor_forward_only", "is for policy_loss alone in Miles"),
    off(
        "sglang_speculative_algorithm",
        "leaves open whether recorded log-probs are those of what was drawn from",
    ),
    off("multi_lora", "normalizes per adapter behind the loss, not checked with this loss"),
    one_of("loss_type", ("custom_loss",), default=f", with custom_loss_function_path: {LOSS_PATH}"),
    one_of("qkv_format", ("thd", "bshd")),
    one_of(
        "advantage_estimator",
        ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
        {
            "gspo": "weights whole sequences inside policy_loss: use grpo, for example without its std",
            "cispo": "clips inside policy_loss: use grpo with correction: cispo",
        },
    ),
)


def _kind(args: Any, settings: Settings) -> str | None:
    """The kind of candidates; None where the settings contradict the sampling options (a rule of its own)."""
    try:
        return settings.kind_of_candidates(filters(args))
    except SettingsError:
        return None


def _over_support(args: Any, settings: Settings) -> bool:
    return filters(args) or settings.candidates == "supports"


def _given(args: Any, name: str) -> Any:
    return getattr(args, name, None)


def _extended(args: Any) -> bool:
    """Whether the transport extension is there: the converter, and on Megatron its hook in the trainer."""
    if _given(args, CONVERTER_OPTION) != CONVERTER:
        return False
    return torch_native(args) or _given(args, HOOK_OPTION) == TRAINER_HOOK


def _guard(name: str) -> Callable[[Any, Settings], bool]:
    return lambda args, settings: any(guard == name for guard, _ in settings.guards)


DROPPED_COUNT = (
    "calculate_per_token_loss on a torch-native trainer: Miles drops the token count, so that the gradient grows with "
    "the number of tokens (radixark/miles pull request 3231)"
)
_EXTENSION = f"{CONVERTER_OPTION}: {CONVERTER} with {HOOK_OPTION}: {TRAINER_HOOK}"

RULES: tuple[Rule, ...] = (
    # sampling
    Rule(
        ("rollout_top_p", "rollout_top_k"),
        lambda a, s: number_of(a, "rollout_top_p", 1.0) < 1.0 and not number_of(a, "rollout_top_k", -1) > 0,
        "rollout_top_p < 1 needs a positive rollout_top_k: no released engine records a support without one",
        at(LOSS, LAUNCH_LOSS),
    ),
    Rule(
        ("rollout_top_p", "rollout_top_k"),
        lambda a, s: s.candidates == "supports" and not filters(a),
        "candidates: supports needs rollout_top_p < 1 with rollout_top_k > 0: unfiltered samplers record none",
        at(LAUNCH_LOSS),
    ),
    Rule(
        ("rollout_top_p", "rollout_top_k"),
        lambda a, s: filters(a) and s.candidates in ("heads", "none"),
        "top-p or top-k leaves q over a support, and p would be over the vocabulary: use candidates: supports, or "
        "--rollout-top-p 1 --rollout-top-k -1",
        at(LAUNCH_LOSS),
    ),
    Rule(
        ("rollout_top_logprobs_num",),
        lambda a, s: (
            _kind(a, s) == "heads"
            and not number_of(a, "rollout_top_logprobs_num", 0) > 0
            and not _given(a, "custom_generate_function_path")
        ),
        "no head is recorded without --rollout-top-logprobs-num: set it, for example to 128 (or, before Miles had it, "
        "--custom-generate-function-path with a function that calls transport.attach)",
        at(LAUNCH_LOSS),
    ),
    Rule(
        ("rollout_top_logprobs_num", "rollout_top_k"),
        lambda a, s: (
            _kind(a, s) == "supports"
            and 0 < number_of(a, "rollout_top_logprobs_num", 0) < number_of(a, "rollout_top_k", -1)
        ),
        "rollout_top_logprobs_num {rollout_top_logprobs_num} cannot hold a support of rollout_top_k {rollout_top_k}",
        at(LAUNCH_LOSS),
    ),
    Rule(
        ("rollout_top_p", CONVERTER_OPTION, HOOK_OPTION),
        lambda a, s: _kind(a, s) == "supports" and not torch_native(a) and not _extended(a),
        f"on Megatron the recorded supports reach the loss only with {_EXTENSION}",
        at(LAUNCH_LOSS),
    ),
    # KL and entropy
    Rule(
        ("kl_coef",),
        lambda a, s: _over_support(a, s) and number_of(a, "kl_coef", 0.0) != 0.0,
        "kl_coef with top-p or top-k: the reference is scored over the vocabulary, q over the support",
        at(LOSS, LAUNCH_LOSS),
    ),
    Rule(
        ("kl_loss_type",),
        lambda a, s: bool(_given(a, "use_kl_loss")) and getattr(a, "kl_loss_type", "k1") not in KL_ESTIMATORS,
        f"kl_loss_type {{kl_loss_type!r}} is not known: use one of {', '.join(KL_ESTIMATORS)}",
        at(LOSS, LAUNCH_LOSS),
    ),
    Rule(
        ("use_kl_loss",),
        lambda a, s: bool(_given(a, "use_kl_loss")) and _over_support(a, s),
        "use_kl_loss with top-p or top-k: the reference is scored over the vocabulary, p over the support",
        at(LOSS, LAUNCH_LOSS),
    ),
    Rule(
        ("kl_coef", "kl_loss_coef"),
        lambda a, s: bool(_given(a, "kl_coef") and _given(a, "kl_loss_coef")),
        "kl_coef and kl_loss_coef exclude each other (Miles' own check, which the YAML bypasses)",
        at(LAUNCH),
    ),
    Rule(
        ("advantage_estimator", "normalize_advantages"),
        lambda a, s: (
            str(_given(a, "advantage_estimator")).startswith("reinforce_plus_plus")
            and not _given(a, "normalize_advantages")
        ),
        "{advantage_estimator} needs normalize_advantages (Miles' own check, which the YAML bypasses)",
        at(LAUNCH),
    ),
    Rule(
        ("get_mismatch_metrics", "custom_tis_function_path"),
        lambda a, s: bool(_given(a, "get_mismatch_metrics") and not _given(a, "custom_tis_function_path")),
        "get_mismatch_metrics needs custom_tis_function_path (Miles' own check, which the YAML bypasses)",
        at(LAUNCH),
    ),
    # the loss itself
    Rule(
        ("recompute_loss_function",),
        lambda a, s: s.inplace_logits and bool(_given(a, "recompute_loss_function")),
        "inplace_logits with recompute_loss_function: a recomputed function must keep its inputs",
        at(LOSS, LAUNCH_LOSS),
    ),
    # transport
    Rule(
        (CONVERTER_OPTION,),
        lambda a, s: bool(s.groups) and _given(a, CONVERTER_OPTION) != CONVERTER,
        f"groups need {CONVERTER_OPTION}: {CONVERTER}, which stamps them",
        at(LAUNCH),
    ),
    Rule(
        (CONVERTER_OPTION,),
        lambda a, s: s.guards_sampler_lag() and _given(a, CONVERTER_OPTION) != CONVERTER,
        f"guards: behind_newest_sampler needs {CONVERTER_OPTION}: {CONVERTER}, which stamps the lags",
        at(LAUNCH),
    ),
    Rule(
        ("calculate_per_token_loss", CONVERTER_OPTION),
        lambda a, s: drops_count(a) and _given(a, CONVERTER_OPTION) != CONVERTER,
        f"{DROPPED_COUNT}. {CONVERTER_OPTION}: {CONVERTER} counts the tokens of a step",
        at(LAUNCH_LOSS),
    ),
    Rule(
        (HOOK_OPTION,),
        lambda a, s: _given(a, CONVERTER_OPTION) == CONVERTER and not _extended(a),
        f"the converter's keys reach the loss only with {HOOK_OPTION}: {TRAINER_HOOK}",
        at(LAUNCH),
    ),
    Rule(
        ("delay_split_train_data_by_dp",),
        lambda a, s: (
            _given(a, CONVERTER_OPTION) == CONVERTER and bool(_given(a, "delay_split_train_data_by_dp"))
        ),
        "delay_split_train_data_by_dp splits in the trainer, where the converter's keys would be dropped",
        at(LAUNCH),
    ),
    Rule(
        ("use_dynamic_global_batch_size",),
        lambda a, s: (
            _given(a, CONVERTER_OPTION) == CONVERTER and bool(_given(a, "use_dynamic_global_batch_size"))
        ),
        "use_dynamic_global_batch_size with the converter: Miles takes the batch size of a step from its own converter "
        "alone and stops without it. Turn it off",
        at(LAUNCH),
    ),
    # the TIS hook
    Rule(
        ("custom_tis_function_path",),
        lambda a, s: s.correction.center,
        "score centering needs logits, which this hook does not get: set loss_type: custom_loss and "
        f"custom_loss_function_path: {LOSS_PATH}, or an uncentered correction (mis, tis, clamp)",
        at(TIS),
    ),
    Rule(
        ("custom_tis_function_path",),
        lambda a, s: isinstance(s.correction.rule, PPOClip),
        "correction ppo needs advantages, which the hook does not get; Miles' policy_loss clips by itself",
        at(TIS),
    ),
    Rule(
        (),
        lambda a, s: s.candidates not in (None, "none"),
        "candidates have no effect in tis_function: leave them out",
        at(TIS),
    ),
    Rule(
        (),
        lambda a, s: s.inplace_logits,
        "inplace_logits has no effect in tis_function: it sees no logits",
        at(TIS),
    ),
    Rule(
        (),
        lambda a, s: s.vocab_size is not None or s.backend != "auto",
        "vocab_size and backend have no effect in tis_function: it sees no logits",
        at(TIS),
    ),
    Rule(
        (),
        lambda a, s: bool(s.groups),
        "groups have no effect in tis_function: it does not get the converter's keys",
        at(TIS),
    ),
    Rule(
        (),
        _guard("off_policy"),
        "guards: off_policy needs advantages, which the hook does not get; use Miles' --use-opsm",
        at(TIS),
    ),
    Rule(
        (),
        _guard("behind_newest_sampler"),
        "guards: behind_newest_sampler needs weight versions, which the hook does not get",
        at(TIS),
    ),
    Rule(
        ("calculate_per_token_loss",),
        lambda a, s: drops_count(a),
        f"{DROPPED_COUNT}; this hook cannot mend it",
        at(TIS),
    ),
    Rule(
        ("use_rollout_logprobs",),
        lambda a, s: bool(_given(a, "use_rollout_logprobs")),
        "use_rollout_logprobs makes trainer and sampler log-probs the same tensor: every ratio would be 1",
        at(TIS),
    ),
)


def problems(args: Any, settings: Settings, checker: str) -> list[Problem]:
    """What is wrong with ``args`` for one ``checker`` (`LOSS`, `TIS`, `LAUNCH`, `LAUNCH_LOSS`); empty where nothing is.

    Rules compute with numbers: they are asked only where every number is one.
    """
    found, numbers_are_right = list[Problem](), True
    for option in OPTIONS:
        if checker in option.at and hasattr(args, option.name):
            wrong = option.allowed(getattr(args, option.name))
            if wrong is not None:
                found.append(Problem((option.name,), f"{option.name} {wrong}"))
                numbers_are_right &= not option.is_number
    if numbers_are_right:
        broken = [rule for rule in RULES if checker in rule.at and rule.broken(args, settings)]
        found += [Problem(rule.names, _filled(rule, args)) for rule in broken]
    return found


def _filled(rule: Rule, args: Any) -> str:
    return rule.problem.format(**{name: getattr(args, name, None) for name in rule.names})


def environment_problems(environment: Mapping[str, str] | None = None) -> list[Problem]:
    """What in the environment of the samplers contradicts the record."""
    name = "SGLANG_RETURN_ORIGINAL_LOGPROB"
    environment = os.environ if environment is None else environment
    if environment.get(name, "0").lower() in ("1", "true"):
        return [Problem((), f"{name}=1 makes SGLang report log-probs before temperature: unset it")]
    return []
