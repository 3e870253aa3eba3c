"""Adapter: ``offpolicy-corr miles check config.yaml [launch arguments…]``, what a run would refuse.

The launch arguments are overridden by the YAML, as Miles does near the end of its own validation. What may stand in an
option is said in `option_table`.
"""

from __future__ import annotations

import difflib
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from offpolicy_corr.records.errors import RecordError
from offpolicy_corr.records.requests import RequestParameters, request_parameters

from .host import torch_native
from .launch import USAGE, other_config, parse_launch, path_problem, read_file
from .option_table import OPTIONS, RULES, environment_problems, problems
from .options import (
    CONVERTER,
    CONVERTER_OPTION,
    HOOK_OPTION,
    LAUNCH,
    LAUNCH_LOSS,
    LOSS_PATH,
    TIS,
    TIS_PATH,
    TRAINER_HOOK,
    Problem,
    filters,
    number_of,
)
from .sampling import spec_of_kind
from .settings import EXPONENT, Settings, SettingsError

_NATIVE = (
    "  (where Miles has native score centering; v0.1.0: a generate function that calls transport.attach)"
)
_TIS_OPTION, _LOSS_OPTION = "custom_tis_function_path", "custom_loss_function_path"
# names that this command reads, so that a misspelled one in the YAML is found: Miles takes any name
_KNOWN = frozenset(
    {
        "offpolicy_corr",
        "tis_clip",
        "disable_grpo_std_normalization",
        "allgather_cp",
        "train_backend",
        "vocab_size",
    }
    | {_LOSS_OPTION, "custom_generate_function_path", "kl_loss_type"}
    | {option.name for option in OPTIONS}
    | {name for rule in RULES for name in rule.names}
)


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
        yaml = read_file(argv[0])
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options = {**launch, **yaml}
    found, notes, settings = examine(options, Path(argv[0]).parent)
    other = other_config(launch, argv[0])
    if other is not None:
        found.append(Problem(("custom_config_path",), other))
    notes += _behind_the_checks(yaml, launch)
    lines: list[str] = []
    if settings is not None and not found:
        try:
            lines = needs(Namespace(**options), settings)
        except (RecordError, SettingsError) as error:
            found.append(Problem((), str(error)))
    for problem in found:
        print(f"error: {problem.text}{_sources(problem, yaml, launch)}")
    for note in notes:
        print(f"note: {note}")
    if found:
        print(f"{len(found)} error{'s' * (len(found) > 1)}: this run would fail or train on something else.")
        return 1
    print("\n".join(lines))
    return 0


def examine(options: dict[str, Any], folder: Path) -> tuple[list[Problem], list[str], Settings | None]:
    """(what must be put right, what should be known, the settings where they could be read).

    ``folder`` is that of the YAML, where modules of one's own may lie.
    """
    args = Namespace(**options)
    found, notes = _misspelled(options), list[str]()
    for name, value in options.items():
        if _names_function(name) and value is not None:
            problem, note = path_problem(name, value, folder)
            found += [Problem((name,), problem)] if problem else []
            notes += [note] if note else []
    try:
        settings = Settings.of(options.get("offpolicy_corr"))
    except SettingsError as error:
        return [*found, Problem(("offpolicy_corr",), str(error))], notes, None
    if uses_tis_hook(options):
        checkers = [TIS, LAUNCH]
        if not options.get("use_tis"):
            notes.append("use_tis is off: tis_function reports metrics and leaves the loss alone")
    else:
        checkers = [LAUNCH_LOSS, LAUNCH]
        found += [problem for problem in _loss_path(options) if problem.names not in {p.names for p in found}]
        if not options.get("use_rollout_logprobs"):
            notes.append(
                "use_rollout_logprobs is off: Miles scores every batch once more, and this loss does not read it"
            )
    judged = [problem for checker in checkers for problem in problems(args, settings, checker)]
    found += dict.fromkeys(judged)  # a row may belong to both checkers
    found += environment_problems()
    if torch_native(args) and options.get(CONVERTER_OPTION) == CONVERTER:
        notes.append(
            f"torch-native trainers run no {HOOK_OPTION}: give Ray the runtime environment "
            f'{{"worker_process_setup_hook": "{TRAINER_HOOK}"}}'
        )
    return found, notes, settings


def needs(args: Any, settings: Settings) -> list[str]:
    """What must be set so that the samplers record all that the correction uses."""
    hook = uses_tis_hook(vars(args))
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


def uses_tis_hook(options: dict[str, Any]) -> bool:
    """Whether the run keeps Miles' own policy loss and takes the weights of our TIS hook, misspelled or not."""
    path = options.get(_TIS_OPTION)
    ours = isinstance(path, str) and path.startswith("offpolicy_corr.")
    return ours and options.get("loss_type", "policy_loss") != "custom_loss"


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


def _names_function(name: str) -> bool:
    return name.startswith("custom_") and name.endswith("_path") and name != "custom_config_path"


def _loss_path(options: dict[str, Any]) -> list[Problem]:
    path = options.get(_LOSS_OPTION)
    found = []
    if options.get("loss_type") is None:
        text = "loss_type is not set: Miles would train with its own policy_loss. Set loss_type: custom_loss"
        found.append(Problem(("loss_type",), text))
    if path is None:
        found.append(Problem((_LOSS_OPTION,), f"{_LOSS_OPTION} is not set: use {LOSS_PATH}"))
    elif path != LOSS_PATH:
        text = f"{_LOSS_OPTION} is {path!r}, which is not this loss: use {LOSS_PATH}"
        found.append(Problem((_LOSS_OPTION,), text))
    return found


def _misspelled(options: dict[str, Any]) -> list[Problem]:
    found = []
    for key, value in options.items():
        near = difflib.get_close_matches(key, _KNOWN, 1, cutoff=0.9)
        if near and key not in _KNOWN:
            text = f"{key} is no option known here: did you mean {near[0]}? Miles would take it and ignore it"
            found.append(Problem((key,), text))
        if isinstance(value, str) and EXPONENT.fullmatch(value) and key not in {o.name for o in OPTIONS}:
            text = f"{key}: YAML reads {value} as text: write it with a point, for example 1.0e-4"
            found.append(Problem((key,), text))
    return found


def _sources(problem: Problem, yaml: dict[str, Any], launch: dict[str, Any]) -> str:
    """Where the values of a problem's options come from."""
    places = [
        f"{name}: {'the YAML' if name in yaml else 'the launch line'}"
        for name in problem.names
        if name in yaml or name in launch
    ]
    return f" ({', '.join(places)})" if places else ""


def _behind_the_checks(yaml: dict[str, Any], launch: dict[str, Any]) -> list[str]:
    """Sampling options that Miles derives others from before it reads the YAML."""
    names = ("rollout_top_p", "rollout_top_k", "rollout_top_logprobs_num")
    return [
        f"{name} is set in the YAML alone: later Miles derives what samplers record from it before it reads "
        f"the YAML. Put --{name.replace('_', '-')} on the launch line too"
        for name in names
        if name in yaml and name not in launch
    ]
