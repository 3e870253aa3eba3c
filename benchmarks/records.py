"""Benchmark: what a record costs on the wire and on its way in, bytes and microseconds per token of every form.

    python -m offpolicy_corr.benchmarks.records [--tokens 8192] [--width 128] [--large]

``--large`` reads one 262,144-token answer with k = 128 in flat base64 in a process of its own, and reports
seconds and the memory beyond the response. Adaptive heads (`CandidateSet.trim`) are compared with fixed k on
synthetic rows of low and high entropy: bytes of the saved file, and the certificate that each costs. Everything
runs on one core.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from offpolicy_corr.integrations import sglang, vllm
from offpolicy_corr.integrations._json import parsed

import offpolicy_corr as oc
from offpolicy_corr.records.sampler_spec import SamplerSpec
from offpolicy_corr.records.tables import from_parquet, to_parquet

VOCAB = 151_936
SGLANG = SamplerSpec(engine="sglang", logprobs="temperature", vocab_size=VOCAB)
SUPPORT = SamplerSpec(engine="sglang", logprobs="support", top_p=0.97, top_k=512, vocab_size=VOCAB)
TEXTS = (("low entropy", 6.0, 0.5), ("reasoning", 5.0, 0.45), ("high entropy", 2.5, 0.4))
VLLM = SamplerSpec(engine="vllm", logprobs="processed", vocab_size=VOCAB)


def draw_heads(tokens: int, width: int, seed: int = 0) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Distinct ids and descending log-probs of heads that hold most of the mass, ``[tokens, width]``."""
    rng = np.random.default_rng(seed)
    base = min(tokens, 4096)
    ids = np.argsort(rng.random((base, 8 * width), dtype=np.float32), axis=1)[:, :width] * (
        VOCAB // (8 * width)
    )
    decay = -rng.gamma(2.0, 0.7, (base, 1)) * np.log1p(np.arange(width + 1))
    logprobs = decay - np.log(np.exp(decay).sum(1, keepdims=True))
    repeats = -(-tokens // base)
    tiled = np.tile(ids, (repeats, 1))[:tokens], np.tile(logprobs[:, :width], (repeats, 1))[:tokens]
    return tiled[0].astype(np.int32), tiled[1].astype(np.float32)


def encode(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def sglang_response(ids: NDArray[np.int32], logprobs: NDArray[np.float32], form: str) -> dict[str, Any]:
    """A ``/generate`` response whose sampled tokens are the heads' first, in "nested", "flat" or "base64" form."""
    tokens, values = ids[:, 0].tolist(), logprobs[:, 0].tolist()
    meta: dict[str, Any] = {
        "output_token_logprobs": [[v, t, None] for v, t in zip(values, tokens, strict=True)],
        "completion_tokens": len(tokens),
        "finish_reason": {"type": "length"},
    }
    key = "output_top_logprobs"
    if form == "nested":
        rows = zip(logprobs.tolist(), ids.tolist(), strict=True)
        meta[key] = [[[v, t, None] for v, t in zip(*row, strict=True)] for row in rows]
    else:
        meta |= {f"{key}_shape": list(ids.shape), f"{key}_null_prefix": 0}
        for name, array in (("val", logprobs), ("idx", ids)):
            if form == "flat":
                meta[f"{key}_{name}_flat"] = array.ravel().tolist()
            else:
                meta[f"{key}_{name}_flat_b64"] = encode(array)
                meta[f"{key}_{name}_flat_b64_dtype"] = str(array.dtype)
    return {"output_ids": tokens, "meta_info": meta}


def support_response(tokens: int, mean: float = 8.0) -> dict[str, Any]:
    """Supports of about ``mean`` ids, nearly half of them singletons."""
    rng = np.random.default_rng(1)
    sizes = np.where(rng.random(tokens) < 0.46, 1, rng.geometric(0.54 / (mean - 0.46), tokens) + 1)
    rows = [rng.dirichlet(np.ones(size)).clip(1e-6) for size in sizes]
    mask = [(np.arange(size) * 17 + 3).tolist() for size in sizes]
    values = [np.log(row / row.sum()).astype(np.float32).tolist() for row in rows]
    meta: dict[str, Any] = {"output_token_sampling_mask": mask, "output_token_sampling_logprobs": values}
    meta["finish_reason"] = {"type": "length"}
    return {"output_ids": [row[0] for row in mask], "meta_info": meta}


def vllm_response(ids: NDArray[np.int32], logprobs: NDArray[np.float32], route: str) -> dict[str, Any]:
    """A "generate", "chat" or "completions" response."""
    tokens, values = ids[:, 0].tolist(), logprobs[:, 0].tolist()
    rows = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]
    if route == "completions":
        block: dict[str, Any] = {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": values,
            "top_logprobs": [{f"token_id:{token}": value for token, value in row} for row in rows],
        }
    else:
        key, form = ("token_id", int) if route == "generate" else ("token", "token_id:{}".format)
        entries = [
            [{key: form(token), "logprob": value, "rank": rank} for rank, (token, value) in enumerate(row, 1)]
            for row in rows
        ]
        block = {"content": [row[0] | {"top_logprobs": row} for row in entries]}
    return {"choices": [{"token_ids": tokens, "logprobs": block, "finish_reason": "length"}]}


class Entry(NamedTuple):
    """What vLLM's ``Logprob`` holds."""

    logprob: float
    rank: int


def vllm_dicts(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> SimpleNamespace:
    """A ``CompletionOutput`` with one dict per row."""
    rows = [
        {token: Entry(value, rank) for rank, (token, value) in enumerate(zip(*row, strict=True), 1)}
        for row in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]
    return SimpleNamespace(token_ids=ids[:, 0].tolist(), logprobs=rows, finish_reason="length")


def vllm_flat(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> SimpleNamespace:
    """``FlatLogprobs``: the sampled entry, then the head."""
    count, width = ids.shape
    ends = ((np.arange(count) + 1) * (width + 1)).tolist()
    flat = SimpleNamespace(
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
        token_ids=np.concatenate([ids[:, :1], ids], 1).ravel().tolist(),
        logprobs=np.concatenate([logprobs[:, :1], logprobs], 1).ravel().tolist(),
        ranks=[1, *range(1, width + 1)] * count,
    )
    return SimpleNamespace(token_ids=ids[:, 0].tolist(), logprobs=flat, finish_reason="length")


def best_of(work: Callable[[], Any], times: int = 3) -> float:
    """Seconds of this process's CPU in the fastest of ``times`` runs: other load on the machine does not count."""
    seconds = []
    for _ in range(times):
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return min(seconds)


def wire_forms(tokens: int, width: int) -> list[tuple[str, float, float, float]]:
    """(form, bytes per token, µs per token to parse the JSON, µs per token from the parsed response to the record)."""
    ids, logprobs = draw_heads(tokens, width)
    forms: list[tuple[str, Any, Callable[[Any], Any]]] = [
        (f"SGLang {form}", sglang_response(ids, logprobs, form), lambda r: sglang.read_generate(r, SGLANG))
        for form in ("nested", "flat", "base64")
    ]
    forms.append(
        ("SGLang support, mean 8", support_response(tokens), lambda r: sglang.read_generate(r, SUPPORT))
    )
    forms += [
        (f"vLLM {route} JSON", vllm_response(ids, logprobs, route), lambda r: vllm.read_json(r, VLLM))
        for route in ("generate", "chat", "completions")
    ]
    rows = []
    for name, response, read in forms:
        text = json.dumps(response, separators=(",", ":")).encode()
        parsing = best_of(lambda text=text: parsed(text))  # type: ignore[misc]
        reading = best_of(lambda response=response, read=read: read(response))  # type: ignore[misc]
        rows.append((name, len(text) / tokens, parsing / tokens * 1e6, reading / tokens * 1e6))
    for name, build in (("FlatLogprobs", vllm_flat), ("dict rows", vllm_dicts)):
        output = build(ids, logprobs)
        reading = best_of(lambda output=output: vllm.read_output(output, VLLM, top_logprobs=width))  # type: ignore[misc]
        rows.append((f"vLLM {name} (Python)", float("nan"), 0.0, reading / tokens * 1e6))
    return rows


def disk_forms(record: oc.SamplerRecord) -> list[tuple[str, float, float, float]]:
    """(form, bytes per token, µs per token to write and flush, µs per token to read and verify)."""
    forms: list[tuple[str, Callable[[Path], Any], Callable[[Path], Any]]] = [
        ("safetensors, mapped", lambda path: oc.save_records(record, path), oc.load_records),
        ("safetensors, compact", lambda path: oc.save_records(record, path, compact=True), oc.load_records),
        ("Parquet", lambda path: to_parquet(record, path), from_parquet),
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, write, read in forms:
            path = Path(folder) / "record"
            writing, reading = best_of(lambda w=write, p=path: w(p)), best_of(lambda r=read, p=path: r(p))  # type: ignore[misc]
            times = [seconds / len(record) * 1e6 for seconds in (writing, reading)]
            rows.append((name, path.stat().st_size / len(record), times[0], times[1]))
    return rows


def text_like(
    tokens: int, median: float, spread: float, seed: int = 3
) -> tuple[oc.SamplerRecord, torch.Tensor]:
    """A fleet's record with heads of 128, and the entropy (nats) of each token's distribution.

    Rows are p ∝ rank^−s over 4096 ids, with s log-normal from row to row. ``median=5, spread=0.45`` has the
    supports published for reasoning at top_p = 0.97 (46 % singletons, median 2, prime-rl #2979) with a lighter
    mean and 99th percentile (5.2 and 59 against 8 and 82).
    """
    generator = torch.Generator().manual_seed(seed)
    steepness = median * (spread * torch.randn(tokens, 1, generator=generator)).exp()
    logprobs = (-steepness * torch.arange(1, 4097).log()).log_softmax(1)
    entropy = -(logprobs.exp() * logprobs).sum(1)
    first = torch.randint(VOCAB, (tokens, 1), generator=generator)
    ids = (first + 7919 * torch.arange(4096)) % VOCAB  # distinct within a row: the step is prime to the size
    drawn = torch.multinomial(logprobs.exp(), 1, generator=generator)
    record = oc.SamplerRecord(
        ids.gather(1, drawn).squeeze(1),
        logprobs.gather(1, drawn).squeeze(1),
        oc.CandidateSet.from_topk(ids[:, :128].int(), logprobs[:, :128]),
        group=torch.arange(tokens) * 8 // tokens,
        group_names=tuple(f"group {index}" for index in range(8)),
        weight_version=40 + torch.arange(tokens) * 3 // tokens,
    )
    return record.validate(VOCAB), entropy


def file_bytes(record: oc.SamplerRecord, compact: bool) -> float:
    """Bytes per token of the whole file that ``save_records`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record"
        oc.save_records(record, path, compact)
        return path.stat().st_size / len(record)


def adaptive_heads(text: oc.SamplerRecord) -> list[tuple[str, float, float, float, float, float]]:
    """(head, candidates per token, bytes per token in the file and in the compact file, mean mass, mean certificate
    of `MaskedIS`)."""
    full = text.candidates
    assert full is not None
    choices = {"k = 128": full, "k = 20": full.trim(1.0, 20)}
    choices |= {f"mass {mass}": full.trim(mass) for mass in (0.99, 0.999, 0.9999)}
    rows = []
    for name, head in choices.items():
        record = replace(text, candidates=head)
        sizes = file_bytes(record, False), file_bytes(record, True)
        certificate = float(head.certificate(oc.MaskedIS()).mean())
        rows.append((name, len(head.ids) / len(head), *sizes, float(head.mass().mean()), certificate))
    return rows


def read_large(tokens: int = 262_144, width: int = 128) -> tuple[float, float, float, float]:
    """Seconds on the clock and of CPU to read once; MB beyond the response at the peak; MB of the record."""
    response = sglang_response(*draw_heads(tokens, width), form="base64")
    sglang.read_generate(sglang_response(*draw_heads(64, width), form="base64"), SGLANG)
    before = _memory("VmRSS")
    _reset_peak()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    record = sglang.read_generate(response, SGLANG)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    assert isinstance(record, oc.SamplerRecord) and record.candidates is not None
    size = 8 * record.candidates.ids.numel() + 8 * 3 * len(record)
    return seconds, cpu, _memory("VmHWM") - before, size / 1e6


def _memory(field: str) -> float:
    """MB of this process, from the kernel."""
    with open("/proc/self/status") as status:
        return next(float(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith(field))


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="bytes and microseconds per token of every record form")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--only-large", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.only_large:
        print(json.dumps(read_large()))
        return
    print(f"{options.tokens} tokens, k = {options.width}")
    print(f"{'form':28} {'B/token':>9} {'parse µs':>9} {'read µs':>9}")
    for name, size, parsing, reading in wire_forms(options.tokens, options.width):
        print(f"{name:28} {size:9.0f} {parsing:9.2f} {reading:9.2f}")
    print(f"\n{'on disk (k = 128)':28} {'B/token':>9} {'write µs':>9} {'read µs':>9}")
    for name, size, writing, reading in disk_forms(text_like(options.tokens, *TEXTS[1][1:])[0]):
        print(f"{name:28} {size:9.0f} {writing:9.2f} {reading:9.2f}")
    print(
        "\nSynthetic text; whole files of a fleet's record: tokens, log-probs, groups, versions, candidates."
    )
    for text, median, spread in TEXTS:
        record, entropy = text_like(options.tokens, median, spread)
        middle = float(entropy.median())
        print(f"\n{text}: entropy {float(entropy.mean()):.2f} nats on average, {middle:.2f} in the middle")
        print(f"{'head':12} {'ids':>7} {'B/token':>9} {'compact':>9} {'mass':>9} {'certificate':>12}")
        for head, ids, size, compact, mass, certificate in adaptive_heads(record):
            print(f"{head:12} {ids:7.2f} {size:9.1f} {compact:9.1f} {mass:9.5f} {certificate:12.2e}")
    if options.large:
        command = [sys.executable, "-m", "offpolicy_corr.benchmarks.records", "--only-large"]
        reply = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds, cpu, beyond, size = json.loads(reply)
        print(f"\n262,144 tokens, k = 128, flat base64: {seconds:.2f} s ({cpu:.2f} s of CPU) from the parsed")
        print(f"response to the record, {beyond:.0f} MB beyond the response ({size:.0f} MB are the record)")


if __name__ == "__main__":
    main()
