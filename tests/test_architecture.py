"""The layers of the package: imports only go down, never in a circle, and private names stay in their module.

A module names its layer as the first words of its docstring. Imports inside functions and under TYPE_CHECKING count.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "offpolicy_corr"
FOLDERS = {
    "offpolicy_corr": PACKAGE,
    "kernels": f"{PACKAGE}.kernels",
    "integrations": f"{PACKAGE}.integrations",
    "benchmarks": f"{PACKAGE}.benchmarks",
}
LAYERS = (
    "Arithmetic",
    "Rules",
    "Records",
    "Data",
    "Mathematics",
    "Row passes",
    "Preparation",
    "Autograd",
    "Public",
    "Reader",
    "Adapter",
    "Benchmark",
    "Command",
)
# a folder's modules belong to these layers, so that the folder alone narrows it down
ALLOWED = {
    "offpolicy_corr/records": {"Records"},
    "kernels": {"Row passes"},
    "integrations": {"Reader", "Adapter"},
    "benchmarks": {"Benchmark"},
}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


def layer(name: str) -> str:
    first_line = (ast.get_docstring(tree(name)) or "").split("\n")[0]
    return first_line.split(":")[0]


def imports(name: str) -> list[tuple[str, str | None]]:
    """(module, imported name or None) of every import of our own modules."""
    package = name if modules()[name].name == "__init__.py" else name.rpartition(".")[0]
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.append((inner, None) if inner in modules() else (base, alias.name))
    return [(module, imported) for module, imported in found if module in modules()]


def graph() -> dict[str, set[str]]:
    """Module → the modules it imports. The package itself only lists its public names and is left out."""
    return {
        name: {module for module, _ in imports(name)} - {name, PACKAGE}
        for name in modules()
        if name != PACKAGE
    }


@pytest.mark.parametrize("name", sorted(set(modules()) - {PACKAGE}))
def test_a_module_names_its_layer_first_and_stands_in_a_folder_of_that_layer(name: str) -> None:
    assert layer(name) in LAYERS, f"{name} starts with {layer(name)!r}: name one of {LAYERS}, then a colon"
    folder = str(modules()[name].parent.relative_to(ROOT))
    for prefix, allowed in ALLOWED.items():
        if folder == prefix or folder.startswith(prefix + "/"):
            assert layer(name) in allowed


def test_imports_only_go_down() -> None:
    up = [
        f"{name} ({layer(name)}) imports {module} ({layer(module)})"
        for name, below in graph().items()
        for module in below
        if LAYERS.index(layer(module)) > LAYERS.index(layer(name))
    ]
    assert not up, "\n".join(up)


def test_imports_form_no_circle() -> None:
    remaining = graph()
    while free := [name for name, below in remaining.items() if not below & remaining.keys()]:
        for name in free:
            del remaining[name]
    assert not remaining, f"circular: {sorted(remaining)}"


def test_private_names_stay_in_their_module() -> None:
    taken = [
        f"{name} takes {imported} from {module}"
        for name in modules()
        for module, imported in imports(name)
        if imported is not None and imported.startswith("_") and not imported.startswith("__")
    ]
    assert not taken, "\n".join(taken)


def test_the_core_imports_no_framework_and_the_kernels_have_one_entrance() -> None:
    for name, below in graph().items():
        if name.startswith((f"{PACKAGE}.integrations", f"{PACKAGE}.benchmarks")):
            continue
        assert not any(module.startswith(f"{PACKAGE}.integrations") for module in below), name
        if not name.startswith(f"{PACKAGE}.kernels") and name != f"{PACKAGE}.backend":
            assert not any(module.startswith(f"{PACKAGE}.kernels") for module in below), name


def test_the_checks_above_can_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A module that imports upwards, in a circle, and somebody's private name."""
    low, high = tmp_path / "low.py", tmp_path / "high.py"
    low.write_text('"""Arithmetic: x."""\ndef f():\n    from offpolicy_corr.high import _g\n')
    high.write_text('"""Public: x."""\nfrom . import low\n')
    fake = {f"{PACKAGE}.low": low, f"{PACKAGE}.high": high}
    monkeypatch.setitem(globals(), "modules", lambda: fake)
    tree.cache_clear()
    for check in (
        test_imports_only_go_down,
        test_imports_form_no_circle,
        test_private_names_stay_in_their_module,
    ):
        with pytest.raises(AssertionError):
            check()
    tree.cache_clear()
