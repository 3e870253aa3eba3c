"""Metrics for Miles: detached 0-d sums under a fixed, ordered set of keys.

Miles adds them over micro-batches and ranks by position and divides by rollouts (or tokens), so every metric goes
through the loss' own weights, becomes a mean, and must be there on every rank and micro-batch. Maxima and quantiles
cannot be had; an effective sample size can: ``offpolicy_corr/ratio``² / ``offpolicy_corr/ratio_squared``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offpolicy_corr.kl import kl_estimate
from offpolicy_corr.result import TokenDiagnostics

from .options import filters
from .settings import Settings

if TYPE_CHECKING:
    from .loss import Inputs

_PREFIX = "offpolicy_corr/"
LARGEST_LOG_RATIO = 20.0  # a single token must not make a mean infinite


@dataclass(frozen=True)
class Report:
    """Which metrics there are; depends on the options alone.

    Always ``loss pg_loss entropy_loss train_rollout_logprob_abs_diff train_rollout_kl`` (named as Miles' own losses
    name them; k3 of KL(sampler‖trainer)), ``kl_loss`` with a reference, and under ``offpolicy_corr/``: ``kl_k1 ratio
    ratio_squared weight kept out_of_band``; with candidates ``centering_term``, with heads ``sampler_head_mass
    trainer_head_mass sampler_tail_mass trainer_tail_mass``, with supports ``support_mass`` (the trainer's own mass of
    the support); with guards ``sequence_kept``; for every group ``group/<name>/`` ``tokens kl_k1 kept out_of_band``,
    its part of the batch's means. Ratios enter at no more than e²⁰.
    """

    band: tuple[float, float]
    kind: str
    reference: str | None
    guards: bool
    groups: tuple[str, ...]
    entropy_coef: float
    kl_coef: float

    @classmethod
    def of(cls, args: Any, settings: Settings) -> Report:
        use_kl = bool(getattr(args, "use_kl_loss", False))
        return cls(
            settings.band,
            settings.kind_of_candidates(filters(args)),
            args.kl_loss_type if use_kl else None,
            bool(settings.guards),
            settings.groups,
            float(getattr(args, "entropy_coef", 0.0) or 0.0),
            float(getattr(args, "kl_loss_coef", 0.0) or 0.0) if use_kl else 0.0,
        )

    def keys(self) -> list[str]:
        """All keys, in the order in which Miles will add their values."""
        keys = ["loss", "pg_loss", "entropy_loss"] + ([] if self.reference is None else ["kl_loss"])
        keys += ["train_rollout_logprob_abs_diff", "train_rollout_kl"]
        own = ["kl_k1", "ratio", "ratio_squared", "weight", "kept", "out_of_band"]
        if self.kind != "none":
            own.append("centering_term")
        if self.kind == "heads":
            own += ["sampler_head_mass", "trainer_head_mass", "sampler_tail_mass", "trainer_tail_mass"]
        elif self.kind == "supports":
            own.append("support_mass")
        own += ["sequence_kept"] if self.guards else []
        own += [
            f"group/{name}/{key}"
            for name in self.groups
            for key in ("tokens", "kl_k1", "kept", "out_of_band")
        ]
        return keys + [_PREFIX + key for key in own]

    def nothing(self, logits: Tensor) -> dict[str, Tensor]:
        """The same keys, all 0: for a stage that has no loss."""
        return {key: torch.zeros((), device=logits.device) for key in self.keys()}

    def of_tokens(
        self, loss: Tensor, tokens: TokenDiagnostics, inputs: Inputs, weights: Tensor, keep: Tensor | None
    ) -> dict[str, Tensor]:
        """The metrics of the held tokens. ``weights`` are those of the loss, the metrics use the reducer's own."""
        columns = self._columns(tokens, inputs, keep)
        values = torch.stack(
            [torch.where(inputs.trained, column.to(weights.dtype), 0.0) for column in columns.values()]
        )
        sums = dict(zip(columns, (values @ inputs.weights).unbind(), strict=True))
        # the loss is reported with the weights it was made with
        names = list(columns)
        trained_loss: dict[str, Tensor] = {
            name: values[names.index(name)] @ weights for name in ("entropy_loss", "kl_loss") if name in names
        }
        total = loss.detach()
        policy = total + self.entropy_coef * trained_loss["entropy_loss"]
        if "kl_loss" in trained_loss:
            policy = policy - self.kl_coef * trained_loss["kl_loss"]
        found: dict[str, Tensor] = {"loss": total, "pg_loss": policy, **sums, **trained_loss}
        return {key: found[key].detach() for key in self.keys()}

    def _columns(self, tokens: TokenDiagnostics, inputs: Inputs, keep: Tensor | None) -> dict[str, Tensor]:
        log_ratio = tokens.log_ratio
        ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
        low, high = (math.log(bound) if bound > 0 else -math.inf for bound in self.band)
        outside = (log_ratio < low) | (log_ratio > high)
        columns = {"entropy_loss": tokens.entropy}
        if self.reference is not None:
            assert inputs.reference is not None
            gap = torch.where(inputs.trained, tokens.logprobs - inputs.reference, 0.0)
            columns["kl_loss"] = kl_estimate(self.reference, gap)
        columns["train_rollout_logprob_abs_diff"] = log_ratio.abs()
        columns["train_rollout_kl"] = ratio - 1.0 - log_ratio.clamp(max=LARGEST_LOG_RATIO)
        own = {
            "kl_k1": -log_ratio,
            "ratio": ratio,
            "ratio_squared": ratio.square(),
            "weight": tokens.weight,
            "kept": tokens.kept,
            "out_of_band": outside,
            "centering_term": tokens.centering_term,
            "sampler_head_mass": tokens.sampler_head_mass,
            "trainer_head_mass": tokens.trainer_head_mass,
            "sampler_tail_mass": 1.0 - tokens.sampler_head_mass,
            "trainer_tail_mass": 1.0 - tokens.trainer_head_mass,
            "support_mass": tokens.trainer_head_mass,
        }
        if keep is not None:
            own["sequence_kept"] = keep[inputs.held.sample.to(keep.device)]
        for index, name in enumerate(self.groups):
            assert inputs.groups is not None
            members = inputs.groups == index
            own[f"group/{name}/tokens"] = members
            for key in ("kl_k1", "kept", "out_of_band"):
                own[f"group/{name}/{key}"] = torch.where(members, own[key].to(log_ratio.dtype), 0.0)
        wanted = set(self.keys())
        return {**columns, **{_PREFIX + k: v for k, v in own.items() if _PREFIX + k in wanted}}
