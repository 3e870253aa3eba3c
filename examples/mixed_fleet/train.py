"""Training: supervised warm-up on demonstrations, then reinforcement learning on the fleet's rollouts.

The trainer computes in fp32. Every sampler, BF16 ones included, therefore differs from it in precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3ForCausalLM

import offpolicy_corr as oc

from .fleet import MIXED_FLEET, Fleet, Rollouts, SamplerGroup, Sampling, generate
from .model import build_model, response_logits
from .task import Task

BAND = (0.2, 5.0)
"""The diagnostic band: ratios outside it are counted, whatever the correction does about them."""


@dataclass(frozen=True)
class Warmup:
    """Supervised training on demonstrations: Adam, linear rise over 50 steps, then linear fall to zero."""

    steps: int = 1000
    batch: int = 128
    learning_rate: float = 4e-3


@dataclass(frozen=True)
class Arm:
    """One reinforcement-learning run.

    Attributes:
        name: as printed.
        correction: a name that `oc.Correction.from_name` knows.
        top_p: below 1, samplers truncate and the trainer replays their sets.
        placebo: give every token the same advantage of one and ignore rewards, instead of group-mean
            advantages.
        groups: the sampler fleet.
    """

    name: str
    correction: str
    top_p: float = 1.0
    placebo: bool = False
    groups: tuple[SamplerGroup, ...] = MIXED_FLEET


@dataclass(frozen=True)
class Budget:
    """What every arm of an experiment gets.

    Attributes:
        steps: updates.
        prompts: prompts per update.
        samples: responses per prompt.
        learning_rate: constant, after a linear rise over the first ten updates.
        optimizer: "adam" or "sgd".
        evaluate_every: updates between evaluations.
    """

    steps: int
    prompts: int
    samples: int
    learning_rate: float
    optimizer: str = "adam"
    evaluate_every: int = 5


@dataclass
class History:
    """Curves of one arm.

    Attributes:
        updates: one row of numbers per update.
        evaluations: what `evaluate` found, with the number of updates made before.
        groups: totals of the run for each sampler group: tokens, tokens out of band, and the sum of their k3.
    """

    updates: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    groups: dict[str, dict[str, float]] = field(default_factory=dict)

    def add_update(self, update: int, numbers: dict[str, float], groups: tuple[SamplerGroup, ...]) -> None:
        """Append a row, and move the per-group numbers of `oc.metrics.summarize` into the totals."""
        for group in groups:
            prefix = f"group/{group.name}/"
            tokens = numbers.get(prefix + "tokens", 0.0)
            if not tokens:
                continue
            total = self.groups.setdefault(group.name, {"tokens": 0.0, "out_of_band": 0.0, "kl_k3": 0.0})
            total["tokens"] += tokens
            total["out_of_band"] += tokens * numbers[prefix + "out_of_band"]
            total["kl_k3"] += tokens * numbers[prefix + "kl_k3"]
        row = {name: value for name, value in numbers.items() if not name.startswith("group/")}
        self.updates.append({"update": update, **row})


def new_model(task: Task, seed: int) -> Qwen3ForCausalLM:
    """A fresh model of the right size for `task`."""
    return build_model(task.vocab_size, task.prompt_length + task.response_length, seed)


def warm_up(
    task: Task, settings: Warmup, seed: int, progress: Callable[[int], None] | None = None
) -> Qwen3ForCausalLM:
    """Train a model from scratch on demonstrations, calling `progress(1)` after every step."""
    model, generator = new_model(task, seed), torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min((step + 1) / 50, 1 - step / settings.steps)
        sequences = task.demonstrations(settings.batch, generator)
        logits = response_logits(model, sequences, task.prompt_length)
        loss = F.cross_entropy(logits.flatten(0, 1), sequences[:, task.prompt_length :].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if progress is not None:
            progress(1)
    return model


def sampler_record(rollouts: Rollouts, groups: tuple[SamplerGroup, ...]) -> oc.SamplerRecord:
    """Pack padded rollouts into the library's record of T tokens, in row order, padding left out."""
    mask = rollouts.mask
    ids, logprobs = rollouts.candidate_ids[mask], rollouts.candidate_logprobs[mask]
    if rollouts.complete:
        present = ids >= 0
        offsets = F.pad(present.sum(dim=1).cumsum(dim=0), (1, 0))
        candidates = oc.CandidateSet.from_support(ids[present], offsets, logprobs[present])
    else:
        candidates = oc.CandidateSet.from_topk(ids, logprobs)
    length = mask.sum(dim=1)
    return oc.SamplerRecord(
        tokens=rollouts.responses[mask],
        logprobs=rollouts.logprobs[mask],
        candidates=candidates,
        group=rollouts.group.repeat_interleave(length),
        group_names=tuple(group.name for group in groups),
        weight_version=rollouts.version.repeat_interleave(length),
    )


@torch.no_grad()
def evaluate(
    model: Qwen3ForCausalLM, initial: Qwen3ForCausalLM, task: Task, problems: Tensor
) -> dict[str, float]:
    """Judge the trained policy itself on held-out problems: fp32, temperature 1, no fleet, no truncation.

    Returns:
        `reward` (share right), `format_errors`, `entropy` over the vocabulary and `moved`, the KL of the
        initial policy from this one, both in nats per token. Same problems and same random numbers at every
        call.
    """
    rollouts = generate(
        model, problems, task.response_length, Sampling(), torch.Generator().manual_seed(4), fp8_cache=False
    )
    right, formatted = task.reward(problems, rollouts.responses)
    sequences = torch.cat([problems, rollouts.responses], dim=1)
    logp = response_logits(model, sequences, task.prompt_length)[rollouts.mask].log_softmax(-1)
    logp_initial = response_logits(initial, sequences, task.prompt_length)[rollouts.mask].log_softmax(-1)
    return {
        "reward": right.mean().item(),
        "format_errors": 1 - formatted.float().mean().item(),
        "entropy": -(logp.exp() * logp).sum(-1).mean().item(),
        "moved": (logp.exp() * (logp - logp_initial)).sum(-1).mean().item(),
    }


def update(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    groups: tuple[SamplerGroup, ...],
    advantages: Tensor,
    correction: str,
) -> dict[str, float]:
    """One optimizer step on one batch; returns the library's summary of it, and the gradient norm.

    Args:
        model: the trainer's model.
        optimizer: its optimizer.
        rollouts: B responses of all groups.
        groups: the fleet's groups.
        advantages: float [B].
        correction: its name.
    """
    record = sampler_record(rollouts, groups)
    sequences = torch.cat([rollouts.prompts, rollouts.responses], dim=1)
    logits = response_logits(model, sequences, rollouts.prompts.shape[1])[rollouts.mask]
    token_advantages = advantages.repeat_interleave(rollouts.mask.sum(dim=1))
    out = oc.policy_loss(logits, record, token_advantages, correction=correction)
    optimizer.zero_grad()
    out.loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step()
    return {**oc.metrics.summarize(out.diagnostics, record, band=BAND), "gradient_norm": norm.item()}


def run_arm(
    arm: Arm,
    budget: Budget,
    task: Task,
    weights: dict[str, Tensor],
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> History:
    """Reinforcement learning of the warmed-up model; calls `progress(1)` after every update."""
    initial, model = new_model(task, 0), new_model(task, 0)
    initial.load_state_dict(weights)
    model.load_state_dict(weights)
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[budget.optimizer]
    optimizer = kind(model.parameters(), lr=budget.learning_rate)
    fleet = Fleet(arm.groups, task.vocab_size, task.prompt_length + task.response_length, seed)
    problems = torch.Generator().manual_seed(seed * 1009 + 501)
    held_out = task.problems(512, torch.Generator().manual_seed(5))
    sampling, history = Sampling(top_p=arm.top_p), History()
    for step in range(budget.steps):
        fleet.publish(model)
        if step % budget.evaluate_every == 0:
            history.evaluations.append({"update": step, **evaluate(model, initial, task, held_out)})
        prompts = task.problems(budget.prompts, problems).repeat_interleave(budget.samples, dim=0)
        rollouts, row = fleet.sample(prompts, task.response_length, sampling)
        rewards, _ = task.reward(rollouts.prompts, rollouts.responses)
        advantages = oc.group_advantages(rewards, row // budget.samples, normalize=False)
        if arm.placebo:
            advantages = torch.ones_like(advantages)
        for group in optimizer.param_groups:
            group["lr"] = budget.learning_rate * min(1.0, (step + 1) / 10)
        summary = update(model, optimizer, rollouts, arm.groups, advantages, arm.correction)
        history.add_update(step, {"sampler_reward": rewards.mean().item(), **summary}, arm.groups)
        if progress is not None:
            progress(1)
    history.evaluations.append({"update": budget.steps, **evaluate(model, initial, task, held_out)})
    return history
