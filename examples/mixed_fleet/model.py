"""A small Qwen3 and the FP8 key-value cache of its samplers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import Cache, DynamicLayer

from .quantize import round_e4m3

# transformers renamed this argument within version 5.
CACHE_ARGUMENT = (
    "cache" if "cache" in inspect.signature(Qwen3ForCausalLM.forward).parameters else "past_key_values"
)


class Fp8CacheLayer(DynamicLayer):
    """One layer's keys and values, stored as FP8 e4m3 with scale 1 and read back in the compute dtype."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [batch, heads, new, head_dim] keys and values; return all of them, as stored."""
        keys, values = super().update(round_e4m3(key_states), round_e4m3(value_states), *args, **kwargs)
        return keys, values


def build_model(
    vocab_size: int, max_length: int, seed: int, width: int = 64, layers: int = 2
) -> Qwen3ForCausalLM:
    """A randomly initialized Qwen3 in fp32 with `layers` blocks of `width` (about 77 thousand parameters)."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        initializer_range=0.05,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def new_cache(model: Qwen3ForCausalLM, fp8: bool) -> Cache:
    """An empty key-value cache for `model`, FP8 or in the compute dtype."""
    layer = Fp8CacheLayer if fp8 else DynamicLayer
    return Cache(layers=[layer() for _ in range(model.config.num_hidden_layers)])


def next_logits(model: Qwen3ForCausalLM, tokens: Tensor, cache: Cache) -> Tensor:
    """Feed new tokens [B, n] through the model and its cache; returns logits [B, V] of the next token."""
    arguments = {"input_ids": tokens, CACHE_ARGUMENT: cache, "use_cache": True, "logits_to_keep": 1}
    return model(**arguments).logits[:, -1]


def response_logits(model: Qwen3ForCausalLM, sequences: Tensor, prompt_length: int) -> Tensor:
    """One full forward pass without a cache, differentiable.

    Args:
        model: the trainer's model.
        sequences: token ids [B, prompt_length + N].
        prompt_length: tokens that were given, not drawn.

    Returns:
        Logits [B, N, V]; row n is the distribution that response token n is drawn from.
    """
    hidden = model.model(input_ids=sequences[:, :-1], use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, prompt_length - 1 :])
