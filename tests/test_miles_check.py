"""The YAML mapping and ``offpolicy-corr miles check``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from offpolicy_corr.integrations.miles import check_main
from offpolicy_corr.integrations.miles.options import (
    CONVERTER,
    CONVERTER_OPTION,
    HOOK_OPTION,
    TIS_OPTION,
    TIS_PATH,
    TRAINER_HOOK,
)

yaml = pytest.importorskip("yaml")
BASE = {
    "loss_type": "custom_loss",
    "custom_loss_function_path": "offpolicy_corr.integrations.miles.policy_loss",
    "use_rollout_logprobs": True,
    "offpolicy_corr": {"correction": "sc+mis"},
}


EXTENDED = {CONVERTER_OPTION: CONVERTER, HOOK_OPTION: TRAINER_HOOK}
SUPPORTS = ["--rollout-top-p", "0.97", "--rollout-top-k", "64"]


def check(tmp_path: Path, options: dict[str, Any], *launch: str) -> int:
    """The command on a launch line that asks for heads, unless ``launch`` says something else."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(options))
    words = list(launch)
    if not any("top-logprobs-num" in word or "top-k" in word for word in words):
        words += ["--rollout-top-logprobs-num", "128"]
    if not any("config-path" in word for word in words):
        words += ["--custom-config-path", str(path)]
    return check_main([str(path), *words])


@pytest.mark.parametrize(
    "options, launch, says",
    [
        ({"use_tis": True}, [], "exclude each other"),
        ({}, ["--use-opsm"], "use_opsm"),
        ({}, ["--advantage-estimator", "gspo"], "gspo"),
        ({}, ["--advantage-estimator", "reinforce_plus_plus"], "normalize_advantages"),
        ({}, ["--rollout-top-p", "0.9"], "rollout_top_k"),
        ({}, ["--rollout-temperature=0"], "greedy"),
        ({}, ["--rollout-top-logprobs-num", "0"], "no head"),
        ({}, ["--true-on-policy-mode"], "half precision"),
        ({}, ["--use-kl-loss", "--kl-loss-type", "k4"], "k1, k2, k3"),
        ({}, ["--use-kl-loss", "--rollout-top-p", "0.9", "--rollout-top-k", "8"], "reference"),
        ({"kl_coef": 0.1, "kl_loss_coef": 0.1}, [], "kl_coef and kl_loss_coef exclude"),
        ({}, ["--kl-coef", "0.1", "--rollout-top-p", "0.9", "--rollout-top-k", "8"], "kl_coef with top-p"),
        ({"loss_type": "policy_loss"}, [], "loss_type"),
        ({"loss_type": None}, [], "own policy_loss"),
        ({"custom_loss_function_path": "offpolicy_corr/integrations/miles.py:policy_loss"}, [], "last point"),
        ({"custom_loss_function_path": "other.loss"}, [], "not this loss"),
        ({"rolout_temperature": 1.0}, [], "Did you mean rollout_temperature?"),
        ({"lr": "1e-6"}, [], "as text"),
        (
            {"entropy_coef": "0.5"},
            [],
            "entropy_coef must be a number (entropy_coef = '0.5' in the YAML). Remove the quotes: 0.5.",
        ),
        ({"use_kl_loss": "false"}, [], "Write true or false, without quotes"),
        (
            {},
            ["--advantage-estimator", "grpoo"],
            "(advantage_estimator = 'grpoo' on the launch line). Did you mean grpo? Use one of grpo",
        ),
        (
            {},
            ["--qkv-format", "sbhd"],
            "unknown qkv_format (qkv_format = 'sbhd' on the launch line). Did you mean bshd? Use one of thd, bshd",
        ),
        (
            {},
            ["--rollout-top-p", "0.9", "--rollout-top-k", "20.5"],
            "(rollout_top_k = 20.5 on the launch line). Give a whole number",
        ),
        ({}, ["--rollout-top-p", "1.5"], "it lies in (0, 1]"),
        ({}, ["--rollout-min-p", "0.1"], "truncates without a recorded support"),
        (
            {},
            ["--rollout-top-p", "0.97", "--rollout-top-k", "64"],
            "on Megatron the recorded supports reach the loss only",
        ),
        ({}, ["--rollout-top-k", "20"], "on Megatron the recorded supports reach the loss only"),
        (
            {**EXTENDED, "use_dynamic_global_batch_size": True},
            [],
            "use_dynamic_global_batch_size with the converter",
        ),
        (
            {"custom_loss_function_path": "offpolicy_corr.integrations.miles.policy_los"},
            [],
            "Did you mean offpolicy_corr.integrations.miles.policy_loss?",
        ),
        (
            {CONVERTER_OPTION: "offpolicy_corr.integrations.miles.transprt.convert_samples"},
            [],
            f"Did you mean {CONVERTER}?",
        ),
        (
            {"custom_generate_function_path": "json.lods"},
            [],
            "json has no lods (custom_generate_function_path = 'json.lods' in the YAML). Did you mean json.loads?",
        ),
        ({"custom_rm_path": 3}, [], "custom_rm_path names no function"),
        ({"rollout_temperature": "hot"}, [], "rollout_temperature must be a number"),
        ({}, ["--rollout-temperature", "inf"], "rollout_temperature must be finite"),
        ({"rollout_temperature": ".inf"}, [], "rollout_temperature must be finite"),
        ({}, ["--rollout-temperature"], "on the launch line, which gives no value"),
        ({}, ["--rollout-temperature", "1", "2"], "(rollout_temperature = [1, 2] on the launch line)"),
        ({"entropy_coef": "1.0e4"}, [], "write it with a point and a signed exponent, 1.0e+4"),
        ({"entropy_coef": "0,5"}, [], "Write it with a point: 0.5"),
        ({}, ["--rollout-top-k", "0"], "SGLang takes -1 or at least 1"),
        ({}, ["--rollout-top-k", "20.0", "--rollout-top-p", "0.9"], "must be a whole number"),
        ({"vocab_size": "152k"}, [], "vocab_size must be a number"),
        ({}, ["--use-kl-loss", "true"], "--use-kl-loss is a switch"),
        ({"rollout-top-p": 0.5}, [], "Write rollout_top_p"),
        ({"kl_loss_type": "k9"}, [], "Use one of k1, k2, k3, low_var_kl"),
        ({"train_backend": "fsdp"}, [], "Put --train-backend fsdp there"),
        ({"train_backend": "fsdpp"}, [], "Did you mean fsdp?"),
        ({"advantage_estimator": "ppo"}, [], "Put --advantage-estimator ppo there"),
        ({"custom_config_path": "other.yaml"}, [], "custom_config_path has no effect in the YAML"),
        (
            {"disable_grpo_std_normalization": True},
            [],
            "Write grpo_std_normalization: false",
        ),
        ({}, ["--disable-compute-advantages-and-returns"], "the loss needs advantages"),
        ({"rollout_function_path": "json.lods"}, [], "Did you mean json.loads?"),
        ({CONVERTER_OPTION: TRAINER_HOOK}, [], f"Did you mean {CONVERTER}?"),
        ({"offpolicy_corr": {"low": "0.5"}}, [], "low must be a number, got '0.5' (offpolicy_corr = "),
        ({"offpolicy_corr": {"hihg": 5}}, [], "did you mean high"),
        ({"kl_loss_coef": "much"}, [], "kl_loss_coef must be a number"),
        ({}, ["--rollout-top-k", "many"], "rollout_top_k must be a number"),
        ({}, ["--rollout-top-logprobs-num"], "rollout_top_logprobs_num must be a number"),
        (
            {"offpolicy_corr": {"correction": "sc+mis", "inplace_logits": True}},
            ["--recompute-loss-function"],
            "keep its inputs",
        ),
        ({}, ["--sglang-speculative-algorithm", "EAGLE"], "what was drawn from"),
        ({}, ["--train-backend", "fsdp", "--calculate-per-token-loss"], "drops the token count"),
        ({"offpolicy_corr": {"groups": ["b200"]}}, [], CONVERTER),
        ({"custom_convert_samples_to_train_data_path": CONVERTER}, [], TRAINER_HOOK),
        ({"offpolicy_corr": {"candidates": "supports"}}, [], "unfiltered"),
        (
            {"offpolicy_corr": {"candidates": "heads"}},
            ["--rollout-top-p", "0.9", "--rollout-top-k", "8"],
            "over a support",
        ),
        (
            {"offpolicy_corr": {"candidates": "supports"}},
            ["--rollout-top-p", "0.9", "--rollout-top-k", "8", "--rollout-top-logprobs-num", "4"],
            "cannot hold",
        ),
    ],
)
def test_check_refuses_with_the_reason(
    tmp_path: Path, capsys: Any, options: dict[str, Any], launch: list[str], says: str
) -> None:
    merged = {k: v for k, v in {**BASE, **options}.items() if v is not None}
    assert check(tmp_path, merged, *launch) == 1
    assert says in capsys.readouterr().out
    assert check(tmp_path, BASE) == 0


def test_null_is_no_number(tmp_path: Path, capsys: Any) -> None:
    names = ("rollout_temperature", "rollout_top_p", "rollout_top_k", "rollout_top_logprobs_num")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**BASE, **dict.fromkeys(names)}))
    assert check_main([str(path)]) == 1
    assert capsys.readouterr().out.count("is null") == len(names)


def test_check_prints_what_the_samplers_must_record(tmp_path: Path, capsys: Any) -> None:
    assert check(tmp_path, BASE, "--rollout-top-logprobs-num", "64") == 0
    assert "top_logprobs_num: 64" in capsys.readouterr().out
    supports = {**BASE, **EXTENDED}
    assert check(tmp_path, supports, *SUPPORTS) == 0
    printed = capsys.readouterr().out
    assert "return_sampling_mask: True" in printed
    assert "sampling_logprobs_mode: support" in printed
    assert "  top_logprobs_num" not in printed
    assert check(tmp_path, supports, "--rollout-top-p", "0.97", "--rollout-top-k", "5000") == 0
    assert "--sampling-mask-max-tokens 5000" in capsys.readouterr().out
    assert check(tmp_path, {**BASE, "offpolicy_corr": {"correction": "mis"}}) == 0
    assert "top_logprobs_num" not in capsys.readouterr().out


def test_a_torch_native_trainer_s_hook_is_named(tmp_path: Path, capsys: Any) -> None:
    converter = {"custom_convert_samples_to_train_data_path": CONVERTER}
    launch = ["--train-backend", "fsdp", "--calculate-per-token-loss"]
    assert check(tmp_path, {**BASE, **converter}, *launch) == 0
    assert f'{{"worker_process_setup_hook": "{TRAINER_HOOK}"}}' in capsys.readouterr().out
    hook = {"use_tis": True, "custom_tis_function_path": "offpolicy_corr.integrations.miles.tis_function"}
    assert check(tmp_path, {**hook, **converter, "offpolicy_corr": {"correction": "mis"}}, *launch) == 1
    assert "drops the token count" in capsys.readouterr().out


def test_sampling_options_belong_on_the_launch_line(tmp_path: Path, capsys: Any) -> None:
    sampling = {"rollout_top_p": 0.97, "rollout_top_k": 64}
    assert check(tmp_path, {**BASE, **EXTENDED, **sampling}) == 0
    assert "--rollout-top-p on the launch line" in capsys.readouterr().out
    assert check(tmp_path, {**BASE, **EXTENDED, **sampling}, *SUPPORTS) == 0
    assert "launch line" not in capsys.readouterr().out


def test_check_of_the_hook(tmp_path: Path, capsys: Any) -> None:
    hook = {"use_tis": True, "custom_tis_function_path": "offpolicy_corr.integrations.miles.tis_function"}
    assert check(tmp_path, {**hook, "offpolicy_corr": {"correction": "mis"}}) == 0
    assert check(tmp_path, {**hook, "offpolicy_corr": {"correction": "sc+mis"}}) == 1
    assert "needs logits" in capsys.readouterr().out
    guarded = {"correction": "mis", "guards": {"off_policy": {"delta": 0.1}}}
    assert check(tmp_path, {**hook, "offpolicy_corr": guarded}) == 1
    assert "off_policy needs advantages" in capsys.readouterr().out
    assert (
        check(tmp_path, {**hook, "use_rollout_logprobs": True, "offpolicy_corr": {"correction": "mis"}}) == 1
    )


def test_environment_of_the_samplers(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    assert check(tmp_path, BASE) == 1
    assert "before temperature" in capsys.readouterr().out


def test_a_call_that_cannot_be_understood(tmp_path: Path, capsys: Any) -> None:
    assert check_main([]) == 2
    assert check_main([str(tmp_path / "absent.yaml")]) == 2
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    assert check_main([str(broken)]) == 2
    assert "usage" in capsys.readouterr().err


def test_heads_that_nobody_records_are_found_before_the_first_step(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(BASE))
    assert check_main([str(path)]) == 1
    assert "no head is recorded without --rollout-top-logprobs-num" in capsys.readouterr().out
    path.write_text(yaml.safe_dump({**BASE, "custom_generate_function_path": "my_project.rollout.generate"}))
    assert check_main([str(path)]) == 0  # a generate function of one's own may attach them
    assert "my_project.rollout is not installed here" in capsys.readouterr().out


def test_top_k_without_top_p_is_a_support(tmp_path: Path, capsys: Any) -> None:
    assert check(tmp_path, {**BASE, **EXTENDED}, "--rollout-top-k", "20") == 0
    assert "--rollout-top-p 1.0 --rollout-top-k 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"use_tis": True, TIS_OPTION: "offpolicy_cor.integrations.miles.tis_function"}, TIS_PATH),
        ({"use_tis": True, TIS_OPTION: "offpolicy_corr.integration.miles.tis_function"}, TIS_PATH),
        ({"use_tis": True, TIS_OPTION: "offpolicy_corr.integrations.miles.tis.tis_func"}, TIS_PATH),
        ({"use_tis": True, TIS_OPTION: "offpolicy_corr.integrations.miles.policy_loss"}, TIS_PATH),
        ({"use_tis": True, "custom_tis_functon_path": TIS_PATH}, TIS_OPTION),
        ({"use_ti": True, TIS_OPTION: TIS_PATH}, "use_tis"),
    ],
)
def test_a_misspelling_is_one_error_that_names_what_is_meant(
    tmp_path: Path, capsys: Any, options: dict[str, Any], says: str
) -> None:
    assert check(tmp_path, {**options, "offpolicy_corr": {"correction": "mis"}}) == 1
    printed = capsys.readouterr().out.splitlines()
    (error,) = [line for line in printed if line.startswith("error: ")]
    assert error.endswith(f"Did you mean {says}?")
    assert not any("use_tis is off" in line for line in printed)


@pytest.mark.parametrize("options", [{"use_tis": True}, {"use_tis": True, TIS_OPTION: "my.tis"}, {}])
def test_a_file_that_names_neither_loss_nor_hook_is_one_error(
    tmp_path: Path, capsys: Any, options: dict[str, Any]
) -> None:
    assert check(tmp_path, {**options, "offpolicy_corr": {"correction": "mis"}}) == 1
    (error,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error: ")]
    assert "neither this loss nor its hook is named" in error


def test_options_without_effect_are_said(tmp_path: Path, capsys: Any) -> None:
    assert check(tmp_path, BASE, "--eps-clip", "0.2", "--tis-clip", "2.0") == 0
    printed = capsys.readouterr().out
    assert "eps_clip has no effect under this loss" in printed and "tis_clip has no effect" in printed


def test_a_launch_line_that_does_not_name_the_file_is_said(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(BASE))
    assert check_main([str(path), "--rollout-top-logprobs-num", "128"]) == 0
    assert f"without it Miles does not read {path}" in capsys.readouterr().out


def test_a_misspelled_hook_is_one_error(tmp_path: Path, capsys: Any) -> None:
    hook = {"use_tis": True, "custom_tis_function_path": TIS_PATH.replace("function", "func")}
    assert check(tmp_path, {**hook, "offpolicy_corr": {"correction": "mis"}}) == 1
    printed = capsys.readouterr().out
    assert (
        sum(line.startswith("error: ") for line in printed.splitlines()) == 1
        and f"Did you mean {TIS_PATH}?" in printed
    )


def test_a_refusal_says_where_its_values_come_from(tmp_path: Path, capsys: Any) -> None:
    assert check(tmp_path, {**BASE, "rollout_temperature": 0}, "--qkv-format", "sbhd") == 1
    printed = capsys.readouterr().out
    assert "(rollout_temperature = 0 in the YAML)" in printed
    assert "(qkv_format = 'sbhd' on the launch line)" in printed
    assert check(tmp_path, {**BASE, "rollout_temperature": 0}, "--rollout-temperature", "1") == 1
    assert "(rollout_temperature = 0 in the YAML, over 1 on the launch line)" in capsys.readouterr().out


def test_the_file_that_is_checked_is_the_one_that_is_launched(tmp_path: Path, capsys: Any) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("{}")
    assert check(tmp_path, BASE, "--custom-config-path", str(other)) == 1
    assert "the run would read the other file" in capsys.readouterr().out
    assert check(tmp_path, BASE, "--custom-config-path", str(tmp_path / "." / "run.yaml")) == 0
    assert check(tmp_path, BASE, "--custom-config-path", "base64:e30=") == 1
