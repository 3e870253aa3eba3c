"""Adapter: options as a launch of Miles gets them: from the launch line, then from the YAML, which overrides it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from offpolicy_corr.settings import SettingsError, number_remedy

from .function_paths import FUNCTION_OPTIONS
from .option_rules import RULES
from .option_table import NAMES, OPTIONS, SWITCHES
from .options import LOSS, Problem

USAGE = "usage: offpolicy-corr miles check config.yaml [the launch arguments of train.py or train_async.py …]"
CONFIG_OPTION = "custom_config_path"
YAML, LAUNCH_LINE = "in the YAML", "on the launch line"
# switches that turn off what Miles keeps under another name
NEGATIONS = {
    "disable_grpo_std_normalization": "grpo_std_normalization",
    "disable_rewards_normalization": "rewards_normalization",
    "disable_compute_advantages_and_returns": "compute_advantages_and_returns",
}
# names that this command knows, so that a misspelled one is found: Miles takes any name in the YAML
KNOWN = frozenset(
    {"offpolicy_corr", CONFIG_OPTION, *NEGATIONS, *NAMES, *FUNCTION_OPTIONS}
    | {"multi_lora_adapter", "multi_lora_adapters"}  # of Miles, close to names of the table
    | {name for rule in RULES for name in rule.names}
)


def read_file(path: str) -> dict[str, Any]:
    """The options of a YAML file.

    Raises:
        SettingsError: no readable file, another encoding than UTF-8, and what `read_yaml` refuses.
    """
    file = Path(path)
    try:
        if file.is_dir():
            raise SettingsError(f"{path} is a folder: name the YAML file")
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"{path} cannot be read: {reason}. Name a file that exists and may be read"
        ) from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte {content[error.start]:#04x} at position {error.start}"
        raise SettingsError(f"{path} is not UTF-8 ({where}): save it as UTF-8") from None
    try:
        return read_yaml(text)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def read_yaml(text: str) -> dict[str, Any]:
    """The YAML as Miles reads it (``safe_load``), but a key that stands twice is an error, not a silent override.

    Raises:
        SettingsError: pyyaml is missing, the text is no YAML or no mapping, a key stands twice or is no text.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise SettingsError("reading YAML needs pyyaml: pip install 'offpolicy-corr[miles]'") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _refuse_duplicates(key for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            return dict(super().construct_mapping(node, deep=deep))

        def flatten_mapping(self, node: Any) -> None:  # ``<<`` puts merged keys beside a mapping's own
            _refuse_duplicates(key for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            super().flatten_mapping(node)

    try:
        data = yaml.load(text, Loader)
    except SettingsError:
        raise
    except RecursionError:
        raise SettingsError("not YAML that Miles could read: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        hint = ". Indent with spaces, not tabs" if "'\\t'" in str(error) else ""
        raise SettingsError(f"not YAML: {error}{hint}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SettingsError(
            f"the YAML must be a mapping of options, got {type(data).__name__}. "
            "Write lines such as loss_type: custom_loss"
        )
    for key in data:
        if not isinstance(key, str):
            raise SettingsError(
                f"the key {key!r} is no text, and Miles stops at it: put it in quotes or leave it out"
            )
    return data


def _refuse_duplicates(keys: Any) -> None:
    lines: dict[str, int] = {}
    for key in keys:
        line = key.start_mark.line + 1
        if key.value in lines:
            raise SettingsError(
                f"{key.value} stands twice, on lines {lines[key.value]} and {line}: YAML would keep the last. "
                "Remove one"
            )
        if key.value != "<<":
            lines[key.value] = line


def parse_launch(argv: Sequence[str]) -> dict[str, Any]:
    """``--option value``, ``--option=value`` and switches, by Miles' names. A repeated option counts last.

    Raises:
        SettingsError: a word that belongs to no option.
    """
    found: dict[str, Any] = {}
    for name, values in _words(argv):
        key = name.replace("-", "_")
        if key in NEGATIONS:
            found[NEGATIONS[key]] = False
        elif not values or key in SWITCHES:  # a value beside a switch is a problem of its own
            found[key] = True
        else:
            found[key] = _scalar(values[0]) if len(values) == 1 else [_scalar(value) for value in values]
    return found


def _words(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    index = 0
    while index < len(argv):
        word = argv[index]
        index += 1
        if not word.startswith("--") or word in ("--", "--="):
            raise SettingsError(
                f"launch arguments start with --, got {word!r}: leave the command out. {USAGE}"
            )
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and index < len(argv) and not argv[index].startswith("--"):
            values.append(argv[index])
            index += 1
        yield name, values


def launch_problems(argv: Sequence[str]) -> list[Problem]:
    """What Miles' parser would refuse: a value beside a switch, an option by another name."""
    found = []
    for name, values in _words(argv):
        key = name.replace("-", "_")
        if values and key in SWITCHES | NEGATIONS.keys():
            text = f"--{name} is a switch, and {' '.join(values)} stands beside it {LAUNCH_LINE}"
            found.append(Problem((), text, f"Write --{name} alone, or leave it out to turn it off"))
        if "_" in name and key in KNOWN:
            found.append(Problem((), f"--{name} is no option of Miles", f"Write --{key.replace('_', '-')}"))
        longer = [known for known in KNOWN if known.startswith(key) and len(key) >= 5]
        if longer and key not in KNOWN and "_" in key:
            text = f"--{name} is no option of Miles, whose parser takes no abbreviations"
            found.append(
                Problem((), text, f"Write --{min(longer).replace('_', '-')} in full, if that is meant")
            )
    return found


def yaml_problems(yaml: dict[str, Any]) -> tuple[list[Problem], dict[str, Any]]:
    """(what is wrong with names and numbers of the YAML, its options by the names that are meant)."""
    found, meant = [], dict[str, Any]()
    for key, value in yaml.items():
        name = key.replace("-", "_")
        if key == CONFIG_OPTION:
            found.append(Problem((key,), f"{key} has no effect in the YAML", "Put it on the launch line"))
        elif name in NEGATIONS:
            remedy = f"Write {NEGATIONS[name]}: false, or put --{name.replace('_', '-')} on the launch line"
            found.append(Problem((key,), f"{key} has no effect in the YAML", remedy))
        elif name != key and name in KNOWN:
            found.append(
                Problem((key,), f"{key} is no name of an option: Miles would ignore it", f"Write {name}")
            )
        if isinstance(value, str) and key not in KNOWN:
            remedy_of_text = number_remedy(value)
            if remedy_of_text is not None and "as text" in remedy_of_text:
                found.append(Problem((key,), f"{key} would be text for Miles", remedy_of_text))
        meant[NEGATIONS.get(name, name)] = not value if name in NEGATIONS else value
    return found, meant


def misspelled(options: dict[str, Any]) -> tuple[list[Problem], dict[str, Any]]:
    """(options that look like a known one, the options by the names that are meant)."""
    found, meant = [], dict(options)
    for key, value in options.items():
        near = [] if key in KNOWN else difflib.get_close_matches(key, KNOWN, 1, cutoff=0.9)
        if near:
            reason = f"{key} is no option known here, and Miles would ignore it in the YAML"
            found.append(Problem((key,), reason, f"Did you mean {near[0]}?"))
            meant.setdefault(near[0], value)
    return found, meant


def config_problem(launch: dict[str, Any], checked: str) -> Problem | str | None:
    """What is wrong where ``--custom-config-path`` names another file than ``checked``; a note where it is absent."""
    named = launch.get(CONFIG_OPTION)
    if named is None:
        if not launch:
            return None
        return f"no --custom-config-path {LAUNCH_LINE}: without it Miles does not read {checked}"
    names = (CONFIG_OPTION,)
    if not isinstance(named, str) or named.startswith("base64:"):
        reason = f"{CONFIG_OPTION} names no file, so {checked} would not be read"
        return Problem(names, reason, f"Write --custom-config-path {checked}")
    if Path(named).resolve() != Path(checked).resolve():
        reason = f"{CONFIG_OPTION} names another file than {checked}: the run would read the other file"
        return Problem(names, reason, "Check the file that is launched")
    return None


def before_the_yaml(yaml: dict[str, Any], launch: dict[str, Any]) -> list[Problem]:
    """Options that the YAML sets too late, since Miles has used what stands on the launch line before it reads it."""
    backend, estimator = (yaml.get(name) for name in ("train_backend", "advantage_estimator"))
    late = {
        "train_backend": backend != launch.get("train_backend", "megatron"),
        "advantage_estimator": (estimator == "ppo") != (launch.get("advantage_estimator") == "ppo"),
    }
    uses = {"train_backend": "selects the backend", "advantage_estimator": "decides on a critic"}
    found = []
    for name, is_late in late.items():
        value = yaml.get(name)
        sound = all(
            option.fault(value) is None for option in OPTIONS if option.name == name and LOSS in option.runs
        )
        if is_late and sound and value is not None:
            reason = f"Miles {uses[name]} from the launch line, before it reads the YAML"
            found.append(Problem((name,), reason, f"Put --{name.replace('_', '-')} {value} there"))
    return found


def sources(yaml: dict[str, Any], launch: dict[str, Any]) -> dict[str, str]:
    """Where the value of each option comes from."""
    found = dict.fromkeys(launch, LAUNCH_LINE) | dict.fromkeys(yaml, YAML)
    for name in launch.keys() & NAMES - SWITCHES - yaml.keys():
        if launch[name] is True:
            found[name] = f"{LAUNCH_LINE}, which gives no value"
    for name in launch.keys() & yaml.keys():
        if launch[name] != yaml[name]:
            found[name] = f"{YAML}, over {launch[name]!r} {LAUNCH_LINE}"
    return found


def _scalar(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
