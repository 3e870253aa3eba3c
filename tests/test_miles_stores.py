"""What the converter made survives the object stores of Miles, Ray's and Mooncake's."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from offpolicy_corr.integrations.miles import policy_loss, transport

import miles_double as double
from miles_conversion import conversion, conversion_host, converter_args, samples_of

__all__ = ["conversion_host"]  # a fixture
pytestmark = pytest.mark.usefixtures("conversion_host")


def loss_of(batch: dict[str, Any], problem: double.Problem, args: Any) -> torch.Tensor:
    """The loss over a shard that a store handed out."""
    state = double.single()
    double.install(state)
    batch = {
        **double.make_batch(problem, args, state, "none"),
        **{k: batch[k] for k in batch if k in transport.KEYS},
    }
    logits = double.local_logits(problem, problem.logits, args, state)
    loss, _ = policy_loss(args, batch, logits, double.make_reducer(batch, args, state, problem))
    return loss


def shard_of(problem: double.Problem, args: Any) -> dict[str, Any]:
    data = transport.convert_samples(args, samples_of(problem))
    data["total_lengths"] = problem.totals
    return conversion()._package_shards(args, data, [[0, 1, 2]])[0]


def test_shards_survive_ray_s_object_store() -> None:
    ray = pytest.importorskip("ray")
    problem = double.make_problem()
    args = converter_args(groups=["b200", "h100"])
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    try:
        shard = ray.get(ray.put(shard_of(problem, args)))
        assert not shard["rollout_topk_token_ids"][0].flags.writeable
        want, _, _ = double.expected(problem, args)
        torch.testing.assert_close(loss_of(shard, problem, args), want, rtol=1e-9, atol=1e-9)
    finally:
        ray.shutdown()


def test_ray_s_worker_hook_extends_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """How torch-native trainers get the extension: they have no hook of their own."""
    ray = pytest.importorskip("ray")
    if not double.MILES_SRC:
        pytest.skip("a worker process has no double")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(double.MILES_SRC), os.environ.get("PYTHONPATH", "")])
    )
    hook = {"worker_process_setup_hook": "offpolicy_corr.integrations.miles.transport.extend_trainer"}
    options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    ray.init(**options, log_to_driver=False, runtime_env=hook)
    try:
        assert ray.get(ray.remote(lambda: sorted(transport._installed)).remote()) == ["iterator"]
    finally:
        ray.shutdown()


def test_shards_survive_mooncake_s_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Miles tells Mooncake's store how to encode each key; a store in memory stands in for the server."""
    mooncake = pytest.importorskip("mooncake.structured_object_store")
    if not hasattr(conversion(), "ROLLOUT_DATA_VALUE_SPEC"):
        pytest.skip("this Miles has one object store")
    from miles.utils import object_store

    monkeypatch.setattr(object_store, "FieldSchema", mooncake.FieldSchema)
    problem = double.make_problem()
    args = converter_args(groups=["b200", "h100"])
    shard = {
        key: value for key, value in shard_of(problem, args).items() if key in (*transport.KEYS, "tokens")
    }
    schemas = object_store._field_schemas_for_value(shard, conversion().ROLLOUT_DATA_VALUE_SPEC)
    transfer = mooncake.MooncakeBundleTransfer(MemoryStore(), key_prefix="test")
    ref = transfer.put(
        shard, type="dict", namespace="miles", chunk_bytes=None, config=None, field_schemas=schemas
    )
    found = transfer.get(mooncake.import_ref(mooncake.export_ref(ref)), type="dict")
    assert isinstance(found["rollout_topk_token_ids"][0], np.ndarray)
    want, _, _ = double.expected(problem, args)
    torch.testing.assert_close(loss_of(found, problem, args), want, rtol=1e-9, atol=1e-9)


class MemoryStore(dict):  # type: ignore[type-arg]
    """The four calls that Mooncake's transfer makes of its store."""

    def put(self, key: str, value: Any, config: Any = None) -> int:
        self[key] = bytes(value)
        return 0

    def get(self, key: str, default: Any = b"") -> Any:
        return super().get(key, default)

    def remove(self, key: str, force: bool = False) -> int:
        self.pop(key, None)
        return 0

    def is_exist(self, key: str) -> int:
        return int(key in self)
