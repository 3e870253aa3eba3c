"""Benchmark: what the compiler makes of the kernels, and what a roofline predicts from it. Needs no GPU.

Every configuration that the library can launch is a point on the axes below. It is compiled ahead of time for real
architectures and read back from its machine code: registers, local memory, widths of accesses, issue slots per logit of
each pass. (`tests/aot_configurations.py` picks configurations in which all pairs, or triples, of choices occur.)
"""

# Triton has no types
# mypy: disable-error-code="import-untyped"
from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from offpolicy_corr.kernels.launch import CONFIGURATIONS, ODD, ONCE, SHORT, TWICE, Tiles

TARGETS = (80, 90, 100)
# issue slots per bf16 logit of both sweeps, the entropy that diagnostics report included
SLOT_BUDGET = {80: 15.0, 90: 15.25, 100: 14.25}
BONUS_BUDGET = {80: 17.0, 90: 17.25, 100: 17.25}  # the same, with an entropy bonus in the gradient
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# what a launch can be; the first value of each axis is what most launches have
AXES: dict[str, tuple[Any, ...]] = {
    "dtype": ("bf16", "fp16", "fp32"),
    "rule": (0, 1, 2, 3, 4, 5),
    "kl": (0, 1, 2, 3, 4),
    "center": (True, False),
    "entropy": (False, True),
    "candidates": ("scored", "ids", "none"),
    "mask": (True, False),
    "gradient": (True, False),
    "sharded": (False, True),
    "rows": ("long", "short"),
    "layout": ("aligned", "odd stride", "transposed"),
    "inputs": ("usual", "other"),
}
# what inputs may also be, besides int64 tokens, int32 ids and fp32 log-probs
_OTHER_INPUTS = {
    "tokens": "i32",
    "ids": "i64",
    "logq": "fp64",
    "ref_logprobs": "fp64",
    "candidate_logq": "fp64",
}


@dataclass(frozen=True)
class Configuration:
    """One compiled variant: a kernel, the types of its arguments, its constants, which arguments are absent."""

    kernel: str
    label: str
    dtype: str
    signature: dict[str, str] = field(hash=False)
    constants: dict[str, Any] = field(hash=False)
    options: dict[str, Any] = field(hash=False)
    aligned: bool = True

    @property
    def columns(self) -> int:
        """Of a tile."""
        return int(self.constants["BLOCK"])

    @property
    def per_thread(self) -> float:
        """Columns of a tile that a thread handles."""
        return float(self.columns / (32 * self.options["num_warps"]))


@dataclass(frozen=True)
class Figures:
    """Machine code of one configuration for one architecture."""

    target: int
    registers: int
    stack_bytes: int
    local_in_loops: int
    shared_bytes: int
    sweep_widths: tuple[int, ...]  # bits, of the global accesses in the sweeps' main loops
    sweeps: tuple[float, ...]  # issue slots per logit of each main loop, in program order
    ex2: float  # per logit, over all sweeps

    @property
    def slots(self) -> float:
        return sum(self.sweeps)


def fused(dtype: str = "bf16", **choices: Any) -> Configuration:
    """The configuration of `fused_loss` for one choice on each axis; what is left out takes the first."""
    pick = {name: values[0] for name, values in AXES.items()} | {"rule": 3} | choices
    if pick["candidates"] != "scored":
        pick["center"] = False  # refused before anything is launched
    absent = set()
    if not pick["kl"]:
        absent.add("ref_logprobs")
    if not pick["mask"]:
        absent.add("trained")
    if not pick["gradient"]:
        absent.add("gradient")
    if not pick["sharded"]:
        absent.add("row_stats")
    if pick["candidates"] == "none":
        absent |= {"ids", "offsets", "complete", "candidate_logits"}
    if pick["candidates"] != "scored":
        absent |= {"candidate_logq", "sampler_tail"}
    constants = {
        "RULE": pick["rule"],
        "KL": pick["kl"],
        "CENTER": pick["center"],
        "ENTROPY": pick["entropy"],
        "EXACT_TAIL": pick["center"] and pick["rule"] in (0, 4),
    }
    label = " ".join(f"{name}={value}" for name, value in choices.items()) or "default"
    twice = pick["gradient"] and not pick["sharded"]
    return configuration(
        "fused_loss", label, dtype, tiles_of(pick, twice), pick["layout"], constants, absent, pick["inputs"]
    )


def tiles_of(pick: dict[str, Any], twice: bool) -> Tiles:
    """What `launch.tiles_for` picks, or one of its `CONFIGURATIONS` by name."""
    if "tiles" in pick:
        return CONFIGURATIONS[pick["tiles"]]
    if pick["rows"] == "short":
        return SHORT
    return ODD if pick["layout"] != "aligned" else TWICE if twice else ONCE


def configuration(
    kernel: str,
    label: str,
    dtype: str,
    tiles: Tiles,
    layout: str,
    constants: dict[str, Any],
    absent: set[str],
    inputs: str = "usual",
) -> Configuration:
    """One variant of ``kernel`` with these tiles, constants and absent arguments."""
    pointers = {
        "logits": dtype, "gradient": dtype, "tokens": "i64", "trained": "i1", "scale": "fp64", "ids": "i32",
        "offsets": "i64", "complete": "i1", "token_is_candidate": "i1",
    }  # fmt: skip
    if inputs == "other":
        pointers |= _OTHER_INPUTS
    integers = (
        "rows", "row_stride", "column_stride", "out_row_stride", "out_column_stride", "width", "first_id",
        "upstream_stride",
    )  # fmt: skip
    floats = (
        "tail_floor", "entropy_coef", "kl_coef", "low", "high", "log_low", "log_high", "tail_low", "tail_high",
    )  # fmt: skip
    transposed = layout == "transposed"
    launched = tiles.options(DTYPES[dtype], not transposed) | tiles.lanes(DTYPES[dtype])
    constants = constants | launched | {"K_BLOCK": tiles.candidates}
    if not transposed:  # integers equal to 1 are constants at launch
        constants |= {"column_stride": 1, "out_column_stride": 1}
    signature = {}
    for name in _kernels()[kernel].arg_names:
        if name in absent:
            constants[name] = None
        elif name in integers:
            signature[name] = "i32"
        elif name in floats:
            signature[name] = "fp32"
        elif name not in constants:
            signature[name] = "*" + pointers.get(name, "fp32")
    known = {name: value for name, value in constants.items() if name in _kernels()[kernel].arg_names}
    signature = {name: kind for name, kind in signature.items() if name not in known}
    aligned = layout == "aligned"
    options = {
        name: value for name, value in launched.items() if name in ("num_warps", "num_stages", "maxnreg")
    }
    return Configuration(kernel, label, dtype, signature, known, options, aligned)


def _kernels() -> dict[str, Any]:
    from offpolicy_corr.kernels import fused_loss, rescale, single_pass

    return {
        "fused_loss": fused_loss.fused_loss,
        "row_stats": single_pass.row_stats,
        "row_gradient": single_pass.row_gradient,
        "scale_rows": rescale.scale_rows,
    }


def main_configurations() -> list[Configuration]:
    """The variants that most steps of most runs launch."""
    found = [fused(), fused(entropy=True), fused(rule=0), fused("fp32"), fused(sharded=True)]
    for dtype in ("bf16", "fp32"):
        found.append(configuration("row_stats", "default", dtype, ONCE, "aligned", {}, {"sampler_tail"}))
        found.append(
            configuration("row_gradient", "default", dtype, ONCE, "aligned", {"SLOPED": False}, {"slopes"})
        )
        found.append(configuration("scale_rows", "default", dtype, ONCE, "aligned", {}, set()))
    return found


def compile_for(configuration: Configuration, target: int) -> Any:
    """The compiled kernel, as a launch on that architecture would compile it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = _kernels()[configuration.kernel]
    names = list(kernel.arg_names)
    types = {n: configuration.signature.get(n, "constexpr") for n in names}
    divisible = [n for n, kind in configuration.signature.items() if kind.startswith("*")]
    if configuration.aligned:
        divisible += [n for n in ("row_stride", "out_row_stride") if n in configuration.signature]
    hints = {(names.index(n),): [["tt.divisibility", 16]] for n in divisible}
    constants = configuration.constants
    source = ASTSource(kernel, types, constants, hints)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=configuration.options)


def figures(configuration: Configuration, target: int) -> Figures:
    """Compile and read the machine code."""
    compiled = compile_for(configuration, target)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", str(cubin))
        code, loops = _read(_tool("nvdisasm", "-c", str(cubin)))
    resource = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    lanes = configuration.per_thread
    bodies = [code[start : end + 1] for start, end in loops]
    # a sweep touches a whole tile per turn: as many bits as the tile has, per thread
    sweeps = [
        body
        for body in bodies
        if _bits(body) >= lanes * 8 * DTYPES[configuration.dtype].itemsize and _moves(body, "LDG")
    ]
    return Figures(
        target,
        resource["REG"],
        max(resource.get("STACK", 0), resource.get("LOCAL", 0)),
        sum(op.startswith(("LDL", "STL")) for body in bodies for op in body),
        compiled.metadata.shared,
        tuple(sorted({_width(op) for body in sweeps for op in body if op.startswith(("LDG", "STG"))})),
        tuple(len(body) / lanes for body in sweeps),
        sum(op.startswith("MUFU.EX2") for body in sweeps for op in body) / lanes,
    )


def _tool(name: str, *arguments: str) -> str:
    """cuobjdump and nvdisasm come with Triton."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


def _read(listing: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Opcodes of a listing, and first and last position of its innermost loops."""
    code: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([^;]+?)\s*;", line):
            code.append(instruction[1].split()[0])
            if jump := re.search(r"\bBRA\b.*`\((\.L\w+)\)", instruction[1]):
                jumps.append((len(code) - 1, jump[1]))
    back = {(labels[name], at) for at, name in jumps if labels.get(name, at) < at}
    inner = [a for a in back if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in back)]
    return code, sorted(inner)


def _width(op: str) -> int:
    parts = op.split(".")
    for bits in ("256", "128", "64"):
        if bits in parts:
            return int(bits)
    return 16 if "U16" in parts else 8 if "U8" in parts else 32


def _bits(body: list[str]) -> int:
    counts = Counter(_width(op) for op in body if op.startswith("LDG"))
    return sum(bits * count for bits, count in counts.items())


def _moves(body: list[str], kind: str) -> bool:
    return any(op.startswith(kind) for op in body)


def require_compiler() -> None:
    """Raises RuntimeError where kernels were bound to the interpreter, which cannot compile them."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")
