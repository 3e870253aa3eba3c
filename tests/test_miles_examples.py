"""The Miles examples: every YAML passes the check with the arguments its launch script prints; generate.py records."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from offpolicy_corr.integrations.miles import Settings, check_main
from offpolicy_corr.integrations.miles.option_check import problems
from offpolicy_corr.integrations.miles.options import LOSS

import miles_double as double
import offpolicy_corr as oc

yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).parent.parent / "examples" / "miles"
CONFIGS = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def generate_module() -> Any:
    spec = importlib.util.spec_from_file_location("miles_example_generate", FOLDER / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_three() -> None:
    assert CONFIGS == ["homogeneous_b200", "mixed_fleet", "mixed_fleet_top_p"]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_check_passes_without_a_note(config: str, capsys: Any) -> None:
    printed = subprocess.run(
        ["bash", str(FOLDER / "launch.sh"), "--print", config], capture_output=True, text=True
    )
    assert printed.returncode == 0, printed.stderr
    launch = shlex.split(printed.stdout)
    assert launch[launch.index("--rollout-batch-size") + 1] == "128"
    assert launch[launch.index("--lr") + 1] == "1e-6"
    assert check_main([str(FOLDER / f"{config}.yaml"), *launch]) == 0
    out = capsys.readouterr().out
    assert "note:" not in out
    assert ("return_sampling_mask" in out) == config.endswith("top_p")
    # who groups its samplers stamps them; who does not leaves recording to Miles
    fleet = config != "homogeneous_b200"
    assert ("--custom-generate-function-path" in launch) == fleet != ("--rollout-top-logprobs-num" in launch)


# what Megatron's and SGLang's parsers own, and what Miles has with native score centering alone
OTHERS = "optimizer lr-decay-style weight-decay adam-beta1 adam-beta2 attention-backend sglang-dtype"
OTHERS += " sglang-kv-cache-dtype rollout-top-logprobs-num"
MEGATRON = {"lr": 1e-6, "context_parallel_size": 1, "world_size": 8, "num_layers": 2, "num_experts": None}
MEGATRON |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": False}
MEGATRON |= {"seq_length": 1, "load": None, "save": None, "ckpt_step": None, "finetune": True}
MEGATRON |= {"no_load_optim": False, "no_load_rng": False, "padded_vocab_size": None}


@pytest.mark.skipif(not double.MILES_SRC, reason="MILES_SRC is not set")
@pytest.mark.parametrize("config", CONFIGS)
def test_miles_own_parser_takes_the_launch_and_applies_the_file(config: str) -> None:
    double.install(double.single())
    try:
        arguments = importlib.import_module("miles.utils.arguments")
    except ImportError as error:
        pytest.skip(f"this Miles cannot be imported whole here: {error}")
    command = ["bash", str(FOLDER / "launch.sh"), "--print", config]
    launch = shlex.split(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    launch += ["--num-rollout", "1", "--hf-checkpoint", "none", "--prompt-data", "none"]
    launch += ["--actor-num-gpus-per-node", "8", "--actor-num-nodes", "1", "--rollout-num-gpus", "8"]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.get_miles_extra_args_provider()(parser)
    args, unknown = parser.parse_known_args(launch)
    left = {word[2:] for word in unknown if word.startswith("--")}
    if "fully-async" in left:
        pytest.skip("this Miles is older than v0.1.0")
    assert left <= set(OTHERS.split())
    for name, value in MEGATRON.items():
        setattr(args, name, getattr(args, name, value))
    arguments.miles_validate_args(args)
    assert args.loss_type == "custom_loss"
    assert args.use_rollout_logprobs
    assert Settings.of(args.offpolicy_corr).correction == oc.Correction()
    assert problems(args, Settings.of(args.offpolicy_corr), LOSS) == []


def test_shares_of_the_fleet_are_kept() -> None:
    fleet = yaml.safe_load((FOLDER / "mixed_fleet.yaml").read_text())["offpolicy_corr_fleet"]
    assert sum(group["share"] for group in fleet.values()) == pytest.approx(1.0)
    counts = Counter(generate_module().choose_group(fleet, index) for index in range(1000))
    for name, group in fleet.items():
        assert counts[name] == pytest.approx(1000 * group["share"], abs=5)


def test_generate_attaches_the_record_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, Any] = {}
    answer = {
        "text": "ab",
        "output_ids": [5, 7],
        "meta_info": {
            "output_token_logprobs": [[-0.5, 5, None], [-1.0, 7, None]],
            "output_top_logprobs": [[[-0.5, 5, None], [-1.2, 3, None]], [[-0.9, 2, None], [-1.0, 7, None]]],
            "completion_tokens": 2,
            "finish_reason": {"type": "stop"},
        },
    }

    async def post(url: str, payload: dict[str, Any]) -> Any:
        sent.update(payload, url=url)
        return answer

    async def update(args: Any, sample: Any, payload: Any, output: Any) -> None:
        sample.tokens, sample.response_length = [1, 5, 7], 2

    for name, content in {
        "miles": {},
        "miles.rollout": {},
        "miles.utils": {},
        "miles.rollout.generate_utils": {},
        "miles.rollout.base_types": {"GenerateFnOutput": SimpleNamespace},
        "miles.utils.http_utils": {"post": post},
        "miles.rollout.generate_utils.generate_endpoint_utils": {
            "compute_prompt_ids_from_sample": lambda state, sample: [1],
            "compute_request_payload": lambda args, input_ids, sampling_params: (
                {"input_ids": input_ids},
                None,
            ),
            "update_sample_from_response": update,
        },
    }.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    args = SimpleNamespace(
        offpolicy_corr={"groups": ["h100-fp8"]},
        offpolicy_corr_fleet={"h100-fp8": {"url": "http://h100-fp8:30000", "share": 1.0}},
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
    )
    sample = SimpleNamespace(response="", group_index=3, metadata={})
    job = SimpleNamespace(args=args, sample=sample, sampling_params={}, state=None, evaluation=False)
    asyncio.run(generate_module().generate(job))
    assert sent["url"] == "http://h100-fp8:30000/generate"
    assert sent["top_logprobs_num"] == 128
    assert sample.offpolicy_corr_group == "h100-fp8"
    assert sample.rollout_topk_token_ids.tolist() == [[5, 3], [2, 7]]
    assert sample.rollout_log_probs == pytest.approx([-0.5, -1.0])
    sent.clear()
    evaluated = SimpleNamespace(response="", group_index=3, metadata={})
    asyncio.run(
        generate_module().generate(SimpleNamespace(**{**vars(job), "sample": evaluated, "evaluation": True}))
    )
    assert "top_logprobs_num" not in sent
    assert not hasattr(evaluated, "rollout_topk_token_ids")


def test_the_stubs_stand_in_for_sglang(tmp_path: Path) -> None:
    """What docs/miles.md makes for a run on a checkout of Miles."""
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("miles_stubs.py")), str(tmp_path)], check=True
    )
    code = (
        "from sglang.srt.entrypoints.openai.protocol import Tool\n"
        "from sglang_router.launch_router import RouterArgs\n"
        "RouterArgs.add_cli_args(None, use_router_prefix=True)\n"
        "assert Tool.__name__ == 'Tool' and isinstance(RouterArgs, type)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
