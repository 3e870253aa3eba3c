"""A double of the host contract of Miles, or Miles itself where ``MILES_SRC`` points to a checkout of it.

A `Problem` is a batch seen whole: full logits of every sample, full responses, what the samplers recorded. `pack`
makes of it what one rank of Miles would hold, by building the local stream of token positions as a loader does (pad,
cut into chunks, concatenate) and never by the offsets that the adapter computes. `loss_function` is the dispatcher.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import offpolicy_corr as oc

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
        sys.modules.setdefault(name, ModuleType(name)).__path__ = []  # type: ignore[attr-defined]
    module = ModuleType("miles.backends.training_utils.parallel")
    module.get_parallel_state = lambda: state  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def _install_real(state: State) -> None:
    if MILES_SRC not in sys.path:
        sys.path.insert(0, str(MILES_SRC))
    from miles.backends.training_utils import parallel

    make = lambda d: parallel.GroupInfo(rank=d.rank, size=d.size, group=d.group)  # noqa: E731
    one = Dimension(0, 1)
    dims = {"tp": state.tp, "cp": state.cp, "intra_dp": state.intra_dp, "intra_dp_cp": state.intra_dp_cp}
    dims |= {name: one for name in ("pp", "ep", "etp", "indep_dp")}
    known = parallel.ParallelState.__dataclass_fields__
    real = parallel.ParallelState(
        **{name: make(d) for name, d in dims.items() if name in known}, is_pp_last_stage=state.is_pp_last_stage
    )
    setter = getattr(parallel, "set_parallel_state")
    setter(real)


@dataclass
class Problem:
    """A micro-batch seen whole. Lists have one entry per sample; per-token entries cover the full response."""

    prompts: list[int]
    responses: list[int]
    vocab: int
    logits: list[Tensor]  # [total, V], raw, before temperature
    tokens: list[Tensor]  # [total]
    masks: list[Tensor]  # [response]
    rollout: list[Tensor]  # [response], log q
    advantages: list[Tensor]
    reference: list[Tensor]
    head_ids: list[np.ndarray]  # [response, K], −1 unused
    head_logprobs: list[np.ndarray]
    support_ids: list[np.ndarray]
    support_offsets: list[np.ndarray]
    support_logprobs: list[np.ndarray]
    support_rollout: list[Tensor]  # log q over the support

    @property
    def totals(self) -> list[int]:
        return [p + r for p, r in zip(self.prompts, self.responses, strict=True)]


def make_problem(
    seed: int = 0,
    prompts: tuple[int, ...] = (3, 2, 5),
    responses: tuple[int, ...] = (6, 9, 4),
    vocab: int = 23,
    head: int = 4,
    temperature: float = 1.0,
    noise: float = 0.4,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Random trainer and sampler policies that differ by ``noise`` in the logits; tool tokens masked, garbage there."""
    g = torch.Generator().manual_seed(seed)
    p = Problem(list(prompts), list(responses), vocab, *([] for _ in range(12)))  # type: ignore[arg-type]
    for prompt, response in zip(prompts, responses, strict=True):
        total = prompt + response
        logits = torch.randn(total, vocab, generator=g, dtype=torch.float64) * 1.5
        sampler = logits + noise * torch.randn(total, vocab, generator=g, dtype=torch.float64)
        logq = (sampler / temperature).log_softmax(-1)[prompt - 1 : total - 1]
        ids, lengths, support_logq = [], [], []
        order = logq.argsort(-1, descending=True)
        drawn = []
        for t in range(response):
            size = 1 + int(torch.randint(0, 6, (), generator=g))
            support = order[t, :size]
            over_s = logq[t, support].log_softmax(0)
            pick = int(torch.multinomial(over_s.exp(), 1, generator=g))
            drawn.append(int(support[pick]))
            ids.append(support.numpy().astype(np.int32))
            lengths.append(size)
            support_logq.append(over_s.float().numpy())
        drawn_t = torch.tensor(drawn, dtype=torch.int64)
        mask = (torch.rand(response, generator=g) > 0.2).int()
        mask[0] = 1
        rollout = logq.gather(1, drawn_t[:, None]).squeeze(1) if response else torch.zeros(0)
        over = [float(l[list(i).index(d)]) for l, i, d in zip(support_logq, ids, drawn, strict=True)]
        garbage = torch.tensor([float("nan"), 0.0, float("-inf"), -9999.0])[torch.arange(response) % 4]
        prompt_ids = torch.randint(0, vocab, (prompt,), generator=g)
        p.logits.append(logits.to(dtype))
        p.tokens.append(torch.cat([prompt_ids, drawn_t]))
        p.masks.append(mask)
        p.rollout.append(torch.where(mask.bool(), rollout.float(), garbage))
        p.support_rollout.append(torch.where(mask.bool(), torch.tensor(over), garbage))
        p.advantages.append(torch.randn((), generator=g).expand(response).float().clone())
        p.reference.append(rollout.float() + 0.1 * torch.randn(response, generator=g))
        top = order[:, :head].numpy().astype(np.int32)
        values = np.take_along_axis(logq.numpy(), top.astype(np.int64), 1).astype(np.float32)
        tool = mask.numpy() == 0
        top[tool], values[tool] = -1, -np.inf
        p.head_ids.append(top)
        p.head_logprobs.append(values)
        p.support_ids.append(np.concatenate([np.zeros(0, np.int32), *ids]))
        p.support_offsets.append(np.cumsum([0, *lengths]).astype(np.int64))
        p.support_logprobs.append(np.concatenate([np.zeros(0, np.float32), *support_logq]))
    return p


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
        torch.stack([torch.full((n,), i, dtype=torch.int64), torch.arange(n)], 1) for i, n in enumerate(problem.totals)
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
    problem: Problem, leaves: list[Tensor], args: Namespace, state: State, pad_columns: int = 0, fill: float = 7.5
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
        "rollout_log_probs": zigzag(problem, problem.support_rollout if over_support else problem.rollout, args, state),
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
    for t, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        ids[t, : end - begin] = problem.support_ids[sample][begin:end]
        values[t, : end - begin] = problem.support_logprobs[sample][begin:end]
    return ids, values


def make_reducer(batch: dict[str, Any], args: Namespace, state: State, problem: Problem) -> Callable[[Tensor], Tensor]:
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
        return sum((x_i * m).sum() / d.clamp(min=1) for x_i, m, d in zip(parts, masks, denominators, strict=True))  # type: ignore[return-value]

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
    normaliser = num_rollouts or args.global_batch_size
    if not args.calculate_per_token_loss:
        parallel = state.intra_dp_cp.size * num_microbatches if megatron else state.intra_dp.size
        loss = loss / normaliser * parallel
    elif megatron:
        loss = loss * state.cp.size
    count = tokens if args.calculate_per_token_loss else len(batch["response_lengths"])
    values = torch.tensor([float(count), *(float(v) for v in metrics.values())])
    return loss, torch.as_tensor(tokens if args.calculate_per_token_loss else 1), {"keys": list(metrics), "values": values}


def make_leaves(problem: Problem) -> list[Tensor]:
    return [logits.clone().requires_grad_() for logits in problem.logits]


def expected(
    problem: Problem,
    args: Namespace,
    candidates: str = "heads",
    rollout_mask_sums: list[float] | None = None,
    **core: Any,
) -> tuple[Tensor, list[Tensor], oc.PolicyLoss]:
    """Loss and gradients of the whole micro-batch by the core in fp64, on full responses, with explicit means."""
    leaves = [logits.double().clone().requires_grad_() for logits in problem.logits]
    rows = torch.cat([leaf[p - 1 : p - 1 + r] for leaf, p, r in zip(leaves, problem.prompts, problem.responses, strict=True)])
    over_support = candidates not in ("heads", "none")
    record = oc.SamplerRecord(
        torch.cat([t[p:] for t, p in zip(problem.tokens, problem.prompts, strict=True)]),
        torch.cat(problem.support_rollout if over_support else problem.rollout).double(),
        _candidates(problem, candidates),
        args.rollout_temperature,
    )
    mask = torch.cat(problem.masks).bool()
    sums = rollout_mask_sums or [float(m.sum()) for m in problem.masks]
    weights = torch.cat(
        [
            torch.full((r,), 1.0 if args.calculate_per_token_loss else 1.0 / max(s, 1.0), dtype=torch.float64)
            for r, s in zip(problem.responses, sums, strict=True)
        ]
    )
    out = oc.policy_loss(rows, record, torch.cat(problem.advantages).double(), loss_mask=mask, reduction="none", **core)
    loss = (out.loss * torch.where(mask, weights, 0.0)).sum()
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in leaves], out


def _candidates(problem: Problem, kind: str) -> oc.CandidateSet | None:
    if kind == "none":
        return None
    sets = []
    for i in range(len(problem.prompts)):
        if kind == "heads":
            ids, values = torch.from_numpy(problem.head_ids[i]), torch.from_numpy(problem.head_logprobs[i])
            sets.append(oc.CandidateSet.from_topk(ids, values))
            continue
        values = None if kind == "ids" else torch.from_numpy(problem.support_logprobs[i])
        ids, offsets = torch.from_numpy(problem.support_ids[i]), torch.from_numpy(problem.support_offsets[i])
        sets.append(oc.CandidateSet.from_support(ids, offsets, values))
    return oc.CandidateSet.concat(sets)


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


