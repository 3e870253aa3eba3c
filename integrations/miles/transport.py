"""Adapter: carries extra per-token arrays from samples to the loss, in-process, where the installed Miles does not.

Three points of Miles decide what reaches a loss: the converter of samples, the packing of shards, and the batch
iterator; the last two drop keys that they do not know. `convert_samples` (named by
``--custom-convert-samples-to-train-data-path``, in the rollout process) adds the keys and lets shards pass them on;
`extend_trainer` (named by ``--custom-megatron-init-path``, in every trainer process) lets the iterator hand them out.
Nothing is edited; `remove` undoes it. Torch-native trainers have no such hook: name `extend_trainer` as Ray's
``worker_process_setup_hook``. Both object stores of Miles carry the keys: Ray's pickles anything, Mooncake's is told
how to encode them.

What a sample brings, as attributes that the generate function sets, all optional, all ``[response length]`` or CSR
over it: the candidate arrays by the names in `candidates`, ``offpolicy_corr_group`` (a group's name, or one per token,
None where nobody sampled), and Miles' own ``weight_versions``. Metadata ``offpolicy_corr_group`` serves as well.
`attach` sets them from a record that `offpolicy_corr.integrations.sglang` read.
"""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offpolicy_corr.records.candidates import CandidateSet
from offpolicy_corr.records.errors import RecordError
from offpolicy_corr.records.record import SamplerRecord
from offpolicy_corr.settings import Settings

from .host import (
    CANDIDATE_KEYS,
    CONVERSION,
    GROUP_KEY,
    LAG_KEY,
    STEP_TOKENS_KEY,
    UnknownVersion,
    first_module,
    native_converter,
)
from .options import drops_count
from .sampler_lag import NEWEST_KEY, VERSION_KEY, sampler_lags, trained_tokens
from .step_tokens import count_step_tokens

KEYS = (*CANDIDATE_KEYS, GROUP_KEY, LAG_KEY, STEP_TOKENS_KEY)
_PER_TOKEN = ("rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_topk_lengths")
# on samples alone: compared with the run's and the sample's own, never shipped
_TEMPERATURE, _TOKENS = "offpolicy_corr_temperature", "offpolicy_corr_tokens"
_ITERATOR = ("miles.backends.training_utils.data.rollout", "miles.backends.training_utils.data")


@dataclass
class _Patch:
    owner: Any
    name: str
    original: Any


_installed: dict[str, _Patch] = {}


def convert_samples(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """Miles' own conversion, and the extra keys. For ``--custom-convert-samples-to-train-data-path``.

    Raises:
        UnknownVersion: Miles' conversion or packing is not the one that is known.
        RecordError: an array that some samples have and others lack, or of another length than its response; an
            attached record of other tokens than the sample's; a token that was not drawn at ``rollout_temperature``.
        ValueError: options under which Miles does not tell a converter what it needs.
    """
    for name in ("use_dynamic_global_batch_size", "multi_lora", "delay_split_train_data_by_dp"):
        if getattr(args, name, False):
            raise ValueError(
                f"{name} with the transport extension: Miles does not hand its metadata to a converter"
            )
    extend_rollout()
    for index, sample in enumerate(samples):
        if trained_tokens(sample).any():
            _check_tokens(sample, index)
            _check_temperature(args, sample, index)
    data: dict[str, Any] = native_converter()(args, list(samples))
    extra = extra_keys(Settings.of(getattr(args, "offpolicy_corr", None)), samples)
    return {**extra, **data}


def extra_keys(settings: Settings, samples: Sequence[Any]) -> dict[str, list[Any]]:
    """The extra keys of a batch, as numpy: Miles' logger skips arrays and breaks on integer tensors.

    What samples without a trained token hold (removed, aborted) is not looked at: they get empty rows.
    """
    found: dict[str, list[Any]] = {}
    for key in CANDIDATE_KEYS:
        values = [getattr(sample, key, None) for sample in samples]
        if all(value is None for value in values):
            continue
        dtype_ref = np.asarray(next(value for value in values if value is not None))
        found[key] = [
            _array(value, key, index, samples[index])
            if trained_tokens(samples[index]).any()
            else _blank(key, int(samples[index].response_length), dtype_ref)
            for index, value in enumerate(values)
        ]
    if settings.groups:
        found[GROUP_KEY] = [_group(sample, index, settings.groups) for index, sample in enumerate(samples)]
    if settings.guards_sampler_lag():
        found[LAG_KEY] = sampler_lags(samples)
    return found


def declare_newest_version(samples: Sequence[Any], version: int | None) -> None:
    """Say which weights were last published to the samplers when these samples were collected.

    For a rollout function of your own, which Miles tells it as ``input.weight_version`` (None before the first
    update): the guard ``behind_newest_sampler`` then counts back from it, instead of from the newest version in the
    batch. ``samples`` may be nested, as rollout functions return them.
    """
    for sample in samples:
        if isinstance(sample, (list, tuple)):
            declare_newest_version(sample, version)
        elif version is not None:
            setattr(sample, NEWEST_KEY, int(version))


def attach(
    sample: Any, record: SamplerRecord, group: str | None = None, loss_mask: torch.Tensor | None = None
) -> None:
    """Put a record of one whole response (see `offpolicy_corr.integrations.sglang`) onto a sample of Miles.

    Sets ``rollout_log_probs``, the candidate arrays that the record holds, the group and numbered weight versions;
    clears what an earlier attempt left. Call it last in a generate function, after every attempt: turns that Miles
    appends or merges later are not in the record.

    Args:
        sample: ``tokens`` and ``response_length`` are set.
        record: the response's tokens, ``[R]``. Of several turns: `offpolicy_corr.assemble` joins them, tool
            tokens included; select what lies behind the first prompt.
        group: the group that drew all of it; None: the record's own groups, token by token, where it has some.
        loss_mask: bool ``[R]``, False at tokens that nobody sampled; becomes the sample's. None: all are trained.

    Raises:
        RecordError: a record of other tokens, without log-probs, or with heads and supports in one response.
    """
    response = int(sample.response_length)
    mask = torch.ones(response, dtype=torch.bool) if loss_mask is None else loss_mask.bool().cpu()
    if not len(record) == len(mask) == response:
        remedy = "Read the record from the answers that made this response, tool tokens included."
        raise RecordError("lengths disagree", field="response_length", value=len(record), remedy=remedy)
    differ = (
        record.tokens.cpu() != torch.as_tensor(sample.tokens[len(sample.tokens) - response :])
    ).nonzero()
    if len(differ):
        token = int(differ[0, 0])
        remedy = "Call it last, when the sample's tokens are what the engine returned."
        raise RecordError("tokens disagree", token=token, field="tokens", value=sample.tokens, remedy=remedy)
    if record.logprobs is None:
        raise RecordError("a record without log-probs", field="logprobs", remedy="Ask the engine for them.")
    for key in (*CANDIDATE_KEYS, GROUP_KEY, VERSION_KEY):
        setattr(sample, key, None)
    sample.rollout_log_probs = torch.where(mask, record.logprobs, 0.0).tolist()
    if loss_mask is not None:
        sample.loss_mask = mask.int().tolist()
    setattr(sample, _TOKENS, record.tokens.cpu().numpy())
    temperature = torch.as_tensor(record.temperature, dtype=torch.float32).expand(response)
    setattr(sample, _TEMPERATURE, torch.where(mask, temperature, torch.nan).numpy())
    if record.candidates is not None and bool(mask.any()):
        for key, values in _candidate_arrays(record.candidates, mask).items():
            setattr(sample, key, values)
    if group is None and record.group is not None:
        setattr(sample, GROUP_KEY, [record.group_names[g] if g >= 0 else None for g in record.group.tolist()])
    elif group is not None:
        setattr(sample, GROUP_KEY, group)
    if record.weight_version is not None and record.version_names is None:
        setattr(sample, VERSION_KEY, record.weight_version.cpu().numpy())


def _candidate_arrays(candidates: CandidateSet, mask: torch.Tensor) -> dict[str, np.ndarray[Any, Any]]:
    complete = candidates.complete[mask]
    if bool(complete.all()):
        found = {
            "rollout_sampling_mask_ids": candidates.ids.to(torch.int32).numpy(),
            "rollout_sampling_mask_offsets": candidates.offsets.numpy(),
        }
        if candidates.logprobs is not None:
            found["rollout_sampling_mask_log_probs"] = candidates.logprobs.float().numpy()
        return found
    if bool(complete.any()):
        remedy = "One sampler either filters or does not: was the response continued with other settings?"
        raise RecordError("heads and supports in one response", field="candidates.complete", remedy=remedy)
    ids, logprobs = candidates.to_padded(pad_id=-1)
    assert logprobs is not None
    return {
        "rollout_topk_token_ids": ids.to(torch.int32).numpy(),
        "rollout_topk_log_probs": logprobs.float().masked_fill(ids < 0, -torch.inf).numpy(),
    }


def extend_rollout() -> None:
    """Let shards carry the extra keys. Idempotent.

    Raises:
        UnknownVersion: the packing function is gone, has another signature, or does not do what it did.
    """
    if "shards" in _installed:
        return
    module = first_module(CONVERSION)
    original = getattr(module, "_package_shards", None)
    if original is None or list(inspect.signature(original).parameters) != ["args", "data", "partitions"]:
        raise UnknownVersion(
            "this Miles has no _package_shards(args, data, partitions): shards cannot be extended"
        )
    _probe_shards(original)

    @functools.wraps(original)
    def package_shards(args: Any, data: dict[str, Any], partitions: Any) -> Any:
        shards = original(args, data, partitions)
        if drops_count(args):
            data = {
                **data,
                STEP_TOKENS_KEY: count_step_tokens(data["loss_masks"], partitions, args.global_batch_size),
            }
        for shard, partition in zip(shards, partitions, strict=True):
            shard.update(
                {key: [data[key][i] for i in partition] for key in KEYS if key in data and key not in shard}
            )
        return shards

    _replace("shards", module, "_package_shards", package_shards)
    specs = getattr(module, "ROLLOUT_DATA_VALUE_SPEC", None)
    if specs is not None:  # Mooncake's store returns nested lists for keys that it does not know
        ours = {key: module.ValueSpec(codec="typed_ragged") for key in KEYS if key not in specs}
        _replace("specs", module, "ROLLOUT_DATA_VALUE_SPEC", {**specs, **ours})


def extend_trainer(args: Any = None) -> None:
    """Let the batch iterator hand out the extra keys in train steps. For ``--custom-megatron-init-path``. Idempotent.

    Raises:
        UnknownVersion: the iterator is gone or does not do what it did.
    """
    if "iterator" in _installed:
        return
    iterator = getattr(first_module(*_ITERATOR), "DataIterator", None)
    original = getattr(iterator, "get_next", None)
    if original is None or list(inspect.signature(original).parameters) != ["self", "keys"]:
        raise UnknownVersion("this Miles has no DataIterator.get_next(keys): batches cannot be extended")
    _probe_iterator(iterator)

    @functools.wraps(original)
    def get_next(self: Any, keys: Sequence[str]) -> Any:
        if "advantages" in keys:  # a train step: passes that only score do not read them
            keys = [*keys, *(key for key in KEYS if key in self.rollout_data and key not in keys)]
        return original(self, keys)

    _replace("iterator", iterator, "get_next", get_next)


def remove() -> None:
    """Put back what was replaced in this process."""
    for patch in _installed.values():
        setattr(patch.owner, patch.name, patch.original)
    _installed.clear()


def _replace(name: str, owner: Any, attribute: str, value: Any) -> None:
    _installed[name] = _Patch(owner, attribute, getattr(owner, attribute))
    setattr(owner, attribute, value)


def _probe_shards(original: Callable[..., Any]) -> None:
    """Known behavior: known keys are split by partition, all others dropped."""
    data = {"tokens": [[1], [2]], "total_lengths": [1, 1], "offpolicy_corr_probe": [3, 4]}
    try:
        shards = original(Namespace(), data, [[1], [0]])
        known = [shard["tokens"] for shard in shards] == [[[2]], [[1]]]
        known = known and not any("offpolicy_corr_probe" in shard for shard in shards)
    except Exception as error:  # whatever it raises, it is not what it was
        raise UnknownVersion(f"_package_shards failed on two samples: {error!r}") from error
    if not known:
        raise UnknownVersion(
            "_package_shards does not split by partition and drop unknown keys, as known versions do"
        )


def _probe_iterator(iterator: Any) -> None:
    """Known behavior: exactly the keys asked for, absent ones as None."""
    try:
        probe = iterator({"tokens": [1, 2]}, micro_batch_size=1)
        known = probe.get_next(["tokens", "offpolicy_corr_probe"]) == {
            "tokens": [1],
            "offpolicy_corr_probe": None,
        }
    except Exception as error:
        raise UnknownVersion(f"DataIterator failed on two samples: {error!r}") from error
    if not known:
        raise UnknownVersion(
            "DataIterator.get_next does not return the keys asked for as the known versions do"
        )


def _check_tokens(sample: Any, index: int) -> None:
    """An attached record must be of the tokens that the sample has now: a retry leaves it behind."""
    attached = getattr(sample, _TOKENS, None)
    if attached is None:
        return
    tokens = np.asarray(sample.tokens)[len(sample.tokens) - int(sample.response_length) :]
    if np.array_equal(attached, tokens):
        return
    remedy = (
        "A retry, or a turn that was trimmed or merged, keeps the old record: call attach last, every time."
    )
    raise RecordError("the attached record is of other tokens", sample=index, field="tokens", remedy=remedy)


def _check_temperature(args: Any, sample: Any, index: int) -> None:
    """Miles scores every token at one temperature."""
    drawn_at = getattr(sample, _TEMPERATURE, None)
    if drawn_at is None:
        return
    differ = np.abs(drawn_at - args.rollout_temperature) > 1e-6  # NaN, where nobody drew, does not differ
    if differ.any():
        token = int(differ.argmax())
        raise RecordError(
            "drawn at another temperature",
            sample=index,
            token=token,
            field="temperature",
            value=float(drawn_at[token]),
            remedy=f"Ask every engine for --rollout-temperature {args.rollout_temperature}.",
        )


def _array(value: Any, key: str, index: int, sample: Any) -> np.ndarray[Any, Any]:
    remedy = "Set it on every sample, or on none."
    if value is None:
        raise RecordError(
            f"other samples have {key} and this one has not", sample=index, field=key, remedy=remedy
        )
    array = np.asarray(value)
    response = int(sample.response_length)
    wanted = (
        response + 1
        if key == "rollout_sampling_mask_offsets"
        else response
        if key in _PER_TOKEN
        else len(array)
    )
    if len(array) != wanted:
        remedy = "A retry or a trimmed turn leaves old arrays behind: set them with the response."
        problem = f"{len(array)} rows for {response} response tokens"
        raise RecordError(problem, sample=index, field=key, value=len(array), remedy=remedy)
    return array


def _blank(key: str, response: int, dtype_ref: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A candidate array in which no token has a candidate, of ``dtype_ref``'s type and width."""
    if key in _PER_TOKEN:
        unused = {"rollout_topk_token_ids": -1, "rollout_topk_log_probs": -np.inf}.get(key, 0)
        return np.full((response, *dtype_ref.shape[1:]), unused, dtype=dtype_ref.dtype)
    size = response + 1 if key == "rollout_sampling_mask_offsets" else 0
    return np.zeros(size, dtype=dtype_ref.dtype)


def _group(sample: Any, index: int, names: tuple[str, ...]) -> np.ndarray[Any, Any]:
    """Index of every response token's group, −1 at tokens that nobody sampled, or of which none is trained."""
    if not trained_tokens(sample).any():
        return np.full(int(sample.response_length), -1, dtype=np.int64)
    value = getattr(sample, GROUP_KEY, None)
    value = (getattr(sample, "metadata", None) or {}).get(GROUP_KEY) if value is None else value
    response = int(sample.response_length)
    labels = [value] * response if isinstance(value, str) else value
    if labels is None or len(labels) != response:
        remedy = f"Set {GROUP_KEY} on the sample: a name, or one for each of its {response} response tokens."
        raise RecordError("a sample without sampler group", sample=index, field=GROUP_KEY, remedy=remedy)
    unknown = sorted(set(labels) - {None, *names})
    if unknown:
        remedy = f"offpolicy_corr.groups names {', '.join(names)}."
        raise RecordError("an unknown group", sample=index, field=GROUP_KEY, value=unknown[0], remedy=remedy)
    lookup: dict[str | None, int] = {name: position for position, name in enumerate(names)}
    lookup[None] = -1
    return np.array([lookup[label] for label in labels], dtype=np.int64)
