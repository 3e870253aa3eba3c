"""``offpolicy-corr miles check config.yaml [launch arguments…]``: what a run would refuse, before a cluster is spent.

Miles applies the YAML of ``--custom-config-path`` near the end of its own validation, so that an option set there
bypasses the checks before it. They are repeated here, on the launch arguments overridden by the YAML.
"""

from __future__ import annotations

import difflib
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offpolicy_corr.records.errors import RecordError
from offpolicy_corr.records.requests import RequestParameters, request_parameters

from .host import torch_native
from .options import (
    DROPPED_COUNT,
    LOSS_PATH,
    TIS_PATH,
    drops_count,
    environment_refusals,
    filters,
    not_numbers,
    refusals,
    tis_refusals,
)
from .sampling import spec_of_kind
from .settings import Settings, SettingsError

USAGE = "usage: offpolicy-corr miles check config.yaml [the launch arguments of train.py or train_async.py …]"
CONVERTER = "offpolicy_corr.integrations.miles.transport.convert_samples"
TRAINER_HOOK = "offpolicy_corr.integrations.miles.transport.extend_trainer"
_CONVERTER_OPTION, _HOOK_OPTION = "custom_convert_samples_to_train_data_path", "custom_megatron_init_path"

_NATIVE = (
    "  (where Miles has native score centering; v0.1.0: a generate function that calls transport.attach)"
)

_EXPONENT = re.compile(r"[+-]?\d+[eE][+-]?\d+")  # a number to most readers, text to YAML 1.1

# names that this command reads, so that a slip of the pen in the YAML is found: Miles takes any name
_NAMES = """
    loss_type custom_loss_function_path custom_tis_function_path use_tis tis_clip use_rollout_logprobs
    get_mismatch_metrics offpolicy_corr rollout_temperature rollout_top_p rollout_top_k rollout_top_logprobs_num
    calculate_per_token_loss disable_grpo_std_normalization advantage_estimator entropy_coef use_kl_loss kl_loss_coef
    kl_loss_type recompute_loss_function qkv_format allgather_cp train_backend custom_megatron_init_path
    custom_convert_samples_to_train_data_path delay_split_train_data_by_dp true_on_policy_mode vocab_size
"""
_KNOWN = frozenset(_NAMES.split())


def check_main(argv: list[str]) -> int:
    """The command. Prints what is wrong, each with its reason, or what the run needs.

    Returns:
        0 where the run may start, 1 where something is wrong, 2 for a call that cannot be understood.
    """
    if not argv or argv[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        launch = parse_launch(argv[1:])
        options = {**launch, **read_yaml(Path(argv[0]).read_text(encoding="utf-8"))}
    except (OSError, SettingsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    problems, advice, settings = examine(options)
    advice += _behind_the_checks(options, launch)
    if settings is not None and not problems:
        try:
            lines = needs(Namespace(**options), settings)
        except (RecordError, SettingsError) as error:
            problems.append(str(error))
    for problem in problems:
        print(f"error: {problem}")
    for note in advice:
        print(f"note: {note}")
    if problems:
        print(
            f"{len(problems)} error{'s' if len(problems) > 1 else ''}: this run would fail or train on something else."
        )
        return 1
    print("\n".join(lines))
    return 0


def read_yaml(text: str) -> dict[str, Any]:
    """The YAML as Miles reads it (``safe_load``).

    Raises:
        SettingsError: pyyaml is missing, the text is no YAML or no mapping, or holds a number that YAML reads as text.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise SettingsError("reading YAML needs pyyaml: pip install 'offpolicy-corr[miles]'") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"not YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SettingsError(f"the YAML must be a mapping of options, got {type(data).__name__}")
    return {str(key): value for key, value in data.items()}


def parse_launch(argv: Sequence[str]) -> dict[str, Any]:
    """``--option value``, ``--option=value`` and switches, by Miles' names. A repeated option counts last."""
    found: dict[str, Any] = {}
    index = 0
    while index < len(argv):
        word = argv[index]
        index += 1
        if not word.startswith("--"):
            raise SettingsError(f"launch arguments start with --, got {word!r}. {USAGE}")
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and index < len(argv) and not _is_option(argv[index]):
            values.append(argv[index])
            index += 1
        key = name.replace("-", "_")
        found[key] = (
            True if not values else _scalar(values[0]) if len(values) == 1 else [_scalar(v) for v in values]
        )
    return found


def examine(options: dict[str, Any]) -> tuple[list[str], list[str], Settings | None]:
    """(what must be put right, what should be known, the settings where they could be read)."""
    args = Namespace(**options)
    problems, advice = _slips(options), list[str]()
    try:
        settings = Settings.of(options.get("offpolicy_corr"))
    except SettingsError as error:
        return [*problems, str(error)], advice, None
    if (
        options.get("custom_tis_function_path") == TIS_PATH
        and options.get("loss_type", "policy_loss") != "custom_loss"
    ):
        problems += not_numbers(args) or tis_refusals(args, settings)
        if not options.get("use_tis"):
            advice.append("use_tis is off: tis_function reports metrics and leaves the loss alone")
    else:
        problems += _loss_path(options)
        problems += not_numbers(args) or refusals(args, settings) + _kind(args, settings)
        if not options.get("use_rollout_logprobs"):
            advice.append(
                "use_rollout_logprobs is off: Miles scores every batch once more, and this loss does not read it"
            )
    problems += environment_refusals() + _repeated_checks(options) + _transport(options, settings)
    if torch_native(args) and options.get(_CONVERTER_OPTION) == CONVERTER:
        advice.append(
            f"torch-native trainers run no {_HOOK_OPTION}: give Ray the runtime environment "
            f'{{"worker_process_setup_hook": "{TRAINER_HOOK}"}}'
        )
    return problems, advice, settings


def needs(args: Any, settings: Settings) -> list[str]:
    """What must be set so that the samplers record all that the correction uses."""
    kind = settings.kind_of_candidates(filters(args)) if _uses_loss(args) else "none"
    count = int(getattr(args, "rollout_top_logprobs_num", 0) or 128)
    sampling = spec_of_kind(args, kind)
    request = request_parameters(sampling, settings.correction, num_candidates=count)
    center = "score centering, " if settings.correction.center else ""
    lines = [
        f"ok: {center}{settings.correction.rule}, candidates: {kind}, denominator: {settings.denominator}"
    ]
    flags = request.server_flags or ("no flag beyond Miles' own",)
    lines += ["", "SGLang server:", *(f"  {flag}" for flag in flags)]
    lines += [f"  environment {name}={value}" for name, value in request.environment.items()]
    lines += ["SGLang request fields (beside sampling_params):", *_fields(request)]
    lines += ["Miles:", *(f"  {option}" for option in _miles_options(args, settings, kind, count))]
    return lines


def _fields(request: RequestParameters) -> list[str]:
    own = {name: value for name, value in request.request.items() if name != "sampling_params"}
    return [f"  {name}: {value}" for name, value in own.items()]


def _miles_options(args: Any, settings: Settings, kind: str, count: int) -> list[str]:
    if not _uses_loss(args):
        return [f"--use-tis --custom-tis-function-path {TIS_PATH}"]
    options = [f"--loss-type custom_loss --custom-loss-function-path {LOSS_PATH}", "--use-rollout-logprobs"]
    if kind == "heads":
        options += [f"--rollout-top-logprobs-num {count}", _NATIVE]
    if kind == "supports":
        options.append(f"--rollout-top-p {args.rollout_top_p} --rollout-top-k {args.rollout_top_k}")
        if settings.correction.center:
            options += [f"--rollout-top-logprobs-num {max(count, int(args.rollout_top_k))}", _NATIVE]
    if kind != "none" or settings.groups or settings.guards_sampler_lag():
        options += [
            "for groups and the sampler lag, for supports on Megatron, and for all candidates on v0.1.0:",
            f"  --custom-convert-samples-to-train-data-path {CONVERTER}",
            f"  --custom-megatron-init-path {TRAINER_HOOK}",
            "  (torch-native trainers: that name as worker_process_setup_hook in Ray's runtime environment)",
        ]
    return options


def _uses_loss(args: Any) -> bool:
    return getattr(args, "custom_tis_function_path", None) != TIS_PATH


def _loss_path(options: dict[str, Any]) -> list[str]:
    path = options.get("custom_loss_function_path")
    found = []
    if options.get("loss_type") is None:
        found.append(
            "loss_type is not set: Miles would train with its own policy_loss. Set loss_type: custom_loss"
        )
    if path is None:
        found.append(f"custom_loss_function_path is not set: use {LOSS_PATH}")
    elif isinstance(path, str) and ":" in path:
        found.append(
            f"custom_loss_function_path {path!r}: Miles splits at the last point, a colon fails. Use {LOSS_PATH}"
        )
    elif path != LOSS_PATH:
        found.append(f"custom_loss_function_path is {path!r}, which is not this loss: use {LOSS_PATH}")
    return found


def _kind(args: Any, settings: Settings) -> list[str]:
    try:
        kind = settings.kind_of_candidates(filters(args))
    except SettingsError as error:
        return [str(error)]
    if kind == "supports" and not filters(args):
        return [
            "candidates: supports needs rollout_top_p < 1 with rollout_top_k > 0: unfiltered samplers record none"
        ]
    top = getattr(args, "rollout_top_logprobs_num", None)
    if kind == "heads" and top is not None and not int(top) > 0:
        return ["rollout_top_logprobs_num is 0, so no head is recorded: set it, for example 128"]
    top_k = getattr(args, "rollout_top_k", None) or -1
    if kind == "supports" and top is not None and 0 < int(top) < int(top_k):
        return [f"rollout_top_logprobs_num {top} cannot hold a support of rollout_top_k {top_k}"]
    return []


def _repeated_checks(options: dict[str, Any]) -> list[str]:
    """What Miles checks before it applies the YAML."""
    found = []
    if options.get("use_rollout_logprobs") and options.get("use_tis"):
        found.append(
            "use_rollout_logprobs and use_tis exclude each other (Miles' own check, which the YAML bypasses)"
        )
    if options.get("get_mismatch_metrics") and not options.get("custom_tis_function_path"):
        found.append(
            "get_mismatch_metrics needs custom_tis_function_path (Miles' own check, which the YAML bypasses)"
        )
    if options.get("kl_coef") and options.get("kl_loss_coef"):
        found.append(
            "kl_coef and kl_loss_coef exclude each other (Miles' own check, which the YAML bypasses)"
        )
    estimator = str(options.get("advantage_estimator", ""))
    if estimator.startswith("reinforce_plus_plus") and not options.get("normalize_advantages"):
        found.append(f"{estimator} needs normalize_advantages (Miles' own check, which the YAML bypasses)")
    return found


def _transport(options: dict[str, Any], settings: Settings) -> list[str]:
    args = Namespace(**options)
    converter, hook = (options.get(name) for name in (_CONVERTER_OPTION, _HOOK_OPTION))
    found = []
    if (settings.groups or settings.guards_sampler_lag()) and converter != CONVERTER:
        what = "groups" if settings.groups else "guards: behind_newest_sampler"
        found.append(f"{what} needs {_CONVERTER_OPTION}: {CONVERTER}, which stamps them")
    if drops_count(args) and _uses_loss(args) and converter != CONVERTER:
        found.append(f"{DROPPED_COUNT}. {_CONVERTER_OPTION}: {CONVERTER} counts the tokens of a step")
    if converter == CONVERTER and not torch_native(args) and hook != TRAINER_HOOK:
        found.append(f"the converter's keys reach the loss only with {_HOOK_OPTION}: {TRAINER_HOOK}")
    if converter == CONVERTER and options.get("delay_split_train_data_by_dp"):
        found.append(
            "delay_split_train_data_by_dp splits in the trainer, where the converter's keys would be dropped"
        )
    return found


def _slips(options: dict[str, Any]) -> list[str]:
    found = []
    for key, value in options.items():
        near = difflib.get_close_matches(key, _KNOWN, 1, cutoff=0.9)
        if near and key not in _KNOWN:
            found.append(
                f"{key} is no option known here: did you mean {near[0]}? Miles would take it and ignore it"
            )
        if isinstance(value, str) and _EXPONENT.fullmatch(value):
            found.append(f"{key}: YAML reads {value} as text: write it with a point, for example 1.0e-4")
    return found


def _behind_the_checks(options: dict[str, Any], launch: dict[str, Any]) -> list[str]:
    """Sampling options that Miles derives others from before it reads the YAML."""
    names = ("rollout_top_p", "rollout_top_k", "rollout_top_logprobs_num")
    return [
        f"{name} is set in the YAML alone: later Miles derives what samplers record from it before it reads "
        f"the YAML. Put --{name.replace('_', '-')} on the launch line too"
        for name in names
        if name in options and name not in launch
    ]


def _is_option(word: str) -> bool:
    return word.startswith("--")


def _scalar(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
