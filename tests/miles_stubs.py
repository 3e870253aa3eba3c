"""Makes the stubs with which the tests run on a checkout of Miles without SGLang.

    python tests/miles_stubs.py FOLDER

writes the packages `sglang` and `sglang_router` into FOLDER, for PYTHONPATH. Each can be imported with all its
submodules, and every name in them is an empty class: enough to import Miles' data, conversion and argument modules on a
CPU, and nothing that Miles could run with.
"""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGES = ("sglang", "sglang_router")

TEXT = '''"""A stand-in for {name}: any submodule, any name, each an empty class."""

import importlib.abc
import importlib.machinery
import sys


def _name(attribute):
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    methods = {{"add_cli_args": staticmethod(lambda *args, **kwargs: None)}}
    return type(attribute, (), methods)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("{name}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = _name


__getattr__ = _name
sys.meta_path.append(_Submodules())
'''


def write_stubs(folder: Path) -> None:
    """Write the stubs; a real installation in the same folder is never touched."""
    for name in PACKAGES:
        package = folder / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(TEXT.format(name=name))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write_stubs(Path(sys.argv[1]))
