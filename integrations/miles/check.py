"""Adapter: ``offpolicy-corr miles check config.yaml [launch arguments…]``, what a run would refuse, before its launch.

The launch arguments are overridden by the YAML, as Miles does near the end of its own validation. What may stand in an
option is said in `option_table`, which options go together in `option_rules`.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from offpolicy_corr.records.errors import RecordError
from offpolicy_corr.records.requests import RequestParameters, request_parameters
from offpolicy_corr.settings import Settings, SettingsError

from .function_paths import is_ours, names_function, path_problem
from .host import torch_native
from .launch import (
    USAGE,
    before_the_yaml,
    config_problem,
    launch_problems,
    misspelled,
    parse_launch,
    read_file,
    sources,
    yaml_problems,
)
from .option_check import environment_problems, problems
from .options import (
    CONVERTER,
    CONVERTER_OPTION,
    HOOK_OPTION,
    LOSS,
    LOSS_OPTION,
    LOSS_PATH,
    OWN_FUNCTIONS,
    TIS,
    TIS_OPTION,
    TIS_PATH,
    TRAINER_HOOK,
    Problem,
    filters,
    number_of,
)
from .sampling import spec_of_kind

_NATIVE = (
    "  (where Miles has native score centering; v0.1.0: a generate function that calls transport.attach)"
)
_SEE = "See The mapping in docs/miles.md"
_POLICY_LOSS_ALONE = ("eps_clip", "eps_clip_high", "eps_clip_c", "tis_clip", "tis_clip_low")


def check_main(argv: list[str]) -> int:
    """The command. Prints what is wrong, each with its reason and remedy, or what the run needs.

    Returns:
        0 where the run may start, 1 where something is wrong, 2 for a call or a file that cannot be read.
    """
    if not argv or argv[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        launch = parse_launch(argv[1:])
        yaml = read_file(argv[0])
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found, meant = yaml_problems(yaml)
    found += launch_problems(argv[1:]) + before_the_yaml(yaml, launch)
    config = config_problem(launch, argv[0])
    notes = [config] if isinstance(config, str) else []
    found += [config] if isinstance(config, Problem) else []
    wrong, noted, settings, options = examine({**launch, **meant}, Path(argv[0]).parent)
    found += wrong
    notes += noted + _sampling_in_yaml(yaml, launch)
    lines: list[str] = []
    if settings is not None and not found:
        try:
            lines = needs(Namespace(**options), settings)
        except (RecordError, SettingsError) as error:
            found.append(Problem((), str(error), "See docs/miles.md"))
    for problem in found:
        print(f"error: {problem.text({**launch, **yaml}, sources(yaml, launch))}")
    for note in notes:
        print(f"note: {note}")
    if found:
        print(f"{len(found)} error{'s' * (len(found) > 1)}: this run would fail or train on something else.")
        return 1
    print("\n".join(lines))
    return 0


def examine(
    options: dict[str, Any], folder: Path
) -> tuple[list[Problem], list[str], Settings | None, dict[str, Any]]:
    """What must be put right, what should be known, the settings where they could be read, the options as meant.

    ``folder`` is that of the YAML, where modules of one's own may lie. What is misspelled is reported once and judged
    as what it means, so that it causes no second error.
    """
    found, options = misspelled(options)
    notes = _look_up_functions(options, folder, found)
    settings = None
    try:
        settings = Settings.of(options.get("offpolicy_corr"))
    except SettingsError as error:
        reason, _, remedy = str(error).rpartition(". ")
        found.append(Problem(("offpolicy_corr",), reason or remedy, remedy if reason else _SEE))
    run, wrong_run = _run(options)
    args = Namespace(**options)
    found += [wrong_run] if wrong_run is not None else []
    if run is not None:
        found += problems(args, settings, run, launch=True)
        notes += _without_effect(options, run)
    found += environment_problems()
    if torch_native(args) and options.get(CONVERTER_OPTION) == CONVERTER:
        notes.append(
            f"torch-native trainers run no {HOOK_OPTION}: give Ray the runtime environment "
            f'{{"worker_process_setup_hook": "{TRAINER_HOOK}"}}'
        )
    return found, notes, settings, options


def _look_up_functions(options: dict[str, Any], folder: Path, found: list[Problem]) -> list[str]:
    """Notes on functions that could not be looked up. Adds to ``found``; corrects ``options`` where ours are meant."""
    notes = []
    for name, value in list(options.items()):
        if not names_function(name) or value is None:
            continue
        wrong = path_problem(name, value, [folder, Path.cwd()])
        if isinstance(wrong, str):
            notes.append(wrong)
        elif wrong is not None:
            found.append(wrong)
            ours = OWN_FUNCTIONS.get(name)
            if ours and (name == LOSS_OPTION or is_ours(value, ours)):
                options[name] = ours
    return notes


def _run(options: dict[str, Any]) -> tuple[str | None, Problem | None]:
    """(`LOSS` or `TIS`, what the run lacks of it); None where neither is named."""
    path, loss_type = options.get(LOSS_OPTION), options.get("loss_type")
    if options.get(TIS_OPTION) == TIS_PATH and path is None and loss_type != "custom_loss":
        return TIS, None
    if path is None and loss_type is None:
        reason = "neither this loss nor its hook is named: Miles would train with its own policy_loss"
        remedy = (
            f"Set loss_type: custom_loss and {LOSS_OPTION}: {LOSS_PATH}; or, for weights inside Miles' own loss, "
            f"use_tis: true and {TIS_OPTION}: {TIS_PATH}"
        )
        return None, Problem((LOSS_OPTION, TIS_OPTION), reason, remedy)
    if loss_type is None:
        reason = "loss_type is not set: Miles would train with its own policy_loss"
        return LOSS, Problem((LOSS_OPTION,), reason, "Set loss_type: custom_loss")
    if path is None:
        return LOSS, Problem(("loss_type",), f"{LOSS_OPTION} is not set", f"Set {LOSS_OPTION}: {LOSS_PATH}")
    return LOSS, None


def _without_effect(options: dict[str, Any], run: str) -> list[str]:
    notes = []
    if run == TIS and not options.get("use_tis"):
        notes.append("use_tis is off: tis_function reports metrics and leaves the loss alone")
    if run == LOSS and not options.get("use_rollout_logprobs"):
        notes.append(
            "use_rollout_logprobs is off: Miles scores every batch once more, and this loss does not read it"
        )
    names = _POLICY_LOSS_ALONE if run == LOSS else _POLICY_LOSS_ALONE[-2:]
    place = "this loss" if run == LOSS else "tis_function"
    given = [name for name in names if name in options]
    notes += [f"{name} has no effect under {place}: its bounds stand in offpolicy_corr" for name in given]
    return notes


def needs(args: Any, settings: Settings) -> list[str]:
    """What must be set so that the samplers record all that the correction uses."""
    hook = _run(vars(args))[0] == TIS
    kind = "none" if hook else settings.kind_of_candidates(filters(args))
    count = int(number_of(args, "rollout_top_logprobs_num", 0)) or 128
    request = request_parameters(spec_of_kind(args, kind), settings.correction, num_candidates=count)
    center = "score centering, " if settings.correction.center else ""
    lines = [
        f"ok: {center}{settings.correction.rule}, candidates: {kind}, denominator: {settings.denominator}"
    ]
    flags = request.server_flags or ("no flag beyond Miles' own",)
    lines += ["", "SGLang server:", *(f"  {flag}" for flag in flags)]
    lines += [f"  environment {name}={value}" for name, value in request.environment.items()]
    lines += ["SGLang request fields (beside sampling_params):", *_fields(request)]
    if hook:
        return [*lines, "Miles:", f"  --use-tis --custom-tis-function-path {TIS_PATH}"]
    return [*lines, "Miles:", *(f"  {option}" for option in _miles_options(args, settings, kind, count))]


def _fields(request: RequestParameters) -> list[str]:
    own = {name: value for name, value in request.request.items() if name != "sampling_params"}
    return [f"  {name}: {value}" for name, value in own.items()]


def _miles_options(args: Any, settings: Settings, kind: str, count: int) -> list[str]:
    options = [f"--loss-type custom_loss --custom-loss-function-path {LOSS_PATH}", "--use-rollout-logprobs"]
    if kind == "heads":
        options += [f"--rollout-top-logprobs-num {count}", _NATIVE]
    if kind == "supports":
        top_p, top_k = number_of(args, "rollout_top_p", 1.0), int(number_of(args, "rollout_top_k", -1))
        options.append(f"--rollout-top-p {top_p} --rollout-top-k {top_k}")
        if settings.correction.center:
            options += [f"--rollout-top-logprobs-num {max(count, top_k)}", _NATIVE]
    if kind != "none" or settings.groups or settings.guards_sampler_lag():
        options += [
            "for groups and the sampler lag, for supports on Megatron, and for all candidates on v0.1.0:",
            f"  --custom-convert-samples-to-train-data-path {CONVERTER}",
            f"  --custom-megatron-init-path {TRAINER_HOOK}",
            "  (torch-native trainers: that name as worker_process_setup_hook in Ray's runtime environment)",
        ]
    return options


def _sampling_in_yaml(yaml: dict[str, Any], launch: dict[str, Any]) -> list[str]:
    """Sampling options that Miles derives others from before it reads the YAML."""
    names = ("rollout_top_p", "rollout_top_k", "rollout_top_logprobs_num")
    return [
        f"{name} is set in the YAML alone: later Miles derives what samplers record from it before it reads "
        f"the YAML. Put --{name.replace('_', '-')} on the launch line too"
        for name in names
        if name in yaml and name not in launch
    ]
