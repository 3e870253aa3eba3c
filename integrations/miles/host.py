"""Adapter: what it takes from Miles, found by feature: the parallel state, and the keys of a batch.

Miles is not on PyPI and its modules moved between v0.1.x and later; nothing here imports it before it is needed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist

from offpolicy_corr.records.errors import RecordError

Batch = dict[str, Any]

GROUP_KEY, LAG_KEY = "offpolicy_corr_group", "offpolicy_corr_lag"
STEP_TOKENS_KEY = "offpolicy_corr_step_tokens"
CONVERSION = "miles.ray.rollout.train_data_conversion"
CANDIDATE_KEYS = (
    "rollout_topk_token_ids",
    "rollout_topk_log_probs",
    "rollout_topk_lengths",
    "rollout_sampling_mask_ids",
    "rollout_sampling_mask_offsets",
    "rollout_sampling_mask_log_probs",
)

_TOPK = (
    "Miles v0.1.0 (August 2026) does not carry it; versions with native score centering do under "
    "--rollout-top-logprobs-num K"
)
_MASK = (
    "Miles v0.1.0 (August 2026) does not carry it; later versions do under --rollout-top-p < 1 with --rollout-top-k, "
    "on Megatron to their own losses alone"
)
_EXTEND = "install the transport extension (offpolicy_corr.integrations.miles.transport)"
_ALWAYS = "every version carries it to a train step"

# where a key can be had, and what to do where it cannot
KEYS: dict[str, tuple[str, str]] = {
    "rollout_log_probs": (
        _ALWAYS,
        "have the rollout function record log-probs of every sample, and set use_rollout_logprobs",
    ),
    "advantages": (
        _ALWAYS,
        "the loss runs behind compute_advantages_and_returns: is this the last pipeline stage?",
    ),
    "ref_log_probs": (
        _ALWAYS,
        "give --ref-load, which makes Miles score the reference, or drop --use-kl-loss",
    ),
    "loss_masks": (_ALWAYS, "extend the mask together with the response"),
    "max_seq_lens": (
        "every version sets it with --qkv-format bshd",
        "let Miles' own get_rollout_data build the batch",
    ),
    "rollout_topk_token_ids": (_TOPK, f"set --rollout-top-logprobs-num, or {_EXTEND}"),
    "rollout_topk_log_probs": (_TOPK, f"set --rollout-top-logprobs-num, or {_EXTEND}"),
    "rollout_topk_lengths": (_TOPK, f"ship it together with rollout_topk_log_probs, or {_EXTEND}"),
    "rollout_sampling_mask_ids": (_MASK, f"upgrade, or {_EXTEND}"),
    "rollout_sampling_mask_offsets": (_MASK, f"upgrade, or {_EXTEND}"),
    "rollout_sampling_mask_log_probs": (
        _MASK,
        f"ask SGLang for sampling_logprobs_mode='support', ship the values ({_EXTEND}), or leave centering out",
    ),
    LAG_KEY: (
        "no version carries it",
        f"name the converter and {_EXTEND}, or leave the guard behind_newest_sampler out",
    ),
    GROUP_KEY: (
        "no version carries it",
        f"name the converter and {_EXTEND}, or leave groups out",
    ),
    STEP_TOKENS_KEY: (
        "no version carries it, and on torch-native trainers Miles drops the token count that it should divide by",
        f"name the converter and {_EXTEND}, or leave calculate_per_token_loss off",
    ),
}


class UnknownVersion(RuntimeError):
    """The installed Miles is not, or does not behave as, one of the versions that this adapter was written for."""


def parallel_state() -> Any:
    """Miles' parallel state: ``tp`` and ``cp`` with ``rank``, ``size``, ``group``; ``is_pp_last_stage``.

    Raises:
        UnknownVersion: Miles cannot be imported, or has no such function: neither layout that is known.
    """
    module = first_module("miles.backends.training_utils.parallel")
    if not hasattr(module, "get_parallel_state"):
        raise UnknownVersion(
            "this Miles has no training_utils.parallel.get_parallel_state: it is of an unknown version"
        )
    return module.get_parallel_state()


def first_module(*names: str) -> ModuleType:
    """The first of several homes that a module of Miles has had.

    Raises:
        UnknownVersion: none can be imported; says which were tried and why each failed.
    """
    failures = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            failures.append(f"{name} ({error})")
    raise UnknownVersion(
        f"Miles could not be imported: {'; '.join(failures)}. Install it from source, known are v0.1.0 and later"
    )


def native_converter() -> Callable[..., dict[str, Any]]:
    """Miles' own conversion, with everything but ``(args, samples)`` bound."""
    convert = getattr(first_module(CONVERSION), "convert_samples_to_train_data", None)
    if convert is None:
        raise UnknownVersion(
            "this Miles has no convert_samples_to_train_data: name the candidates' converter yourself"
        )
    bound: dict[str, Any] = {"metadata": {}, "custom_convert_samples_to_train_data_func": None}
    parameters = list(inspect.signature(convert).parameters)
    rest = set(parameters) - {"args", "samples", "custom_reward_post_process_func", *bound}
    if parameters[:2] != ["args", "samples"] or rest:
        raise UnknownVersion(
            f"convert_samples_to_train_data takes {', '.join(parameters)}, which is not known"
        )

    def call(args: Any, samples: list[Any]) -> dict[str, Any]:
        path = getattr(args, "custom_reward_post_process_path", None)
        reward = None if path is None else _load(path)
        more = {**bound, "custom_reward_post_process_func": reward}
        result: dict[str, Any] = convert(args, samples, **{k: v for k, v in more.items() if k in parameters})
        return result

    return call


def _load(path: str) -> Any:
    load = first_module("miles.utils.misc", "miles.utils.function_registry").load_function
    return load(path)


def torch_native(args: Any) -> bool:
    """Whether Miles trains on FSDP or another torch-native backend: anything but Megatron."""
    return bool(getattr(args, "train_backend", "megatron") != "megatron")


def group_of(info: Any) -> dist.ProcessGroup | None:
    """The process group of a dimension, None where it has one rank."""
    return info.group if info.size > 1 else None


def missing(key: str, why: str, sample: int | None = None) -> RecordError:
    """The error for a key that should be there."""
    range_, remedy = KEYS.get(key, (_ALWAYS, "let Miles' own get_batch build the batch"))
    problem = f"the batch has no {key}" + ("" if sample is None else " of this sample") + f", {why}"
    return RecordError(problem, sample=sample, field=key, remedy=f"{range_}. Remedy: {remedy}.")


def need(batch: Batch, key: str, why: str = "which this loss reads") -> Any:
    """The value of a key that must be there."""
    value = batch.get(key)
    if value is None:
        raise missing(key, why)
    return value


def need_per_sample(batch: Batch, key: str, count: int, why: str = "which this loss reads") -> list[Any]:
    """A list with one value, not None, for each of ``count`` samples."""
    values = need(batch, key, why)
    if len(values) != count:
        problem = f"{len(values)} values for {count} samples"
        raise RecordError(
            problem, field=key, value=len(values), remedy="One for every sample of the micro-batch."
        )
    for sample, value in enumerate(values):
        if value is None:
            raise missing(key, why, sample)
    return list(values)
