"""Adapter: metrics for Miles: detached 0-d sums under a fixed, ordered set of keys.

Miles adds them over micro-batches and ranks by position and divides by rollouts (or tokens), so every metric goes
through the loss' own weights, becomes a mean, and must be there on every rank and micro-batch. Maxima and quantiles
cannot be had; an effective sample size can: ``offpolicy_corr/ratio``² / ``offpolicy_corr/ratio_squared``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offpolicy_corr.kl import kl_estimate
from offpolicy_corr.numerics import in_band
from offpolicy_corr.result import TokenDiagnostics
from offpolicy_corr.settings import Settings

from .inputs import Inputs
from .options import filters

PREFIX = "offpolicy_corr/"
LARGEST_LOG_RATIO = 20.0  # a single token must not make a mean infinite


def mismatch(log_ratio: Tensor, weight: Tensor, band: tuple[float, float]) -> dict[str, Tensor]:
    """How far p is from q at each token, ``[C]`` each. Ratios enter at no more than e²⁰.

    ``kl_k1`` and ``kl_k3`` estimate KL(sampler‖trainer); ``weight`` is f(r), ``kept`` whether it is positive.
    """
    bounded = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    ratio = bounded.exp()
    return {
        "kl_k1": kl_estimate("k1", -log_ratio),
        "kl_k3": kl_estimate("k3", -bounded),
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "weight": weight,
        "kept": weight > 0,
        "out_of_band": ~in_band(log_ratio, *band),
    }


@dataclass(frozen=True)
class Metrics:
    """Which metrics there are; depends on the options alone.

    Always ``loss pg_loss entropy_loss train_rollout_logprob_abs_diff train_rollout_kl`` (named as Miles' own losses
    name them; k3 of KL(sampler‖trainer)), ``kl_loss`` with a reference, and under ``offpolicy_corr/``: ``kl_k1 ratio
    ratio_squared weight kept out_of_band``; with candidates ``centering_term``, with heads ``sampler_head_mass
    trainer_head_mass sampler_tail_mass trainer_tail_mass``, with supports ``support_mass`` (the trainer's own mass of
    the support); with guards ``sequence_kept``, with that guard ``behind_newest_sampler`` (mean lag); for every
    group ``group/<name>/`` ``tokens kl_k1 kept out_of_band``, its part of the batch's means.
    """

    band: tuple[float, float]
    kind: str
    reference: str | None
    guards: bool
    lag: bool
    groups: tuple[str, ...]
    entropy_coef: float
    kl_coef: float

    @classmethod
    def of(cls, args: Any, settings: Settings) -> Metrics:
        use_kl = bool(getattr(args, "use_kl_loss", False))
        return cls(
            settings.band,
            settings.kind_of_candidates(filters(args)),
            args.kl_loss_type if use_kl else None,
            bool(settings.guards),
            settings.guards_sampler_lag(),
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
        own += ["behind_newest_sampler"] if self.lag else []
        own += [
            f"group/{name}/{key}"
            for name in self.groups
            for key in ("tokens", "kl_k1", "kept", "out_of_band")
        ]
        return keys + [PREFIX + key for key in own]

    def nothing(self, logits: Tensor) -> dict[str, Tensor]:
        """The same keys, all 0: for a stage that has no loss."""
        return {key: torch.zeros((), device=logits.device) for key in self.keys()}

    def of_tokens(
        self,
        loss: Tensor,
        diagnostics: TokenDiagnostics,
        inputs: Inputs,
        weights: Tensor,
        sample_kept: Tensor | None,
    ) -> dict[str, Tensor]:
        """The metrics of a rank's tokens. ``weights`` are those of the loss, the metrics use the reducer's own.

        ``sample_kept`` bool ``[C]``: whether the guards keep the token's sample.
        """
        columns = self._columns(diagnostics, inputs, sample_kept)
        values = torch.stack(
            [torch.where(inputs.is_trained, column.to(weights.dtype), 0.0) for column in columns.values()]
        )
        found = dict(zip(columns, (values @ inputs.weights).unbind(), strict=True))
        # what is a part of the loss is reported with the weights that the loss was made with
        names = list(columns)
        parts: dict[str, Tensor] = {
            name: values[names.index(name)] @ weights for name in ("entropy_loss", "kl_loss") if name in names
        }
        total = loss.detach()
        policy = total + self.entropy_coef * parts["entropy_loss"]
        if "kl_loss" in parts:
            policy = policy - self.kl_coef * parts["kl_loss"]
        found |= {"loss": total, "pg_loss": policy, **parts}
        return {key: found[key].detach() for key in self.keys()}

    def _columns(
        self, diagnostics: TokenDiagnostics, inputs: Inputs, sample_kept: Tensor | None
    ) -> dict[str, Tensor]:
        log_ratio = diagnostics.log_ratio
        columns = {"entropy_loss": diagnostics.entropy}
        if self.reference is not None:
            assert inputs.ref_logprobs is not None
            logprob_diff = torch.where(inputs.is_trained, diagnostics.logprobs - inputs.ref_logprobs, 0.0)
            columns["kl_loss"] = kl_estimate(self.reference, logprob_diff)
        own = mismatch(log_ratio, diagnostics.weight, self.band)
        columns["train_rollout_logprob_abs_diff"] = log_ratio.abs()
        columns["train_rollout_kl"] = own["kl_k3"]
        own |= {
            "centering_term": diagnostics.centering_term,
            "sampler_head_mass": diagnostics.sampler_head_mass,
            "trainer_head_mass": diagnostics.trainer_head_mass,
            "sampler_tail_mass": 1.0 - diagnostics.sampler_head_mass,
            "trainer_tail_mass": 1.0 - diagnostics.trainer_head_mass,
            "support_mass": diagnostics.trainer_head_mass,
        }
        if sample_kept is not None:
            own["sequence_kept"] = sample_kept
        if inputs.lag is not None:
            own["behind_newest_sampler"] = inputs.lag
        for index, name in enumerate(self.groups):
            assert inputs.groups is not None
            members = inputs.groups == index
            own[f"group/{name}/tokens"] = members
            for key in ("kl_k1", "kept", "out_of_band"):
                own[f"group/{name}/{key}"] = torch.where(members, own[key].to(log_ratio.dtype), 0.0)
        wanted = set(self.keys())
        return {**columns, **{PREFIX + k: v for k, v in own.items() if PREFIX + k in wanted}}
