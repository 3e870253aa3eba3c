"""A GPU that is not there: torch's fake tensors on device "cuda", which have shapes and no values.

Whatever needs a value on the host (``.item()``, a boolean index, ``nonzero``, ``unique``) raises there, and so does an
operator that mixes devices: what runs through can be captured into a CUDA graph.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode

# builds of torch without CUDA do not know how to switch to a CUDA device; to fake tensors switching means nothing
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);
"""


def allow_fake_devices(folder: Path) -> None:
    """Let fake tensors say that they are on a GPU; skips where this torch cannot be taught it."""
    if torch.cuda._is_compiled():
        return
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("torch without CUDA needs a C++ compiler to pretend")
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    command = [compiler, "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library), "-lc10"]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    subprocess.run(command, check=True)
    torch.ops.load_library(str(library))


class NoTransfers(TorchDispatchMode):
    """Refuses copies between host and device, which wait for the stream they are on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::_to_copy", "aten::copy_"):
            sources = [a for a in args if isinstance(a, Tensor)]
            moved = [s for s in sources if s.device.type != result.device.type]
            assert not moved, f"{func} moves {moved} to {result.device}"
        return result


@contextmanager
def fake_cuda() -> Iterator[None]:
    with FakeTensorMode(), NoTransfers():
        yield


def gradients(output: Tensor, *upstream: Tensor | None) -> Any:
    """What the autograd function behind ``output`` hands over. The engine itself would ask for a real device."""
    node: Any = output.grad_fn
    while not hasattr(node, "apply"):  # torch's own operators behind it have values to pass on, nothing else
        (first, *_), node = node(upstream[0]), node.next_functions[0][0]
        upstream = (first, *upstream[1:])
    return node.apply(*upstream)
