"""The sampler fleet: eight groups with their own number formats, staleness and fixed shares of requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from .model import build_model, new_cache, next_logits
from .quantize import load_quantized
from .task import EOS, PAD


@dataclass(frozen=True)
class SamplerGroup:
    """One pool of identical samplers.

    Attributes:
        name: accelerator and precision.
        precision: a key of `quantize.PRECISIONS`.
        share: share of all requests that this group answers.
        lag: how many updates old the weights are that it samples from, once that many exist.
        fp8_cache: store keys and values as FP8.
    """

    name: str
    precision: str
    share: float
    lag: int
    fp8_cache: bool = True


MIXED_FLEET = (
    SamplerGroup("B200 NVFP4", "NVFP4", 0.27, lag=3),
    SamplerGroup("B300 NVFP4", "NVFP4", 0.20, lag=2),
    SamplerGroup("H100 FP8", "FP8 per-tensor", 0.10, lag=8),
    SamplerGroup("H200 FP8", "FP8 block", 0.12, lag=5),
    SamplerGroup("H100 BF16", "BF16", 0.08, lag=6),
    SamplerGroup("H200 BF16", "BF16", 0.10, lag=4),
    SamplerGroup("A100 BF16", "BF16", 0.06, lag=7),
    SamplerGroup("RTX PRO 6000 BF16", "BF16", 0.07, lag=4),
)
"""Eight groups on six accelerators. Shares and lags are this demo's own; 47 % of requests meet NVFP4."""

ON_POLICY_FLEET = (SamplerGroup("trainer itself", "FP32", 1.0, lag=0, fp8_cache=False),)
"""A control that samples from the trainer's own fp32 policy: all that it does is sampling noise."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn and what is recorded of each.

    Attributes:
        temperature: divides the logits.
        top_p: 1 draws from the whole vocabulary and records a head of `head_size` candidates; below 1 only
            the smallest set of likeliest tokens whose mass reaches `top_p` is drawn from, and that set is
            recorded whole.
        head_size: most likely tokens recorded per position when `top_p` is 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    head_size: int = 16


@dataclass(frozen=True)
class Rollouts:
    """What samplers hand over. Responses are padded to `[B, N]`; a token counts where `mask` is true.

    Attributes:
        prompts: int64 [B, P].
        responses: int64 [B, N], <pad> after <eos>.
        mask: bool [B, N].
        logprobs: float32 [B, N], under the distribution drawn from: after temperature and after top-p.
        candidate_ids: int64 [B, N, K], −1 where there are fewer than K.
        candidate_logprobs: float32 [B, N, K], −inf where there are fewer.
        complete: whether the candidates are all that could have been drawn (top-p), or a head of the
            vocabulary.
        group: int64 [B], index of the sampler group.
        version: int64 [B], number of the update whose weights were sampled from.
    """

    prompts: Tensor
    responses: Tensor
    mask: Tensor
    logprobs: Tensor
    candidate_ids: Tensor
    candidate_logprobs: Tensor
    complete: bool
    group: Tensor
    version: Tensor

    def labeled(self, group: int, version: int) -> Rollouts:
        """The same rollouts, said to come from one sampler group and one weight version."""
        return replace(
            self, group=torch.full_like(self.group, group), version=torch.full_like(self.version, version)
        )

    @staticmethod
    def concat(parts: list[Rollouts]) -> Rollouts:
        """Join the rollouts of several groups."""
        joined = {
            field.name: torch.cat([getattr(part, field.name) for part in parts])
            for field in fields(Rollouts)
            if field.name != "complete"
        }
        return Rollouts(complete=parts[0].complete, **joined)


def candidates_of(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """The distribution to draw from, and what to record of it.

    Args:
        logits: [B, V], any float dtype.
        sampling: temperature, top-p and head size.

    Returns:
        `(logprobs, ids, candidate_logprobs)`: float32 [B, V] that sum to one, −inf on excluded tokens; int64
        [B, K] in falling order of probability; float32 [B, K]. K is the head size, or V under top-p, where
        excluded tokens are −1 and −inf.
    """
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
    if sampling.top_p >= 1.0:
        head, ids = logprobs.topk(min(sampling.head_size, logits.shape[-1]), dim=-1)
        return logprobs, ids, head
    ranked, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked.exp().cumsum(dim=-1) - ranked.exp()
    excluded = mass_before >= sampling.top_p
    excluded[:, 0] = False
    ranked = torch.log_softmax(ranked.masked_fill(excluded, -torch.inf), dim=-1)
    filtered = torch.full_like(logprobs, -torch.inf).scatter(-1, ids, ranked)
    return filtered, ids.masked_fill(excluded, -1), ranked


@torch.inference_mode()
def generate(
    model: Qwen3ForCausalLM,
    prompts: Tensor,
    length: int,
    sampling: Sampling,
    generator: torch.Generator,
    fp8_cache: bool,
) -> Rollouts:
    """Sample responses token by token through a key-value cache, recording each token's distribution.

    Args:
        model: the sampler; runs in its own dtype.
        prompts: int64 [B, P], all of one length.
        length: most tokens of a response.
        sampling: how to draw and what to record.
        generator: source of randomness.
        fp8_cache: store keys and values as FP8.

    Returns:
        The record, with group and weight version 0; `Rollouts.labeled` sets them.
    """
    cache = new_cache(model, fp8_cache)
    tokens, active = prompts, torch.ones(len(prompts), dtype=torch.bool)
    columns: list[tuple[Tensor, ...]] = []
    for _ in range(length):
        logprobs, ids, candidate_logprobs = candidates_of(next_logits(model, tokens, cache), sampling)
        drawn = torch.multinomial(logprobs.exp(), 1, generator=generator)
        logprob = logprobs.gather(-1, drawn)[:, 0]
        tokens = drawn.masked_fill(~active[:, None], PAD)
        columns.append((tokens[:, 0], active, logprob, ids, candidate_logprobs))
        active = active & (tokens[:, 0] != EOS)
    responses, mask, logprob, ids, candidate_logprobs = (
        torch.stack(column, dim=1) for column in zip(*columns, strict=True)
    )
    zeros, complete = torch.zeros(len(prompts), dtype=torch.int64), sampling.top_p < 1.0
    return Rollouts(
        prompts, responses, mask, logprob, ids, candidate_logprobs, complete, group=zeros, version=zeros
    )


def split_requests(shares: list[float], count: int) -> list[int]:
    """Divide `count` requests by `shares` (largest remainders first, so that the sizes sum to `count`)."""
    exact = [share / sum(shares) * count for share in shares]
    sizes = [int(x) for x in exact]
    by_remainder = sorted(range(len(shares)), key=lambda g: sizes[g] - exact[g])
    for g in by_remainder[: count - sum(sizes)]:
        sizes[g] += 1
    return sizes


class Fleet:
    """Samplers of every group, fed with weights by the trainer and asked for rollouts once per update.

    Asynchrony is simulated: the batch of update n holds, from each group, responses drawn with the weights of
    update n − lag, as if they had been on their way since. Every group keeps its own random stream.
    """

    def __init__(self, groups: tuple[SamplerGroup, ...], vocab_size: int, max_length: int, seed: int) -> None:
        self.groups = groups
        exact = all(group.precision == "FP32" for group in groups)
        self.model = (
            build_model(vocab_size, max_length, seed=0).to(torch.float32 if exact else torch.bfloat16).eval()
        )
        self.versions: deque[dict[str, Tensor]] = deque(maxlen=1 + max(group.lag for group in groups))
        self.newest = -1
        self.generators = [torch.Generator().manual_seed(seed * 1009 + g) for g in range(len(groups))]
        self.router = torch.Generator().manual_seed(seed * 1009 + 500)

    def publish(self, model: Qwen3ForCausalLM) -> None:
        """Take a copy of the trainer's weights as the next version."""
        self.versions.append({name: p.detach().clone() for name, p in model.named_parameters()})
        self.newest += 1

    def sample(self, prompts: Tensor, length: int, sampling: Sampling) -> tuple[Rollouts, Tensor]:
        """Answer prompts [B, P], spread over the groups at random in their fixed shares.

        Returns:
            The rollouts, group by group, and int64 [B], the row of `prompts` that each one answers.
        """
        order = torch.randperm(len(prompts), generator=self.router)
        sizes = split_requests([group.share for group in self.groups], len(prompts))
        parts = []
        for g, rows in enumerate(order.split(sizes)):
            if not len(rows):
                continue
            group = self.groups[g]
            age = min(group.lag, self.newest)
            load_quantized(self.model, self.versions[-1 - age], group.precision)
            stream = self.generators[g]
            rollouts = generate(self.model, prompts[rows], length, sampling, stream, group.fp8_cache)
            parts.append(rollouts.labeled(group=g, version=self.newest - age))
        return Rollouts.concat(parts), order
