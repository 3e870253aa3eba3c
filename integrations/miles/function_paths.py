"""Adapter: functions that Miles' options name by a dotted path, looked up without running the code that holds them."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from .options import LOSS_OPTION, OWN_FUNCTIONS, Problem

_OTHERS = """
    rollout_function_path eval_function_path data_source_path buffer_filter_path dynamic_sampling_filter_path
    rollout_sample_filter_path rollout_all_samples_process_path rollout_data_postprocess_path
    generate_execute_tool_function_path generate_tool_specs_path session_sample_picker_path
    session_sample_postprocessor_path
"""
FUNCTION_OPTIONS = frozenset(_OTHERS.split()) | OWN_FUNCTIONS.keys() | {"custom_generate_function_path"}
_WRITE = "Write package.module.function"


def names_function(option: str) -> bool:
    """Whether Miles loads a function by this option's value."""
    custom = option.startswith("custom_") and option.endswith("_path")
    return option in FUNCTION_OPTIONS or (custom and option != "custom_config_path")


def is_ours(path: Any, expected: str) -> bool:
    """Whether a path means ``expected``, a function of this library, perhaps misspelled."""
    if not isinstance(path, str):
        return False
    return path.startswith("offpolicy_corr.") or bool(
        difflib.get_close_matches(path, [expected], 1, cutoff=0.85)
    )


def path_problem(option: str, value: Any, folders: list[Path]) -> Problem | str | None:
    """What is wrong with the path in an option; a note where the module could not be looked up; None where it is right.

    Args:
        folders: where modules of one's own may lie, searched before Python's path.
    """
    names = (option,)
    if not isinstance(value, str):
        return Problem(names, f"{option} names no function", _WRITE)
    if ":" in value or "/" in value:
        return Problem(
            names, f"{option}: Miles splits at the last point, a colon or a file name fails", _WRITE
        )
    expected = OWN_FUNCTIONS.get(option)
    if expected is not None and value != expected and is_ours(value, expected):
        return Problem(
            names, f"{option} does not name the function that belongs there", f"Did you mean {expected}?"
        )
    if option == LOSS_OPTION and value != expected:
        return Problem(names, f"{option} is not this loss", f"Use {expected}")
    if value == expected:
        return None
    module, _, function = value.rpartition(".")
    if not all(part.isidentifier() for part in value.split(".")) or not module:
        return Problem(names, f"{option} is no dotted path with a module", _WRITE)
    return _look_up(option, module, function, folders)


def _look_up(option: str, module: str, function: str, folders: list[Path]) -> Problem | str | None:
    top, *inner = module.split(".")
    unknown = f"{option}: {module} is not installed here, so {module}.{function} could not be looked up"
    spec = _top_level(top, folders)
    path = top
    for part in inner:
        below = None if spec is None else spec.submodule_search_locations
        if below is None and (spec is None or spec.origin is None):
            return unknown
        deeper = None if below is None else _find(f"{path}.{part}", below)
        if deeper is None:
            if spec is None or spec.origin is None:  # a folder without __init__.py may go on elsewhere
                return unknown
            return Problem(
                (option,), f"{option}: there is no module {path}.{part}", _nearest_module(path, part, below)
            )
        spec, path = deeper, f"{path}.{part}"
    if spec is None or spec.origin is None:
        return unknown
    if not spec.origin.endswith(".py"):
        return f"{option}: {module} has no Python source, so {function} could not be looked up"
    try:
        found, complete = _names_in(Path(spec.origin))
    except SyntaxError as error:
        return Problem((option,), f"{module} has a syntax error on line {error.lineno}", "Mend it")
    except (OSError, ValueError) as error:
        return f"{option}: {module} could not be read ({error})"
    if function in found:
        return None
    if not complete:
        return f"{option}: {module} makes its names while it runs, so {function} could not be looked up"
    near = difflib.get_close_matches(function, found, 1)
    remedy = f"Did you mean {module}.{near[0]}?" if near else "Name a function of that module"
    return Problem((option,), f"{option}: {module} has no {function}", remedy)


def _top_level(name: str, folders: list[Path]) -> ModuleSpec | None:
    found = PathFinder.find_spec(name, [str(folder) for folder in folders])
    if found is not None and found.origin is not None:
        return found
    try:
        return importlib.util.find_spec(name) or found
    except (ImportError, ValueError, AttributeError):  # a module in sys.modules without a spec
        return found


def _find(name: str, folders: Iterable[str]) -> ModuleSpec | None:
    """A module of a package, by whatever finders Python has: an editable install brings its own."""
    for finder in sys.meta_path:
        found = finder.find_spec(name, list(folders))
        if found is not None:
            return found
    return None


def _nearest_module(path: str, part: str, folders: Any) -> str:
    known = {
        file.stem for folder in folders or () for file in Path(folder).glob("*") if file.suffix in ("", ".py")
    }
    near = difflib.get_close_matches(part, known, 1)
    return f"Did you mean {path}.{near[0]}?" if near else "Name a module that exists"


def _names_in(source: Path) -> tuple[set[str], bool]:
    """(top-level names of a module's source, whether they are all: not with ``import *`` or ``__getattr__``)."""
    found: set[str] = set()
    complete = True
    for node in _executed(ast.parse(source.read_bytes())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                complete = complete and alias.name != "*"
                found.add((alias.asname or alias.name).split(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Name) and node.id in ("globals", "setattr", "exec"):
            complete = False
    return found, complete and "__getattr__" not in found


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: all but the bodies of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _executed(child)
