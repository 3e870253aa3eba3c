"""Adapter: what may stand in each of Miles' options under this loss or hook, with reason and remedy, in one table.

`option_rules` says which options need or exclude each other. The loss and the TIS hook judge the rows that hold for
them at every call; ``offpolicy-corr miles check`` judges the same rows before the launch, and those that only a launch
can break. Types and choices repeat Miles' own parser, because the YAML of ``--custom-config-path`` is applied after it.
"""

from __future__ import annotations

from offpolicy_corr.kl import KL_ESTIMATORS

from .options import (
    LOSS_ONLY,
    LOSS_OPTION,
    LOSS_PATH,
    TIS_ONLY,
    Option,
    number_option,
    off,
    one_of,
    refused_word,
    switch,
    unset,
)

_NO_EFFECT = "acts inside Miles' own policy_loss, which does not run: it would be silently without effect"


def _any(value: float) -> bool:
    return True


OPTIONS: tuple[Option, ...] = (
    # sampling
    number_option(
        "rollout_temperature", lambda x: x > 0, "greedy decoding has no q to correct with", "Sample at T > 0"
    ),
    number_option("rollout_top_p", lambda x: 0 < x <= 1, "it lies in (0, 1]", "1 turns it off"),
    number_option(
        "rollout_top_k", lambda x: x == -1 or x >= 1, "SGLang takes -1 or at least 1", "-1 turns it off", whole=True
    ),
    number_option(
        "rollout_min_p",
        lambda x: x == 0,
        "it truncates without a recorded support",
        "Use rollout_top_p with rollout_top_k, and set it to 0",
    ),
    number_option(
        "rollout_top_logprobs_num",
        lambda x: x >= 0,
        "it counts the ids of a head",
        "Give 0 (off) or more, for example 128",
        whole=True,
    ),
    unset(
        "sglang_speculative_algorithm",
        "leaves open whether recorded log-probs are those of what was drawn from",
        runs=LOSS_ONLY,
    ),
    # the loss
    one_of("loss_type", ("custom_loss",), runs=LOSS_ONLY, hint=f", with {LOSS_OPTION}: {LOSS_PATH}"),
    one_of("loss_type", ("policy_loss",), runs=TIS_ONLY, launch_only=True, hint=": the hook is called there alone"),
    switch("use_rollout_logprobs"),
    switch("calculate_per_token_loss"),
    switch("recompute_loss_function"),
    number_option("entropy_coef", _any, "", ""),
    number_option("kl_coef", _any, "", ""),
    number_option("kl_loss_coef", _any, "", ""),
    switch("use_kl_loss"),
    one_of("kl_loss_type", tuple(KL_ESTIMATORS)),
    off("use_unbiased_kl", "weights the KL by a ratio to another old policy; the KL here is unweighted"),
    switch("use_tis"),
    off(
        "use_tis",
        "weights by the same ratio a second time in policy_loss; use_tis and use_rollout_logprobs exclude each other "
        "in Miles",
    ),
    number_option("tis_clip", _any, "", ""),
    number_option("tis_clip_low", _any, "", ""),
    unset("custom_tis_function_path", _NO_EFFECT),
    off("get_mismatch_metrics", _NO_EFFECT, "Leave it out: the loss reports its own mismatch metrics"),
    unset("custom_pg_loss_reducer_function_path", _NO_EFFECT),
    off("use_opsm", _NO_EFFECT, "Leave it out, and use guards: off_policy"),
    off("use_opd", "mixes a teacher into the advantages at the trainer's own log-probs, not checked with this loss"),
    # advantages
    one_of(
        "advantage_estimator",
        ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
    ),
    refused_word(
        "advantage_estimator",
        "gspo",
        "weights whole sequences inside policy_loss, which does not run",
        "Use grpo, for example without its std",
    ),
    refused_word(
        "advantage_estimator",
        "cispo",
        "clips inside policy_loss, which does not run",
        "Use grpo with correction: cispo",
    ),
    switch("normalize_advantages", launch_only=True),
    switch("grpo_std_normalization", launch_only=True),
    switch("rewards_normalization", launch_only=True),
    switch("compute_advantages_and_returns", launch_only=True),
    # the trainer
    one_of("train_backend", ("megatron", "fsdp"), launch_only=True, open_ended=True),
    one_of("qkv_format", ("thd", "bshd")),
    switch("allgather_cp"),
    number_option(
        "vocab_size", lambda x: x >= 1, "it counts the ids of the vocabulary", "Give a positive number", whole=True,
        optional=True,
    ),
    switch("use_dynamic_batch_size", launch_only=True),
    switch("use_dynamic_global_batch_size", launch_only=True),
    switch("delay_split_train_data_by_dp", launch_only=True),
    off("true_on_policy_mode", "rounds logits and log-probs to half precision before the loss"),
    off(
        "recompute_logprobs_via_prefill",
        "replaces q, which was sampled from, by the log-probs of a later pass",
    ),
    off("skip_actor_forward_only", "is for policy_loss alone in Miles"),
    off("multi_lora", "normalizes per adapter behind the loss, not checked with this loss"),
    number_option(
        "multi_lora_n_adapters",
        lambda x: x <= 0,
        "multi-LoRA normalizes per adapter behind the loss, not checked with this loss",
        "Leave it out",
        whole=True,
        runs=LOSS_ONLY,
    ),
)  # fmt: skip

NAMES = frozenset(option.name for option in OPTIONS)
SWITCHES = frozenset(option.name for option in OPTIONS if option.is_switch)
