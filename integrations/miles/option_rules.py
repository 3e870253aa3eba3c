"""Adapter: which of Miles' options need or exclude each other under this loss or hook, with reason and remedy.

See `option_table` for what may stand in one option, and `option_check` for who asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offpolicy_corr.settings import Settings, SettingsError
from offpolicy_corr.weights import PPOClip

from .host import torch_native
from .options import (
    BOTH,
    CONVERTER,
    CONVERTER_OPTION,
    HOOK_OPTION,
    LOSS_ONLY,
    LOSS_OPTION,
    LOSS_PATH,
    TIS_ONLY,
    TIS_OPTION,
    TRAINER_HOOK,
    Rule,
    drops_count,
    filters,
    number_of,
)

GENERATE_OPTION = "custom_generate_function_path"
_EXTENSION = f"{CONVERTER_OPTION}: {CONVERTER} with {HOOK_OPTION}: {TRAINER_HOOK}"
_DROPPED_COUNT = (
    "calculate_per_token_loss on a torch-native trainer: Miles drops the token count, so that the gradient grows with "
    "the number of tokens (radixark/miles pull request 3231)"
)
_MILES_OWN = "(Miles' own check, which the YAML bypasses)"


def _kind(args: Any, settings: Settings) -> str | None:
    """The kind of candidates; None where the settings contradict the sampling options (a rule of its own)."""
    filtered = filters(args)
    try:
        return settings.kind_of_candidates(filtered)
    except SettingsError:
        return None


def _given(args: Any, name: str) -> Any:
    return getattr(args, name, None)


def _on(args: Any, *names: str) -> bool:
    return all(bool(_given(args, name)) for name in names)


def _over_support(args: Any, settings: Settings) -> bool:
    return filters(args) or settings.candidates == "supports"


def _converts(args: Any) -> bool:
    return bool(_given(args, CONVERTER_OPTION) == CONVERTER)


def _extended(args: Any) -> bool:
    """Whether the transport extension is there: the converter, and on Megatron its hook in the trainer."""
    return _converts(args) and (torch_native(args) or _given(args, HOOK_OPTION) == TRAINER_HOOK)


def _bshd(args: Any) -> bool:
    return bool(_given(args, "qkv_format") == "bshd")


def _has_guard(name: str) -> Callable[[Any, Settings], bool]:
    return lambda args, settings: any(guard == name for guard, _ in settings.guards)


RULES: tuple[Rule, ...] = (
    # sampling
    Rule(
        ("rollout_top_p", "rollout_top_k"),
        lambda a, s: number_of(a, "rollout_top_p", 1.0) < 1.0 and number_of(a, "rollout_top_k", -1) <= 0,
        "rollout_top_p < 1 needs a positive rollout_top_k: no released engine records a support without one",
        "Set rollout_top_k, for example to 64",
        LOSS_ONLY,
    ),
    Rule(
        ("rollout_top_p", "rollout_top_k"),
        lambda a, s: s.candidates == "supports" and not filters(a),
        "candidates: supports, and unfiltered samplers record none",
        "Set rollout_top_p < 1 with rollout_top_k > 0, or candidates: heads",
        LOSS_ONLY,
        launch_only=True,
    ),
    Rule(
        ("rollout_top_p", "rollout_top_k"),
        lambda a, s: filters(a) and s.candidates in ("heads", "none"),
        "top-p or top-k leaves q over a support, and p would be over the vocabulary",
        "Set candidates: supports, or sample with --rollout-top-p 1 --rollout-top-k -1",
        LOSS_ONLY,
        launch_only=True,
    ),
    Rule(
        ("rollout_top_p", "rollout_top_k"),
        lambda a, s: filters(a),
        "tis_function with top-p or top-k: q is over a support, and Miles' log-probs are over the vocabulary",
        f"Set loss_type: custom_loss, {LOSS_OPTION}: {LOSS_PATH} and candidates: supports, or sample with "
        "--rollout-top-p 1 --rollout-top-k -1",
        TIS_ONLY,
        launch_only=True,
    ),
    Rule(
        ("rollout_top_logprobs_num",),
        lambda a, s: (
            _kind(a, s) == "heads"
            and number_of(a, "rollout_top_logprobs_num", 0) <= 0
            and not _given(a, GENERATE_OPTION)
        ),
        "no head is recorded without --rollout-top-logprobs-num",
        "Set it, for example to 128 (before Miles had it: --custom-generate-function-path with a function that calls "
        "transport.attach)",
        LOSS_ONLY,
        launch_only=True,
    ),
    Rule(
        ("rollout_top_logprobs_num", "rollout_top_k"),
        lambda a, s: (
            _kind(a, s) == "supports"
            and s.correction.center
            and 0 < number_of(a, "rollout_top_logprobs_num", 0) < number_of(a, "rollout_top_k", -1)
        ),
        "rollout_top_logprobs_num cannot hold a support of rollout_top_k",
        "Set both to the same number, or leave rollout_top_logprobs_num out",
        LOSS_ONLY,
        launch_only=True,
    ),
    Rule(
        ("rollout_top_p", "rollout_top_k", CONVERTER_OPTION, HOOK_OPTION),
        lambda a, s: _kind(a, s) == "supports" and not torch_native(a) and not _extended(a),
        "on Megatron the recorded supports reach the loss only with the transport extension",
        f"Set {_EXTENSION}",
        LOSS_ONLY,
        launch_only=True,
    ),
    # KL and advantages
    Rule(
        ("kl_coef", "rollout_top_p", "rollout_top_k"),
        lambda a, s: _over_support(a, s) and number_of(a, "kl_coef", 0.0) != 0.0,
        "kl_coef with top-p or top-k: the reference is scored over the vocabulary, q over the support",
        "Set kl_coef to 0, or sample without top-p and top-k",
        LOSS_ONLY,
    ),
    Rule(
        ("use_kl_loss", "rollout_top_p", "rollout_top_k"),
        lambda a, s: _on(a, "use_kl_loss") and _over_support(a, s),
        "use_kl_loss with top-p or top-k: the reference is scored over the vocabulary, p over the support",
        "Leave use_kl_loss out, or sample without top-p and top-k",
        LOSS_ONLY,
    ),
    Rule(
        ("kl_coef", "kl_loss_coef"),
        lambda a, s: number_of(a, "kl_coef", 0.0) != 0.0 and number_of(a, "kl_loss_coef", 0.0) != 0.0,
        f"kl_coef and kl_loss_coef exclude each other {_MILES_OWN}",
        "Keep one of them",
        BOTH,
        launch_only=True,
    ),
    Rule(
        ("kl_loss_coef", "use_kl_loss"),
        lambda a, s: number_of(a, "kl_loss_coef", 0.0) != 0.0 and not _on(a, "use_kl_loss"),
        "kl_loss_coef has no effect without use_kl_loss",
        "Set use_kl_loss, or leave kl_loss_coef out",
        BOTH,
        launch_only=True,
    ),
    Rule(
        ("advantage_estimator", "normalize_advantages"),
        lambda a, s: (
            str(_given(a, "advantage_estimator")).startswith("reinforce_plus_plus")
            and not _on(a, "normalize_advantages")
        ),
        f"this advantage_estimator needs normalize_advantages {_MILES_OWN}",
        "Set normalize_advantages",
        BOTH,
        launch_only=True,
    ),
    Rule(
        ("advantage_estimator", "train_backend"),
        lambda a, s: _given(a, "advantage_estimator") == "ppo" and torch_native(a),
        f"advantage_estimator ppo needs the Megatron backend {_MILES_OWN}",
        "Use grpo, or train on Megatron",
        BOTH,
        launch_only=True,
    ),
    Rule(
        ("compute_advantages_and_returns",),
        lambda a, s: _given(a, "compute_advantages_and_returns") is False,
        "the loss needs advantages, and --disable-compute-advantages-and-returns leaves them out",
        "Leave that option out",
        BOTH,
        launch_only=True,
    ),
    Rule(
        ("get_mismatch_metrics", TIS_OPTION),
        lambda a, s: _on(a, "get_mismatch_metrics") and not _given(a, TIS_OPTION),
        f"get_mismatch_metrics needs {TIS_OPTION} {_MILES_OWN}",
        f"Leave it out, or set {TIS_OPTION}",
        TIS_ONLY,
        launch_only=True,
    ),
    # the trainer
    Rule(
        ("recompute_loss_function",),
        lambda a, s: s.inplace_logits and _on(a, "recompute_loss_function"),
        "inplace_logits with recompute_loss_function: a recomputed function must keep its inputs",
        "Leave one of them out",
        LOSS_ONLY,
    ),
    Rule(
        ("qkv_format", "train_backend"),
        lambda a, s: _bshd(a) and torch_native(a),
        "qkv_format bshd needs the Megatron backend",
        "Use thd",
        BOTH,
        launch_only=True,
    ),
    Rule(
        ("qkv_format", "use_dynamic_batch_size"),
        lambda a, s: _bshd(a) and _on(a, "use_dynamic_batch_size"),
        "qkv_format bshd excludes use_dynamic_batch_size",
        "Use thd, or set micro_batch_size in place of it",
        BOTH,
        launch_only=True,
    ),
    # transport
    Rule(
        (CONVERTER_OPTION,),
        lambda a, s: bool(s.groups) and not _converts(a),
        "groups are stamped by the transport extension alone",
        f"Set {_EXTENSION}",
        LOSS_ONLY,
        launch_only=True,
    ),
    Rule(
        (CONVERTER_OPTION,),
        lambda a, s: s.guards_sampler_lag() and not _converts(a),
        "guards: behind_newest_sampler reads lags, which the transport extension alone stamps",
        f"Set {_EXTENSION}",
        LOSS_ONLY,
        launch_only=True,
    ),
    Rule(
        ("calculate_per_token_loss", CONVERTER_OPTION),
        lambda a, s: drops_count(a) and not _converts(a),
        _DROPPED_COUNT,
        f"Set {CONVERTER_OPTION}: {CONVERTER}, which counts the tokens of a step",
        LOSS_ONLY,
        launch_only=True,
    ),
    Rule(
        (CONVERTER_OPTION, HOOK_OPTION),
        lambda a, s: _converts(a) and not _extended(a),
        "the converter's keys reach the loss only with the hook in the trainer",
        f"Set {HOOK_OPTION}: {TRAINER_HOOK}",
        LOSS_ONLY,
        launch_only=True,
    ),
    Rule(
        (HOOK_OPTION, CONVERTER_OPTION),
        lambda a, s: _given(a, HOOK_OPTION) == TRAINER_HOOK and not _converts(a),
        "the hook in the trainer has no effect without the converter",
        f"Set {CONVERTER_OPTION}: {CONVERTER}, or leave the hook out",
        LOSS_ONLY,
        launch_only=True,
    ),
    Rule(
        ("delay_split_train_data_by_dp", "ft_components"),
        lambda a, s: (
            _converts(a)
            and (_on(a, "delay_split_train_data_by_dp") or "train" in str(_given(a, "ft_components") or ""))
        ),
        "data is split in the trainer (delay_split_train_data_by_dp, or ft_components with train), where the "
        "converter's keys would be dropped",
        "Turn it off",
        LOSS_ONLY,
        launch_only=True,
    ),
    Rule(
        ("use_dynamic_global_batch_size", CONVERTER_OPTION),
        lambda a, s: _converts(a) and _on(a, "use_dynamic_global_batch_size"),
        "use_dynamic_global_batch_size with the converter: Miles takes the batch size of a step from its own converter "
        "alone and stops without it",
        "Turn use_dynamic_global_batch_size off",
        LOSS_ONLY,
        launch_only=True,
    ),
    # the TIS hook
    Rule(
        (TIS_OPTION,),
        lambda a, s: s.correction.center,
        "score centering needs logits, which this hook does not get",
        f"Set loss_type: custom_loss and {LOSS_OPTION}: {LOSS_PATH}, or an uncentered correction (mis, tis, clamp)",
        TIS_ONLY,
    ),
    Rule(
        (TIS_OPTION,),
        lambda a, s: isinstance(s.correction.rule, PPOClip),
        "correction ppo needs advantages, which the hook does not get",
        "Use correction: mis, tis or clamp; Miles' policy_loss clips by itself",
        TIS_ONLY,
    ),
    Rule(
        (),
        lambda a, s: s.candidates not in (None, "none"),
        "candidates have no effect in tis_function",
        "Leave candidates out",
        TIS_ONLY,
    ),
    Rule(
        (),
        lambda a, s: s.inplace_logits,
        "inplace_logits has no effect in tis_function: it sees no logits",
        "Leave inplace_logits out",
        TIS_ONLY,
    ),
    Rule(
        (),
        lambda a, s: s.vocab_size is not None or s.backend != "auto",
        "vocab_size and backend have no effect in tis_function: it sees no logits",
        "Leave vocab_size and backend out",
        TIS_ONLY,
    ),
    Rule(
        (),
        lambda a, s: bool(s.groups),
        "groups have no effect in tis_function: it does not get the converter's keys",
        "Leave groups out",
        TIS_ONLY,
    ),
    Rule(
        (),
        _has_guard("off_policy"),
        "guards: off_policy needs advantages, which the hook does not get",
        "Use Miles' --use-opsm",
        TIS_ONLY,
    ),
    Rule(
        (),
        _has_guard("behind_newest_sampler"),
        "guards: behind_newest_sampler needs weight versions, which the hook does not get",
        f"Set loss_type: custom_loss and {LOSS_OPTION}: {LOSS_PATH}, or leave the guard out",
        TIS_ONLY,
    ),
    Rule(
        ("calculate_per_token_loss", "train_backend"),
        lambda a, s: drops_count(a),
        f"{_DROPPED_COUNT}, and this hook cannot mend it",
        "Leave calculate_per_token_loss out, or train on Megatron",
        TIS_ONLY,
    ),
    Rule(
        ("use_rollout_logprobs",),
        lambda a, s: _on(a, "use_rollout_logprobs"),
        "use_rollout_logprobs makes trainer and sampler log-probs the same tensor: every ratio would be 1",
        "Leave use_rollout_logprobs out",
        TIS_ONLY,
    ),
)
