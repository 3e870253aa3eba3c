"""A double of the host contract of Miles, or Miles itself where ``MILES_SRC`` points to a checkout of it.

A `Problem` is a batch seen whole: full logits of every sample, full responses, what the samplers recorded.
`local_logits` and `make_batch` make of it what one rank of Miles would hold, by building the local stream of token
positions as a loader does (pad, cut into chunks, concatenate) and never by the offsets that the adapter computes.
`loss_function` is the dispatcher.
"""

from __future__ import annotations

import itertools
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from miles_problem import Problem, expected, make_problem

__all__ = ["Problem", "expected", "make_problem"]  # the other half, for tests that import one module

MILES_SRC = os.environ.get("MILES_SRC")
PAD_MULTIPLE = 8


@dataclass(frozen=True)
class Dimension:
    rank: int
    size: int
    group: Any = None


@dataclass(frozen=True)
class State:
    """What the adapter and the double read of Miles' parallel state."""

    tp: Dimension
    cp: Dimension
    intra_dp: Dimension
    intra_dp_cp: Dimension
    is_pp_last_stage: bool = True


def single(cp_rank: int = 0, cp_size: int = 1, last_stage: bool = True) -> State:
    """One process; a context-parallel rank of ``cp_size`` without collectives, for layouts that need none."""
    one = Dimension(0, 1)
    return State(one, Dimension(cp_rank, cp_size), one, Dimension(cp_rank, cp_size), last_stage)


def install(state: State) -> None:
    """Make ``state`` what the adapter finds as Miles' parallel state."""
    if MILES_SRC:
        _install_real(state)
        return
    names = ("miles", "miles.backends", "miles.backends.training_utils")
    for name in names:
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = []  # type: ignore[attr-defined]
    module = ModuleType("miles.backends.training_utils.parallel")
    module.get_parallel_state = lambda: state  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


DROPS_COUNT = """
class Actor:
    def _train_step(self, batch, step_id, num_microbatches):
        logits = self.model(batch)
        loss, count, log = loss_function(
            args=self.args, batch=batch, logits=logits, apply_megatron_loss_scaling=False
        )
        loss.backward()
        return log
"""


def install_trainer(monkeypatch: Any, folder: Path, text: str = DROPS_COUNT) -> None:
    """Make ``text`` the source of the torch-native training step that the adapter finds as Miles'."""
    path = folder / "backends" / "fsdp_utils" / "actor.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    miles = sys.modules["miles"]
    monkeypatch.setattr(miles, "__path__", [str(folder), *miles.__path__])


def _install_real(state: State) -> None:
    if MILES_SRC not in sys.path:
        sys.path.insert(0, str(MILES_SRC))
    from miles.backends.training_utils import parallel

    make = lambda d: parallel.GroupInfo(rank=d.rank, size=d.size, group=d.group)
    one = Dimension(0, 1)
    dims = {"tp": state.tp, "cp": state.cp, "intra_dp": state.intra_dp, "intra_dp_cp": state.intra_dp_cp}
    dims |= {name: one for name in ("pp", "ep", "etp", "indep_dp")}
    known = parallel.ParallelState.__dataclass_fields__
    real = parallel.ParallelState(
        **{name: make(d) for name, d in dims.items() if name in known},
        is_pp_last_stage=state.is_pp_last_stage,
    )
    setter = parallel.set_parallel_state
    setter(real)


def make_args(**overrides: Any) -> Namespace:
    """Miles' arguments as far as a custom loss and its dispatcher read them."""
    defaults: dict[str, Any] = {
        "loss_type": "custom_loss",
        "custom_loss_function_path": "offpolicy_corr.integrations.miles.policy_loss",
        "offpolicy_corr": {},
        "qkv_format": "thd",
        "allgather_cp": False,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "use_rollout_logprobs": True,
        "advantage_estimator": "grpo",
        "entropy_coef": 0.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.0,
        "kl_loss_type": "k1",
        "calculate_per_token_loss": False,
        "recompute_loss_function": False,
        "global_batch_size": 8,
        "use_dynamic_global_batch_size": False,
        "true_on_policy_mode": False,
        "multi_lora": False,
    }
    return Namespace(**{**defaults, **overrides})


def stream(problem: Problem, args: Namespace, state: State, spare: int = 3) -> list[Tensor]:
    """Per row of the local logits the (sample, position) it holds, [rows, 2] int64, padding as −1.

    One tensor for thd, one for each sample for bshd.
    """
    rank, size = state.cp.rank, state.cp.size
    longest = max(problem.totals)
    bshd = args.qkv_format == "bshd"
    padded = -(-(longest + spare) // PAD_MULTIPLE) * PAD_MULTIPLE if bshd else None
    whole = [
        torch.stack([torch.full((n,), i, dtype=torch.int64), torch.arange(n)], 1)
        for i, n in enumerate(problem.totals)
    ]

    def fill(rows: Tensor, length: int) -> Tensor:
        return torch.cat([rows, torch.full((length - len(rows), 2), -1, dtype=torch.int64)])

    if args.allgather_cp and size > 1:
        if bshd:
            return [fill(rows, padded).chunk(size)[rank] for rows in whole]
        joined = torch.cat(whole)
        length = -(-len(joined) // (PAD_MULTIPLE * size)) * PAD_MULTIPLE * size
        return [fill(joined, length).chunk(size)[rank]]
    local = []
    for rows in whole:
        if size == 1:
            local.append(fill(rows, padded) if bshd else rows)
            continue
        chunks = fill(rows, -(-(padded or len(rows)) // (2 * size)) * 2 * size).chunk(2 * size)
        local.append(torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]))
    if bshd:
        return local
    joined = torch.cat(local)
    return [fill(joined, -(-(len(joined) + spare) // PAD_MULTIPLE) * PAD_MULTIPLE)]


def max_seq_len(problem: Problem, spare: int = 3) -> int:
    return -(-(max(problem.totals) + spare) // PAD_MULTIPLE) * PAD_MULTIPLE


def local_logits(
    problem: Problem,
    leaves: list[Tensor],
    args: Namespace,
    state: State,
    pad_columns: int = 0,
    fill: float = 7.5,
) -> Tensor:
    """This rank's logits, differentiable in ``leaves``; rows of padding and pad columns hold ``fill``."""
    width = -(-(problem.vocab + pad_columns) // state.tp.size) * state.tp.size
    table = torch.cat([*leaves, leaves[0].new_full((1, problem.vocab), fill)])
    table = torch.nn.functional.pad(table, (0, width - problem.vocab), value=fill)
    starts = torch.tensor([0, *problem.totals]).cumsum(0)
    rows = stream(problem, args, state)
    picked = []
    for part in rows:
        index = torch.where(part[:, 0] >= 0, starts[part[:, 0].clamp(min=0)] + part[:, 1], len(table) - 1)
        picked.append(table[index])
    columns = width // state.tp.size
    return torch.stack(picked)[..., columns * state.tp.rank : columns * (state.tp.rank + 1)].contiguous()


def zigzag(problem: Problem, values: list[Tensor], args: Namespace, state: State) -> list[Tensor]:
    """CP-local lists: every value of the response tokens whose predicting position this rank's chunks own."""
    if state.cp.size == 1:
        return [value.clone() for value in values]
    as_zigzag = Namespace(**{**vars(args), "allgather_cp": False})
    rows = torch.cat(stream(problem, as_zigzag, state))
    out = []
    for i, value in enumerate(values):
        position = rows[rows[:, 0] == i, 1] - (problem.prompts[i] - 1)
        out.append(value[position[(position >= 0) & (position < problem.responses[i])]].clone())
    return out


def make_batch(
    problem: Problem,
    args: Namespace,
    state: State,
    candidates: str = "heads",
    rollout_mask_sums: list[float] | None = None,
) -> dict[str, Any]:
    """The batch of one rank. ``candidates``: heads, supports, ids, lengths, dense, none."""
    over_support = candidates not in ("heads", "none")
    batch: dict[str, Any] = {
        "unconcat_tokens": [t.clone() for t in problem.tokens],
        "total_lengths": list(problem.totals),
        "response_lengths": list(problem.responses),
        "loss_masks": [m.clone() for m in problem.masks],
        "rollout_log_probs": zigzag(
            problem, problem.support_rollout if over_support else problem.rollout, args, state
        ),
        "ref_log_probs": zigzag(problem, problem.reference, args, state) if args.use_kl_loss else None,
        "advantages": zigzag(problem, problem.advantages, args, state),
        "max_seq_lens": [max_seq_len(problem)] * len(problem.prompts) if args.qkv_format == "bshd" else None,
    }
    if rollout_mask_sums is not None:
        batch["rollout_mask_sums"] = torch.tensor(rollout_mask_sums)
    if candidates == "heads":
        batch["rollout_topk_token_ids"] = [ids.copy() for ids in problem.head_ids]
        batch["rollout_topk_log_probs"] = [values.copy() for values in problem.head_logprobs]
    if over_support:
        batch["rollout_sampling_mask_ids"] = [ids.copy() for ids in problem.support_ids]
        batch["rollout_sampling_mask_offsets"] = [offsets.copy() for offsets in problem.support_offsets]
    if candidates == "supports":
        batch["rollout_sampling_mask_log_probs"] = [values.copy() for values in problem.support_logprobs]
    if candidates in ("lengths", "dense"):
        tables = [_dense(problem, i) for i in range(len(problem.prompts))]
        batch["rollout_topk_log_probs"] = [values for _, values in tables]
        if candidates == "dense":
            batch["rollout_topk_token_ids"] = [ids[:, ::-1].copy() for ids, _ in tables]
            batch["rollout_topk_log_probs"] = [values[:, ::-1].copy() for _, values in tables]
        else:
            batch["rollout_topk_lengths"] = [np.diff(o).astype(np.int32) for o in problem.support_offsets]
    return batch


def _dense(problem: Problem, sample: int) -> tuple[np.ndarray, np.ndarray]:
    offsets = problem.support_offsets[sample]
    width = int(np.diff(offsets).max(initial=1))
    ids = np.full((problem.responses[sample], width), -1, np.int32)
    values = np.full(ids.shape, -np.inf, np.float32)
    for t, (begin, end) in enumerate(itertools.pairwise(offsets)):
        ids[t, : end - begin] = problem.support_ids[sample][begin:end]
        values[t, : end - begin] = problem.support_logprobs[sample][begin:end]
    return ids, values


def make_reducer(
    batch: dict[str, Any], args: Namespace, state: State, problem: Problem
) -> Callable[[Tensor], Tensor]:
    """Miles' reducer: Σ over samples of Σ x·mask / max(denominator, 1), or Σ x·mask per token."""
    if MILES_SRC:
        return _real_reducer(batch, args)
    masks = zigzag(problem, batch["loss_masks"], args, state)
    sums = batch.get("rollout_mask_sums")
    denominators = [m.sum() for m in batch["loss_masks"]] if sums is None else list(sums)
    lengths = [len(m) for m in masks]

    def reduce(x: Tensor) -> Tensor:
        parts = x.split(lengths)
        if args.calculate_per_token_loss:
            return sum((x_i * m).sum() for x_i, m in zip(parts, masks, strict=True))  # type: ignore[return-value]
        return sum(
            (x_i * m).sum() / d.clamp(min=1) for x_i, m, d in zip(parts, masks, denominators, strict=True)
        )  # type: ignore[return-value]

    return reduce


def _real_reducer(batch: dict[str, Any], args: Namespace) -> Callable[[Tensor], Tensor]:
    import inspect

    get = real("get_sum_of_sample_mean")
    more = {}
    if "denominators" in inspect.signature(get).parameters:
        more["denominators"] = batch.get("rollout_mask_sums")
    elif batch.get("rollout_mask_sums") is not None:
        import pytest

        pytest.skip("this Miles has no per-rollout denominators")
    return get(
        batch["total_lengths"],
        batch["response_lengths"],
        batch["loss_masks"],
        args.calculate_per_token_loss,
        args.qkv_format,
        batch.get("max_seq_lens"),
        **more,
    )


def real(name: str) -> Any:
    """A function of the real Miles, in either module layout."""
    from importlib import import_module

    homes = ("loss.objective", "loss", "data.context_parallel", "cp_utils")
    for home in homes:
        try:
            return getattr(import_module(f"miles.backends.training_utils.{home}"), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"no home of Miles has {name}")


def loss_function(
    args: Namespace,
    batch: dict[str, Any],
    num_microbatches: int,
    logits: Tensor,
    state: State,
    problem: Problem,
    megatron: bool = True,
    num_rollouts: int | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The dispatcher: the custom loss, then the scaling of each backend. Miles' own with ``MILES_SRC``."""
    if MILES_SRC:
        import inspect

        call = real("loss_function")
        more = {} if num_rollouts is None else {"num_rollouts": num_rollouts}
        if num_rollouts is not None and "num_rollouts" not in inspect.signature(call).parameters:
            args = Namespace(**{**vars(args), "global_batch_size": num_rollouts})
            more = {}
        return call(args, batch, num_microbatches, logits, apply_megatron_loss_scaling=megatron, **more)
    from offpolicy_corr.integrations.miles import policy_loss

    reducer = make_reducer(batch, args, state, problem)
    call_args = (args, batch, logits, reducer)
    if args.recompute_loss_function:
        loss, metrics = checkpoint(policy_loss, *call_args, use_reentrant=False)
    else:
        loss, metrics = policy_loss(*call_args)
    if state.cp.size > 1 and args.allgather_cp:
        loss = loss + 0 * logits.sum(dtype=torch.float32)
    tokens = sum(m.sum().clamp(min=1) for m in batch["loss_masks"])
    normalizer = num_rollouts or args.global_batch_size
    if not args.calculate_per_token_loss:
        parallel = state.intra_dp_cp.size * num_microbatches if megatron else state.intra_dp.size
        loss = loss / normalizer * parallel
    elif megatron:
        loss = loss * state.cp.size
    count = tokens if args.calculate_per_token_loss else len(batch["response_lengths"])
    values = torch.tensor([float(count), *(float(v) for v in metrics.values())])
    return (
        loss,
        torch.as_tensor(tokens if args.calculate_per_token_loss else 1),
        {"keys": list(metrics), "values": values},
    )


def make_leaves(problem: Problem) -> list[Tensor]:
    return [logits.clone().requires_grad_() for logits in problem.logits]


def fake_group_state(tp: int, cp: int) -> State:
    """TP × CP groups over the default process group, TP ranks adjacent."""
    rank = dist.get_rank()
    tp_groups = [dist.new_group([c * tp + t for t in range(tp)]) for c in range(cp)]
    cp_groups = [dist.new_group([c * tp + t for c in range(cp)]) for t in range(tp)]
    tp_rank, cp_rank = rank % tp, rank // tp
    return State(
        Dimension(tp_rank, tp, tp_groups[cp_rank]),
        Dimension(cp_rank, cp, cp_groups[tp_rank]),
        Dimension(0, 1),
        Dimension(cp_rank, cp, cp_groups[tp_rank]),
    )


def one_sample(
    rows: list[list[float]],
    tokens: list[int],
    rollout: list[float],
    args: Any,
    masks: list[int] | None = None,
    advantages: list[float] | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """One prompt token, then one response token for each row of logits. Returns loss, metrics, gradient."""
    from offpolicy_corr.integrations.miles import policy_loss

    install(single())
    size = len(tokens)
    logits = torch.tensor([[*rows, [0.0] * len(rows[0])]], dtype=torch.float64, requires_grad=True)
    batch: dict[str, Any] = {
        "unconcat_tokens": [torch.tensor([0, *tokens])],
        "total_lengths": [size + 1],
        "response_lengths": [size],
        "loss_masks": [torch.tensor(masks or [1] * size, dtype=torch.int32)],
        "rollout_log_probs": [torch.tensor(rollout)],
        "advantages": [torch.tensor(advantages or [1.0] * size)],
        **extra,
    }
    mask = batch["loss_masks"][0]
    loss, metrics = policy_loss(args, batch, logits, lambda x: (x * mask).sum() / mask.sum().clamp(min=1))
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), metrics, gradient[0]


def plain(name: str = "none", **more: Any) -> Any:
    own = {"correction": name, **more.pop("own", {})}
    return make_args(offpolicy_corr=own, **more)
