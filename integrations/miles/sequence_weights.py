"""Adapter: which samples the guards drop, and by how much the tokens grow that the others keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from offpolicy_corr.integrations._common.collectives import all_reduce
from offpolicy_corr.integrations._common.layout import ResponseTokens, RowLayout
from torch import Tensor

from offpolicy_corr import guards
from offpolicy_corr.settings import Settings


@dataclass(frozen=True, eq=False)
class Responses:
    """Whole responses, of which this rank has some ``tokens``; the others are on its context-parallel peers.

    ``full_mask`` bool: trained tokens of full responses laid end to end, on the device of the numbers.
    """

    layout: RowLayout
    tokens: ResponseTokens
    full_mask: Tensor
    group: dist.ProcessGroup | None

    def join(self, *columns: Tensor) -> list[Tensor]:
        """Numbers of this rank's tokens, ``[C]`` each, as those of full responses laid end to end. One collective."""
        stacked = torch.stack(columns)
        full = stacked.new_zeros(len(columns), self.full_mask.numel())
        full[:, self.tokens.index(self.layout).to(full.device)] = stacked
        return list(all_reduce(full, self.group).unbind(0))

    def of_tokens(self, per_sample: Tensor) -> Tensor:
        """What holds of a sample, ``[B]``, for each of this rank's tokens, ``[C]``."""
        return per_sample[self.tokens.sample.to(per_sample.device)]


def keep_samples(
    settings: Settings,
    responses: Responses,
    log_ratio: Tensor,
    advantages: Tensor | None = None,
    full_lag: Tensor | None = None,
) -> Tensor | None:
    """Which samples the guards keep, bool ``[B]``, the same on every context-parallel rank; None without guards.

    Args:
        log_ratio: log p − log q of this rank's tokens, ``[C]``; ``advantages`` likewise, for ``off_policy``.
        full_lag: versions behind the newest sampler, full responses, for ``behind_newest_sampler``.
    """
    if not settings.guards:
        return None
    columns = [log_ratio] if advantages is None else [log_ratio, advantages]
    full_log_ratio, *full_advantages = responses.join(*columns)
    mask = responses.full_mask
    sequence = responses.layout.samples.to(mask.device)
    keep = torch.ones(len(responses.layout.totals), dtype=torch.bool, device=mask.device)
    for name, bounds in settings.guards:
        values = dict(bounds)
        if name == "behind_newest_sampler":
            assert full_lag is not None
            is_stale = (full_lag.to(mask.device) > values["max_lag"]) & mask
            kept = torch.bincount(sequence[is_stale], minlength=keep.numel()) == 0
        elif name == "off_policy":
            kept = guards.off_policy(full_log_ratio, full_advantages[0], sequence, mask, **values)
        else:
            kept = getattr(guards, name)(full_log_ratio, sequence, mask, **values)
        keep[: kept.numel()] &= kept  # trailing samples without a response have no verdict
    return keep


def growth_of_kept(responses: Responses, kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Trained tokens of each token's sample over those of them that are ``kept`` (bool ``[C]``), ``[C]``.

    Multiplied by it, kept tokens share the whole weight of their sample. A sample with nothing kept has 0 to grow.
    """
    (full_kept,) = responses.join(kept.to(dtype))
    is_trained = responses.full_mask.to(dtype)
    num_kept = responses.layout.per_sample(full_kept).clamp(min=1.0)
    return responses.of_tokens(responses.layout.per_sample(is_trained) / num_kept)
