"""Configurations of every kernel in which any two, or three, choices occur together: few enough to compile them all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from offpolicy_corr.benchmarks import static
from offpolicy_corr.kernels import launch


def all_configurations(strength: int = 2) -> list[static.Configuration]:
    """Configurations of every kernel in which any ``strength`` choices occur together."""
    found = [static.fused(**choices) for choices in covering(static.AXES, strength)]
    axes = {name: static.AXES[name] for name in ("dtype", "mask", "rows", "layout", "inputs")}
    for choices in covering(axes | {"candidates": (True, False), "extra": (True, False)}, strength):
        absent = set() if choices["mask"] else {"trained"}
        for kernel in ("row_stats", "row_gradient"):
            missing = (
                set()
                if choices["candidates"]
                else {"ids", "offsets", "candidate_grads", "token_is_candidate", "sampler_tail"}
            )
            if kernel == "row_stats" and not choices["extra"]:
                missing |= {"sampler_tail"}
            if kernel == "row_gradient" and not choices["extra"]:
                missing |= {"slopes"}
            constants = {"SLOPED": choices["extra"]} if kernel == "row_gradient" else {}
            label = " ".join(f"{name}={value}" for name, value in choices.items())
            found.append(
                static.configuration(
                    kernel,
                    label,
                    choices["dtype"],
                    static.tiles_of(choices, twice=False),
                    choices["layout"],
                    constants,
                    absent | missing,
                    choices["inputs"],
                )
            )
    for dtype, layout in itertools.product(static.AXES["dtype"], static.AXES["layout"]):
        found.append(
            static.configuration(
                "scale_rows",
                layout,
                dtype,
                launch.ONCE if layout == "aligned" else launch.ODD,
                layout,
                {},
                set(),
            )
        )
    found += [static.fused(dtype, tiles=name) for dtype in ("bf16", "fp32") for name in launch.CONFIGURATIONS]
    return static.main_configurations() + found


def covering(axes: dict[str, tuple[Any, ...]], strength: int = 2) -> Iterator[dict[str, Any]]:
    """Choices on all axes, few of them, such that all choices of any ``strength`` axes meet in one."""
    groups = list(itertools.combinations(axes, strength))
    order = [tuple(zip(g, v, strict=True)) for g in groups for v in itertools.product(*(axes[n] for n in g))]
    missing = set(order)
    for start in order:
        if start not in missing:
            continue
        choices = dict(start)
        for name in axes:
            if name not in choices:
                trials = [choices | {name: value} for value in axes[name]]
                choices = max(trials, key=lambda trial: len(missing & _meetings(axes, trial, strength)))
        missing -= _meetings(axes, choices, strength)
        yield {name: choices[name] for name in axes}


def _meetings(axes: dict[str, Any], choices: dict[str, Any], strength: int) -> set[tuple[Any, ...]]:
    """What meets in one set of choices, on as many of the axes as it has."""
    return set(itertools.combinations([(n, choices[n]) for n in axes if n in choices], strength))
