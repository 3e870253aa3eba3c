"""The table of Miles' options and the rules between them, which loss, hook and check share."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from offpolicy_corr.integrations.miles import Settings, SettingsError, check_main, policy_loss, tis_function
from offpolicy_corr.integrations.miles.launch import KNOWN
from offpolicy_corr.integrations.miles.option_check import problems
from offpolicy_corr.integrations.miles.option_rules import RULES
from offpolicy_corr.integrations.miles.option_table import OPTIONS
from offpolicy_corr.integrations.miles.options import (
    CONVERTER,
    CONVERTER_OPTION,
    HOOK_OPTION,
    LOSS,
    LOSS_PATH,
    TIS,
    TIS_OPTION,
    TIS_PATH,
    TRAINER_HOOK,
)

import miles_double as double

yaml = pytest.importorskip("yaml")
WEIRD = [None, True, False, 0, -1, 1.5, 10**400, "", "text", [], {}, [1, "a"], {"a": None}, {1: 2}]
WEIRD += [float("nan"), float("inf")]
FSDP = {"train_backend": "fsdp"}
FILTERED = {"rollout_top_p": 0.9, "rollout_top_k": 8}

# (what runs, options, mapping, words of the one rule that they break)
BROKEN: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (LOSS, {"rollout_top_p": 0.9}, {}, "needs a positive rollout_top_k"),
    (LOSS, {}, {"candidates": "supports"}, "unfiltered samplers record none"),
    (LOSS, FILTERED, {"candidates": "heads"}, "p would be over the vocabulary"),
    (TIS, FILTERED, {}, "tis_function with top-p or top-k"),
    (LOSS, {}, {}, "no head is recorded"),
    (LOSS, {**FILTERED, "rollout_top_logprobs_num": 4}, {}, "cannot hold a support"),
    (LOSS, FILTERED, {}, "on Megatron the recorded supports"),
    (LOSS, {**FILTERED, "kl_coef": 0.1}, {}, "kl_coef with top-p"),
    (LOSS, {**FILTERED, "use_kl_loss": True}, {}, "use_kl_loss with top-p"),
    (
        LOSS,
        {"kl_coef": 0.1, "kl_loss_coef": 0.1, "use_kl_loss": True},
        {},
        "kl_coef and kl_loss_coef exclude",
    ),
    (LOSS, {"kl_loss_coef": 0.1}, {}, "no effect without use_kl_loss"),
    (LOSS, {"advantage_estimator": "reinforce_plus_plus"}, {}, "needs normalize_advantages"),
    (LOSS, {**FSDP, "advantage_estimator": "ppo"}, {}, "ppo needs the Megatron backend"),
    (LOSS, {"compute_advantages_and_returns": False}, {}, "the loss needs advantages"),
    (TIS, {"get_mismatch_metrics": True}, {}, "get_mismatch_metrics needs"),
    (LOSS, {"recompute_loss_function": True}, {"inplace_logits": True}, "must keep its inputs"),
    (LOSS, {**FSDP, "qkv_format": "bshd"}, {}, "bshd needs the Megatron backend"),
    (
        LOSS,
        {"qkv_format": "bshd", "use_dynamic_batch_size": True},
        {},
        "bshd excludes use_dynamic_batch_size",
    ),
    (LOSS, {}, {"groups": ["a"]}, "groups are stamped"),
    (LOSS, {}, {"guards": {"behind_newest_sampler": {"max_lag": 4}}}, "reads lags"),
    (LOSS, {**FSDP, "calculate_per_token_loss": True}, {}, "drops the token count"),
    (LOSS, {CONVERTER_OPTION: CONVERTER}, {}, "only with the hook in the trainer"),
    (LOSS, {HOOK_OPTION: TRAINER_HOOK}, {}, "no effect without the converter"),
    (LOSS, {CONVERTER_OPTION: CONVERTER, "delay_split_train_data_by_dp": True}, {}, "split in the trainer"),
    (LOSS, {CONVERTER_OPTION: CONVERTER, "ft_components": ["rollout", "train"]}, {}, "split in the trainer"),
    (
        LOSS,
        {CONVERTER_OPTION: CONVERTER, "use_dynamic_global_batch_size": True},
        {},
        "use_dynamic_global_batch_size with the converter",
    ),
    (TIS, {}, {"correction": "sc+mis"}, "needs logits"),
    (TIS, {}, {"correction": "ppo"}, "correction ppo needs advantages"),
    (TIS, {}, {"candidates": "heads"}, "candidates have no effect"),
    (TIS, {}, {"inplace_logits": True}, "inplace_logits has no effect"),
    (TIS, {}, {"vocab_size": 8}, "vocab_size and backend have no effect"),
    (TIS, {}, {"groups": ["a"]}, "groups have no effect"),
    (TIS, {}, {"guards": {"off_policy": {"delta": 0.1}}}, "off_policy needs advantages"),
    (TIS, {}, {"guards": {"behind_newest_sampler": {"max_lag": 4}}}, "needs weight versions"),
    (TIS, {**FSDP, "calculate_per_token_loss": True}, {}, "this hook cannot mend it"),
    (TIS, {"use_rollout_logprobs": True}, {}, "every ratio would be 1"),
]


def broken(run: str, options: dict[str, Any], mapping: dict[str, Any]) -> tuple[Namespace, Settings]:
    return Namespace(**options), Settings.of({"correction": "mis"} | mapping if run == TIS else mapping)


@pytest.mark.parametrize(("run", "options", "mapping", "says"), BROKEN)
def test_a_rule_that_is_broken_speaks(
    run: str, options: dict[str, Any], mapping: dict[str, Any], says: str
) -> None:
    found = [problem.text(options) for problem in problems(*broken(run, options, mapping), run, launch=True)]
    assert sum(says in text for text in found) == 1, found


def test_every_rule_has_an_input_that_breaks_it_and_a_run_that_does_not() -> None:
    fine = {"rollout_top_logprobs_num": 128}
    assert problems(*broken(LOSS, fine, {}), LOSS, launch=True) == []
    assert problems(*broken(TIS, {TIS_OPTION: TIS_PATH}, {}), TIS, launch=True) == []
    unbroken = [
        rule.reason
        for rule in RULES
        if not any(run in rule.runs and rule.broken(*broken(run, o, m)) for run, o, m, _ in BROKEN)
    ]
    assert unbroken == []


def test_every_row_says_why_and_what_to_do() -> None:
    for rule in RULES:
        assert len(rule.reason) > 15 and len(rule.remedy) > 4, rule.names
    for option in OPTIONS:
        for value in [*WEIRD, "gspo", "cispo", "sft_loss", 128]:
            fault = option.fault(value)
            if fault is not None:
                reason, remedy = fault
                assert option.name in reason or str(value) in reason, (option.name, reason)
                assert len(remedy) > 4, (option.name, value)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_row_refuses_something_and_takes_something(option: Any) -> None:
    values = [*WEIRD, "gspo", "cispo", "custom_loss", "fsdpp", 128, 1.0]
    answers = [option.fault(value) is None for value in values]
    assert any(answers) and not all(answers)


@pytest.mark.parametrize("value", WEIRD, ids=lambda value: repr(value)[:20])
def test_no_value_of_any_option_breaks_the_judge_or_the_check(tmp_path: Path, value: Any) -> None:
    """Whatever stands in an option, it is refused or taken; nothing ends in a traceback."""
    base = {
        "loss_type": "custom_loss",
        "custom_loss_function_path": LOSS_PATH,
        "use_rollout_logprobs": True,
        "offpolicy_corr": {"correction": "sc+mis"},
    }
    hook = {"use_tis": True, TIS_OPTION: TIS_PATH, "offpolicy_corr": {"correction": "mis"}}
    extended = {CONVERTER_OPTION: CONVERTER, HOOK_OPTION: TRAINER_HOOK, **FILTERED}
    path = tmp_path / "run.yaml"
    for name in sorted(KNOWN | {"offpolicy_corr", "eps_clip", "lr"}):
        for options in (base, {**base, **extended}, hook):
            path.write_text(yaml.safe_dump({**options, name: value}))
            assert check_main([str(path), "--custom-config-path", str(path)]) in (0, 1)


RUNTIME = [
    (option.name, value, fault[0])
    for option in OPTIONS
    for value in ["text", 2.5, -3, "gspo", "cispo", "sft_loss", None, True, "0.5", float("inf")]
    if LOSS in option.runs and not option.launch_only and (fault := option.fault(value)) is not None
]


@pytest.mark.parametrize(("name", "value", "reason"), RUNTIME)
def test_the_loss_refuses_what_the_check_refuses_with_the_same_words(
    tmp_path: Path, capsys: Any, name: str, value: Any, reason: str
) -> None:
    options = vars(double.make_args(**{name: value}))
    with pytest.raises(SettingsError, match="this loss must not run as configured") as error:
        policy_loss(Namespace(**options), {}, None, None)  # type: ignore[arg-type]
    assert reason in str(error.value)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**options, "rollout_top_logprobs_num": 128, name: value}))
    assert check_main([str(path)]) == 1
    assert reason in capsys.readouterr().out


def test_rules_of_the_run_itself_are_refused_by_loss_and_hook_before_anything_is_read() -> None:
    for run, options, mapping, says in BROKEN:
        args, settings = broken(run, options, mapping)
        if not any(says in problem.reason for problem in problems(args, settings, run)):
            continue
        args.offpolicy_corr = settings
        with pytest.raises(SettingsError, match=says.split(":")[0]):
            if run == LOSS:
                policy_loss(args, {}, None, None)  # type: ignore[arg-type]
            else:
                tis_function(
                    args, pg_loss=None, train_log_probs=[], rollout_log_probs=[], loss_masks=[],
                    total_lengths=[], response_lengths=[], parallel_state=None,
                )  # type: ignore[arg-type]  # fmt: skip
