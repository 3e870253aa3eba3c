"""Adapter: options as a launch of Miles gets them, from YAML and command line, and the functions they name."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .settings import SettingsError

USAGE = "usage: offpolicy-corr miles check config.yaml [the launch arguments of train.py or train_async.py …]"
_OWN = "offpolicy_corr."


def read_file(path: str) -> dict[str, Any]:
    """The options of a YAML file.

    Raises:
        SettingsError: no readable file, another encoding than UTF-8, and what `read_yaml` refuses.
    """
    file = Path(path)
    if file.is_dir():
        raise SettingsError(f"{path} is a folder: name the YAML file")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte {content[error.start]:#04x} at position {error.start}"
        raise SettingsError(f"{path} is not UTF-8 ({where}): save it as UTF-8") from None
    return read_yaml(text)


def read_yaml(text: str) -> dict[str, Any]:
    """The YAML as Miles reads it (``safe_load``), but a key that stands twice is an error, not a silent override.

    Raises:
        SettingsError: pyyaml is missing, the text is no YAML or no mapping, or a key stands twice.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise SettingsError("reading YAML needs pyyaml: pip install 'offpolicy-corr[miles]'") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: dict[str, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise SettingsError(
                        f"{key.value} stands twice, on lines {seen[key.value]} and {line}: YAML would keep the last"
                    )
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    seen[key.value] = line
            return dict(super().construct_mapping(node, deep=deep))

    try:
        data = yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
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
        while not equals and index < len(argv) and not argv[index].startswith("--"):
            values.append(argv[index])
            index += 1
        key = name.replace("-", "_")
        found[key] = (
            True if not values else _scalar(values[0]) if len(values) == 1 else [_scalar(v) for v in values]
        )
    return found


def other_config(launch: dict[str, Any], checked: str) -> str | None:
    """What is wrong where ``--custom-config-path`` names another file than the one that is checked."""
    named = launch.get("custom_config_path")
    if named is None:
        return None
    if not isinstance(named, str) or named.startswith("base64:"):
        return f"custom_config_path is {str(named)[:60]!r}, so {checked} would not be read: check what the launch names"
    if Path(named).resolve() != Path(checked).resolve():
        return (
            f"custom_config_path names {named}, and {checked} is checked: the run would read the other file"
        )
    return None


def path_problem(name: str, value: Any, folder: Path) -> tuple[str | None, str | None]:
    """(problem, note) of an option that names a function by a dotted path, ``package.module.function``.

    Modules are looked up in ``folder``, beside the YAML, and where Python finds them. Their source is read, never
    executed, except that Python imports the packages around a module to find it.
    """
    if not isinstance(value, str):
        return f"{name} is {value!r}: name a function, package.module.function", None
    if ":" in value:
        return (
            f"{name} {value!r}: Miles splits at the last point, a colon fails. Write package.module.function",
            None,
        )
    module, _, function = value.rpartition(".")
    if not module:
        return f"{name} {value!r} names no module: write package.module.function", None
    names = _names_in(module, folder)
    if names is None:
        if value.startswith(_OWN):
            return f"{name} names {value}, and there is no module {module}", None
        return None, f"{name}: {module} is not installed here, so {value} could not be looked up"
    if function in names:
        return None, None
    near = difflib.get_close_matches(function, names, 1)
    hint = f": did you mean {module}.{near[0]}?" if near else ""
    return f"{name} names {value}, and {module} has no {function}{hint}", None


def _names_in(module: str, folder: Path) -> set[str] | None:
    """Top-level names of a module's source; None where it cannot be found or read."""
    source = folder.joinpath(*module.split(".")).with_suffix(".py")
    if not source.is_file():
        try:
            spec = importlib.util.find_spec(module)
        except Exception:  # importing the packages around it runs their code, which may fail in any way
            return None
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        source = Path(spec.origin)
    found: set[str] = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _scalar(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
