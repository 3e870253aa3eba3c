"""The two experiments, and their budgets for a full and for a quick run."""

from __future__ import annotations

from dataclasses import dataclass

from .fleet import ON_POLICY_FLEET
from .task import Task
from .train import Arm, Budget, Warmup

TOP_P = 0.97


@dataclass(frozen=True)
class Experiment:
    """Arms that share a budget, each run once per seed."""

    name: str
    title: str
    arms: tuple[Arm, ...]
    budget: Budget
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that one run of the demo does."""

    task: Task
    warmup: Warmup
    drift: Experiment
    learning: Experiment

    @property
    def experiments(self) -> tuple[Experiment, Experiment]:
        """Both experiments, in the order of the report."""
        return self.drift, self.learning


DRIFT_ARMS = (
    Arm("on-policy control", "none", placebo=True, groups=ON_POLICY_FLEET),
    Arm("uncorrected", "none", placebo=True),
    Arm("MIS", "mis", placebo=True),
    Arm("SC", "sc", placebo=True),
    Arm("SC + MIS", "sc+mis", placebo=True),
)

LEARNING_ARMS = (
    Arm("GRPO", "none"),
    Arm("GRPO + top-p", "none", top_p=TOP_P),
    Arm("MIS", "mis"),
    Arm("SC", "sc"),
    Arm("SC + MIS", "sc+mis"),
    Arm("SC + MIS + top-p", "sc+mis", top_p=TOP_P),
)


def make_plan(quick: bool) -> Plan:
    """The full run, or a shorter one with fewer updates and one seed.

    How the settings were chosen. *Drift* uses plain SGD, because Adam blows the zero-mean noise of an unbiased
    gradient up to full-sized steps. Rate times updates is fixed by where the uncorrected arm has lost most of its
    reward. At that product, noise falls with the number of responses alone, so batches are as large as the time
    allows. *Learning* uses Adam at a rate on the verge: in trials, all arms learned much alike for a hundred updates
    at 3e-4, and at 1e-3 even SC + MIS was shaken.
    """
    if quick:
        drift = Budget(64, prompts=128, samples=8, learning_rate=0.04, optimizer="sgd", evaluate_every=8)
        learning = Budget(90, prompts=32, samples=8, learning_rate=7e-4, evaluate_every=10)
    else:
        drift = Budget(120, prompts=128, samples=8, learning_rate=0.024, optimizer="sgd", evaluate_every=10)
        learning = Budget(200, prompts=32, samples=8, learning_rate=7e-4, evaluate_every=10)
    return Plan(
        task=Task(modulus=17, operands=4, mistakes=0.3),
        warmup=Warmup(steps=1000),
        drift=Experiment("drift", "Drift: every advantage is 1", DRIFT_ARMS, drift, seeds=(1,)),
        learning=Experiment("learning", "Learning", LEARNING_ARMS, learning, seeds=(1,) if quick else (1, 2)),
    )
