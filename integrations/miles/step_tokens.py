"""Adapter: the division by a step's tokens that Miles' torch-native trainers leave out.

With ``calculate_per_token_loss`` Miles' dispatcher returns a sum over tokens and a token count. Megatron divides by the
count; torch-native trainers drop it, so that the gradient grows with the number of tokens (radixark/miles pull request
3231, open when this was written).
The converter ships the count of each optimizer step (`count_step_tokens`), and the loss divides by it.

A Miles that divides by itself would make that a division too many. So what the installed one does is looked up: its
trainer must ignore the count (`require_dropped_count`), and nothing may scale the loss on its way to the backward pass.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .host import UnknownVersion

# homes of the torch-native trainers' training step, below the package miles
_TRAINERS = (
    "backends/training_utils/torch_native/actor.py",
    "backends/training_utils/torch_native_actor.py",
    "backends/fsdp_utils/actor.py",
)
_REMEDY = (
    "Dividing once more would make the gradient too small by the number of tokens. Leave calculate_per_token_loss off, "
    "or upgrade offpolicy_corr to a release that knows this Miles"
)


def count_step_tokens(
    masks: Sequence[Sequence[int]], partitions: Sequence[Sequence[int]], global_batch_size: int
) -> list[np.ndarray[Any, Any]]:
    """Per sample, int64 ``[1]``, how many tokens its optimizer step trains over all ranks.

    Every rank takes its samples in order, ``global_batch_size / ranks`` per step. Samples behind the last whole step
    are never trained on; theirs is 0.
    """
    size = global_batch_size // len(partitions)
    found = [np.zeros(1, dtype=np.int64) for _ in masks]
    for step in range(min(len(partition) for partition in partitions) // size):
        members = [i for partition in partitions for i in list(partition)[step * size : (step + 1) * size]]
        total = sum(int(np.sum(masks[i])) for i in members)
        for i in members:
            found[i][0] = total
    return found


def divide_by_step_tokens(loss: Tensor, step_tokens: int, ranks: int) -> Tensor:
    """``loss · ranks / step_tokens``: torch-native trainers average gradients over ranks. Waits in the backward pass.

    Raises:
        UnknownVersion: Miles' trainer may use the token count itself; or, from the backward pass and before any
            gradient is made, Miles scaled the loss behind this function.
    """
    require_dropped_count()
    mean = loss * (ranks / step_tokens)
    if mean.requires_grad:
        mean.register_hook(_refuse_scaled)
    return mean


def _refuse_scaled(gradient: Tensor) -> None:
    """``gradient`` is what Miles multiplied the loss by before its backward pass."""
    factor = float(gradient)
    if factor != 1.0:
        raise UnknownVersion(
            f"this Miles multiplies a per-token loss by {factor:.6g} itself, as a version does that divides by the "
            f"tokens of a step. {_REMEDY}"
        )


def require_dropped_count() -> None:
    """Raise UnknownVersion unless the installed Miles' torch-native training step ignores the token count."""
    roots = getattr(importlib.import_module("miles"), "__path__", [])
    paths = [path for root in roots for name in _TRAINERS if (path := Path(root, name)).is_file()]
    steps = {path: found for path in paths if (found := drops_token_count(path)) is not None}
    if not steps:
        raise UnknownVersion(
            f"no torch-native training step of Miles was found in {', '.join(_TRAINERS)}: whether it divides by the "
            f"tokens of a step is not known. {_REMEDY}"
        )
    for path, drops in steps.items():
        if not drops:
            raise UnknownVersion(f"this Miles uses the token count of a per-token loss in {path}. {_REMEDY}")


@functools.cache
def drops_token_count(path: Path) -> bool | None:
    """Whether a module that calls Miles' ``loss_function`` ignores the second thing it returns; None without a call.

    False as well where the module mentions ``calculate_per_token_loss``: it may scale gradients or losses by it.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    calls = [(function, call) for function in functions for call in _loss_calls(function)]
    if not calls:
        return None
    mentioned = any("calculate_per_token_loss" in name for name in _names(tree))
    return not mentioned and all(_ignores_count(function, call) for function, call in calls)


def _loss_calls(function: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and list(_names(node.func))[:1] == ["loss_function"]:
            yield node


def _ignores_count(function: ast.AST, call: ast.Call) -> bool:
    """``a, count, b = loss_function(…)`` in ``function``, which never reads ``count``."""
    for node in ast.walk(function):
        if not (isinstance(node, ast.Assign) and node.value is call):
            continue
        target = node.targets[0]
        if not (isinstance(target, ast.Tuple) and len(target.elts) == 3):
            return False
        count = target.elts[1]
        reads = (n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        return isinstance(count, ast.Name) and all(name.id != count.id for name in reads)
    return False


def _names(tree: ast.AST) -> Iterator[str]:
    """Identifiers, attributes, keywords and strings below a node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
