"""A double of Miles' conversion of samples and of its data iterator, installed for the tests of one module."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from offpolicy_corr.integrations.miles import transport

import miles_double as double

CONVERSION = "miles.ray.rollout.train_data_conversion"
ITERATOR = "miles.backends.training_utils.data"


class DataIterator:
    """As documented: the keys asked for, one micro-batch after the other."""

    def __init__(self, rollout_data: dict[str, Any], micro_batch_size: int | None = None) -> None:
        self.rollout_data, self.size, self.offset = rollout_data, micro_batch_size or 1, 0

    def get_next(self, keys: list[str]) -> dict[str, Any]:
        part = slice(self.offset, self.offset + self.size)
        self.offset += self.size
        return {key: None if key not in self.rollout_data else self.rollout_data[key][part] for key in keys}


def _package_shards(args: Any, data: dict[str, Any], partitions: Any) -> list[dict[str, Any]]:
    known = [key for key in ("tokens", "response_lengths", "loss_masks", "rollout_log_probs") if key in data]
    return [
        {
            "partition": part,
            **{key: [data[key][i] for i in part] for key in known},
            "total_lengths": data["total_lengths"],
        }
        for part in partitions
    ]


def convert_samples_to_train_data(
    args: Any,
    samples: list[Any],
    metadata: dict[str, Any],
    custom_convert_samples_to_train_data_func: Any,
    custom_reward_post_process_func: Any,
) -> dict[str, Any]:
    assert custom_convert_samples_to_train_data_func is None
    names = {"tokens": "tokens", "response_lengths": "response_length", "loss_masks": "loss_mask"}
    data = {key: [getattr(sample, name) for sample in samples] for key, name in names.items()}
    return {**data, "rollout_log_probs": [sample.rollout_log_probs for sample in samples]}


@pytest.fixture
def conversion_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    double.install(double.single())
    if double.MILES_SRC:
        pytest.importorskip("ray")
        try:
            __import__(CONVERSION)
            transport.first_module(*transport._ITERATOR)
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"this Miles cannot be imported whole here: {error}")
    else:
        for name in ("miles.ray", "miles.ray.rollout"):
            package = ModuleType(name)
            package.__path__ = []
            monkeypatch.setitem(sys.modules, name, package)
        conversion = ModuleType(CONVERSION)
        conversion._package_shards = _package_shards  # type: ignore[attr-defined]
        conversion.convert_samples_to_train_data = convert_samples_to_train_data  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, CONVERSION, conversion)
        iterator = ModuleType(ITERATOR)
        iterator.DataIterator = type("DataIterator", (DataIterator,), {"get_next": DataIterator.get_next})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, ITERATOR, iterator)
    yield
    transport.remove()


def conversion() -> Any:
    return sys.modules[CONVERSION]


def samples_of(problem: double.Problem) -> list[Any]:
    samples = []
    for i, response in enumerate(problem.responses):
        sample = SimpleNamespace(
            tokens=problem.tokens[i].tolist(),
            response_length=response,
            loss_mask=problem.masks[i].tolist(),
            rollout_log_probs=problem.rollout[i].tolist(),
            reward=1.0,
            metadata={"offpolicy_corr_group": ["b200", "h100"][i % 2]},
            weight_versions=[str(7 - i)],
            index=i,
            rollout_id=i,
            remove_sample=False,
            rollout_topk_token_ids=problem.head_ids[i],
            rollout_topk_log_probs=problem.head_logprobs[i],
        )
        for name in (
            "rollout_routed_experts",
            "rollout_indexer_topk",
            "train_metadata",
            "multimodal_train_inputs",
        ):
            setattr(sample, name, None)
        for name in ("teacher_log_probs", "adapter", "opd_reverse_kl", "status"):
            setattr(sample, name, None)
        sample.get_reward_value = lambda args: 1.0
        samples.append(sample)
    return samples


def converter_args(**own: Any) -> Namespace:
    more = {"reward_key": None, "rewards_normalization": False, "n_samples_per_prompt": 1}
    more |= {"rollout_top_logprobs_num": 0, "ci_test": False}
    return double.make_args(offpolicy_corr=own, custom_reward_post_process_path=None, **more)
