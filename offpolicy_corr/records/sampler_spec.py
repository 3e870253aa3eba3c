"""Records: `SamplerSpec`, what a sampler group is and what its log-probs mean. Declared, never guessed.

No engine echoes any of this in its answers (version strings apart), so whoever configures the fleet states it
once per group, and every reader and every assembly checks against it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .errors import RecordError

SEMANTICS = ("raw", "temperature", "processed", "support")
NUMERICS = (
    "weights",
    "activations",
    "kv_cache",
    "scale_format",
    "architecture",
    "kernels",
    "sampling_backend",
)
TEXTS = (*NUMERICS, "group", "engine_version", "speculative", "tokenizer_hash")
LOGIT_MODES = ("raw_logits", "processed_logits")
VLLM_LOWEST_TEMPERATURE = 0.01  # vLLM raises a positive temperature below this to it, silently
VLLM_UNSCALED_PROCESSED = (0, 10, 0)  # the last vLLM whose processed log-probs left temperature out


@dataclass(frozen=True, kw_only=True)
class SamplerSpec:
    """One sampler group: its engine, the meaning of its log-probs, its sampling parameters, its numerics.

    Args:
        engine: ``"sglang"``, ``"vllm"``, or another engine's name.
        logprobs: what the recorded log-probs are normalized over. ``"raw"``: the vocabulary at temperature 1,
            before filters. ``"temperature"``: the vocabulary after temperature, before filters (SGLang's
            ``output_token_logprobs``). ``"processed"``: after temperature and filters. ``"support"``: the
            same, with a value for every id of the support.
        temperature, top_p, top_k, min_p: as requested; ``top_k`` None, 0 or −1 is off.
        repetition_penalty, presence_penalty, frequency_penalty: as requested; 1, 0, 0 are off.
        constrained: a logit bias, bad words, a grammar or a custom processor changed the logits.
        group: name of the sampler group; strict assembly requires it.
        engine_version: for example ``"0.33.0"``.
        dialect: ``"slime"`` for slime's patched SGLang, whose ``output_token_logprobs`` are after filters.
        rescored_temperature: where the log-probs come from a later pass and not from the sampler, its
            temperature.
        weights, activations, kv_cache: numeric formats, for example ``"nvfp4"``, ``"fp8"``, ``"bf16"``.
        scale_format: of quantized blocks, for example ``"ue8m0"``.
        architecture, kernels, sampling_backend: for example ``"sm100"``, ``"cutlass"``, ``"flashinfer"``. The
            same weight format runs through different kernels on different GPUs, so a precision alone names no
            numeric.
        speculative: algorithm of speculative decoding, None for none.
        tokenizer_hash: any stable hash; groups that differ must not be mixed.
        vocab_size: ids that the tokenizer knows; every recorded id must lie below.
        logits_width: columns of the engine's logits, padding included.

    Raises:
        RecordError: the log-probs would not be log q under these parameters; the remedy names the setting
            that would make them so. Also for values outside their range.
    """

    engine: str
    logprobs: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    constrained: bool = False
    group: str | None = None
    engine_version: str | None = None
    dialect: str | None = None
    rescored_temperature: float | None = None
    weights: str | None = None
    activations: str | None = None
    kv_cache: str | None = None
    scale_format: str | None = None
    architecture: str | None = None
    kernels: str | None = None
    sampling_backend: str | None = None
    speculative: str | None = None
    tokenizer_hash: str | None = None
    vocab_size: int | None = None
    logits_width: int | None = None

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_origin(self)
        _check_semantics(self)

    @property
    def limit(self) -> int | None:
        """The finite top-k, or None."""
        return self.top_k if self.top_k is not None and self.top_k > 0 else None

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p keeps the sampler from drawing some of the vocabulary."""
        return self.top_p < 1.0 or self.limit is not None or self.min_p > 0.0

    @property
    def penalizes(self) -> bool:
        """Whether anything but temperature and the filters changed the logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or self.constrained


def _refuse(problem: str, field: str, value: Any, remedy: str) -> None:
    raise RecordError(problem, field=f"spec.{field}", value=value, remedy=remedy)


def _check_ranges(spec: SamplerSpec) -> None:
    def number(name: str, ok: Callable[[float], bool], want: str) -> None:
        value = getattr(spec, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            _refuse(f"{name} must be a Python number", name, value, f"Give float({name}).")
        if not (math.isfinite(value) and ok(value)):
            _refuse(f"{name} is out of range", name, value, want)

    if not isinstance(spec.engine, str) or not spec.engine:
        _refuse("an engine must be named", "engine", spec.engine, "For example engine='sglang'.")
    for name in TEXTS:
        if not isinstance(getattr(spec, name), (str, type(None))):
            _refuse(f"{name} must be text", name, getattr(spec, name), "Give a string, or leave it out.")
    if not isinstance(spec.constrained, bool):
        _refuse("constrained must be a bool", "constrained", spec.constrained, "Give True or False.")
    number("temperature", lambda x: x > 0, "Greedy decoding has no q to correct with: sample at T > 0.")
    number("top_p", lambda x: 0 < x <= 1, "top_p lies in (0, 1]; 1 is off.")
    number("min_p", lambda x: 0 <= x < 1, "min_p lies in [0, 1); 0 is off.")
    number("repetition_penalty", lambda x: x > 0, "A repetition penalty is positive; 1 is off.")
    for name in ("presence_penalty", "frequency_penalty"):
        number(name, lambda x: True, "A penalty is a finite number; 0 is off.")
    for name in ("top_k", "vocab_size", "logits_width"):
        lowest = -1 if name == "top_k" else 1
        value = getattr(spec, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            _refuse(f"{name} must be a Python integer", name, value, f"Give int({name}), or None.")
        if value < lowest:
            _refuse(f"{name} is out of range", name, value, "Give a positive integer, or None.")
    if spec.vocab_size and spec.logits_width and spec.vocab_size > spec.logits_width:
        remedy = f"vocab_size {spec.vocab_size} cannot exceed the columns of the logits."
        _refuse("the logits are narrower than the vocabulary", "logits_width", spec.logits_width, remedy)


def _check_origin(spec: SamplerSpec) -> None:
    if spec.dialect not in (None, "slime"):
        _refuse("unknown dialect", "dialect", spec.dialect, "Leave it out, or use 'slime'.")
    if spec.dialect == "slime" and (spec.engine, spec.logprobs) != ("sglang", "processed"):
        remedy = "slime's patched SGLang reports post-filter values: engine='sglang', logprobs='processed'."
        _refuse("the slime dialect is a patched SGLang", "dialect", spec.dialect, remedy)
    rescored = spec.rescored_temperature
    if rescored is not None and rescored != spec.temperature:
        remedy = f"Score again at T = {spec.temperature}, or keep the sampler's own log-probs."
        _refuse("log-probs were recomputed at another temperature", "rescored_temperature", rescored, remedy)
    if rescored is not None and spec.truncates and spec.logprobs != "support":
        remedy = (
            "Score again over the recorded support (logprobs='support'), or keep the sampler's own values."
        )
        _refuse("log-probs recomputed without the sampler's filters", "logprobs", spec.logprobs, remedy)


def _check_semantics(spec: SamplerSpec) -> None:
    if spec.logprobs in LOGIT_MODES:
        remedy = "Start vLLM with --logprobs-mode processed_logprobs."
        _refuse("logits are not log-probs", "logprobs", spec.logprobs, remedy)
    if spec.logprobs not in SEMANTICS:
        _refuse(
            "unknown meaning of log-probs", "logprobs", spec.logprobs, f"Use one of {', '.join(SEMANTICS)}."
        )
    if spec.engine == "vllm":
        _check_vllm(spec)
    if spec.logprobs == "raw" and spec.temperature != 1.0:
        problem = f"raw log-probs are not log q at T = {spec.temperature}: they leave temperature out"
        _refuse(problem, "logprobs", "raw", _remedy(spec))
    if spec.logprobs in ("raw", "temperature") and spec.truncates:
        problem = f"log-probs from before the filters are not log q ({_filters(spec)})"
        _refuse(problem, "logprobs", spec.logprobs, _remedy(spec))


def _check_vllm(spec: SamplerSpec) -> None:
    if spec.logprobs == "temperature":
        remedy = "Start vLLM with --logprobs-mode processed_logprobs and declare logprobs='processed'."
        _refuse(
            "vLLM has no log-probs after temperature and before filters", "logprobs", "temperature", remedy
        )
    if spec.temperature < VLLM_LOWEST_TEMPERATURE:
        remedy = f"The engine samples at {VLLM_LOWEST_TEMPERATURE}: declare that."
        _refuse("vLLM raises so low a temperature", "temperature", spec.temperature, remedy)
    if spec.logprobs == "raw" and spec.penalizes:
        remedy = "They are taken before penalties and biases. " + _remedy(spec)
        _refuse("raw log-probs are not log q under penalties", "logprobs", "raw", remedy)
    version = _version(spec.engine_version)
    scaled = spec.logprobs in ("processed", "support") and spec.temperature != 1.0
    if scaled and version is not None and version <= VLLM_UNSCALED_PROCESSED:
        remedy = "Use a later vLLM, or T = 1."
        problem = "this vLLM's processed log-probs leave temperature out"
        _refuse(problem, "engine_version", spec.engine_version, remedy)


def _version(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    found = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", text)  # "0.10.0rc1", "v0.10.0+cpu" and their like
    return None if found is None else tuple(int(part or 0) for part in found.groups())


def _filters(spec: SamplerSpec) -> str:
    named = {"top_p": spec.top_p < 1, "top_k": spec.limit is not None, "min_p": spec.min_p > 0}
    return ", ".join(f"{name} = {getattr(spec, name)}" for name, on in named.items() if on)


def _remedy(spec: SamplerSpec) -> str:
    if spec.engine == "vllm":
        return "Start vLLM with --logprobs-mode processed_logprobs and declare logprobs='processed'."
    if spec.engine == "sglang" and spec.truncates:
        fields = "return_sampling_mask=true with sampling_logprobs_mode='support'"
        return f"Ask SGLang for {fields} and a finite top_k, and declare logprobs='support'."
    if spec.engine == "sglang":
        return "Unset SGLANG_RETURN_ORIGINAL_LOGPROB and declare logprobs='temperature'."
    return "Record log-probs after temperature and filters, and declare logprobs='processed'."


def check_fleet(specs: Sequence[SamplerSpec], strict: bool = True) -> None:
    """Check that answers of these groups may stand in one batch.

    Args:
        specs: one per group or per answer.
        strict: also require that every spec names its group.

    Raises:
        RecordError: a group without a name (strict), two specs with one name and different engines or
            numerics, or tokenizers or vocabulary sizes that differ.
    """
    named: dict[str, SamplerSpec] = {}
    for spec in specs:
        if spec.group is None:
            if strict:
                remedy = "Give SamplerSpec(group=...), or assemble with strict=False."
                raise RecordError(
                    "a sampler group has no name", field="spec.group", value=None, remedy=remedy
                )
            continue
        seen = named.setdefault(spec.group, spec)
        differing = [name for name in ("engine", *NUMERICS) if getattr(seen, name) != getattr(spec, name)]
        if differing:
            remedy = f"They differ in {', '.join(differing)}: give each its own name."
            raise RecordError(
                "two samplers share a name", field="spec.group", value=spec.group, remedy=remedy
            )
    for name in ("tokenizer_hash", "vocab_size"):
        values = sorted({str(getattr(spec, name)) for spec in specs if getattr(spec, name) is not None})
        if len(values) > 1:
            remedy = "Ids of different tokenizers mean different texts: never mix them in one batch."
            raise RecordError(f"groups differ in {name}", field=f"spec.{name}", value=values, remedy=remedy)


def specs_to_plain(specs: Sequence[SamplerSpec]) -> list[dict[str, Any]]:
    """Specs as JSON can hold them; fields at their defaults are left out."""
    defaults = asdict(SamplerSpec(engine="-", logprobs="processed"))
    required = ("engine", "logprobs")
    return [
        {name: value for name, value in asdict(spec).items() if name in required or value != defaults[name]}
        for spec in specs
    ]


def specs_from_plain(value: Any) -> tuple[SamplerSpec, ...]:
    """What `specs_to_plain` wrote.

    Raises:
        RecordError: anything else, or a spec that this release refuses.
    """
    try:
        return tuple(SamplerSpec(**fields) for fields in value)
    except TypeError as error:
        remedy = "They were damaged, or written by a later release: upgrade offpolicy-corr."
        raise RecordError(f"not a list of specs ({str(error)[:80]})", field="specs", remedy=remedy) from None
