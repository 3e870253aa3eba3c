"""Records: what the sampler recorded of every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..csr import as_index
from .candidates import CandidateSet
from .sampler_spec import SamplerSpec, check_fleet
from .validation import check_record


@dataclass(frozen=True, eq=False)
class SamplerRecord:
    """Tokens of one packed row of length ``T`` and what their samplers recorded.

    Args:
        tokens: the sampled ids, integer ``[T]``.
        logprobs: log-probabilities (nats, ``[T]``) under the distribution *really sampled from*: after
            temperature and after top-p, top-k, min-p. None where they were not recorded; a rule that weights by
            the ratio then cannot be used.
        candidates: `CandidateSet` of ``T`` rows, or None.
        temperature: the sampling temperature, a float or a floating ``[T]`` tensor (a fleet can mix it).
        group: int64 ``[T]``, index of the sampler group into ``group_names``.
        group_names: names of the groups.
        weight_version: int64 ``[T]``, the version of the weights that drew the token; −1 is "undeclared".
        version_names: the engine's own names of versions, where ``weight_version`` indexes them.
        specs: what was declared of the samplers behind these tokens, each once; readers fill it in, and it goes
            wherever the record goes, into files too.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    candidates: CandidateSet | None = None
    temperature: float | Tensor = 1.0
    group: Tensor | None = None
    group_names: tuple[str, ...] = ()
    weight_version: Tensor | None = None
    version_names: tuple[str, ...] | None = None
    specs: tuple[SamplerSpec, ...] = ()

    def __len__(self) -> int:
        return self.tokens.numel()

    def select(self, index: Tensor) -> SamplerRecord:
        """The tokens ``index`` (int64, or bool ``[T]``), in that order, with everything that belongs to them."""
        index = as_index(index, len(self))
        return SamplerRecord(
            self.tokens[index],
            _index(self.logprobs, index),
            None if self.candidates is None else self.candidates.select(index),
            self.temperature[index] if isinstance(self.temperature, Tensor) else self.temperature,
            _index(self.group, index),
            self.group_names,
            _index(self.weight_version, index),
            self.version_names,
            self.specs,
        )

    def narrow(self, row_slice: slice) -> SamplerRecord:
        """The consecutive tokens ``row_slice``, as views; `select` would copy them. On a GPU it waits for the
        device."""
        candidates = self.candidates
        if candidates is not None:
            bounds = candidates.offsets[[row_slice.start, row_slice.stop]].tolist()
            candidates = candidates.narrow(row_slice, slice(*bounds))
        temperature = self.temperature
        return replace(
            self,
            tokens=self.tokens[row_slice],
            logprobs=_index(self.logprobs, row_slice),
            candidates=candidates,
            temperature=temperature[row_slice] if isinstance(temperature, Tensor) else temperature,
            group=_index(self.group, row_slice),
            weight_version=_index(self.weight_version, row_slice),
        )

    def to(self, device: torch.device | str) -> SamplerRecord:
        """The same record on another device."""
        return SamplerRecord(
            self.tokens.to(device),
            _to(self.logprobs, device),
            None if self.candidates is None else self.candidates.to(device),
            self.temperature.to(device) if isinstance(self.temperature, Tensor) else self.temperature,
            _to(self.group, device),
            self.group_names,
            _to(self.weight_version, device),
            self.version_names,
            self.specs,
        )

    @staticmethod
    def concat(records: Sequence[SamplerRecord]) -> SamplerRecord:
        """All tokens of ``records`` in one packed row; names of groups and versions, and specs, are merged.

        Raises:
            ValueError: no records; log-probs or groups recorded in some and missing in others; names in some and
                bare numbers in others. Where some have candidates, the others' tokens get empty heads; a missing
                weight version becomes −1.
            RecordError: specs whose tokens may not be mixed, see `spec.check_fleet`.
        """
        if not records:
            raise ValueError("concat needs at least one record")
        specs = tuple(dict.fromkeys(spec for record in records for spec in record.specs))
        check_fleet(specs, strict=False)
        candidates = None
        if any(r.candidates is not None for r in records):
            candidates = CandidateSet.concat(
                [
                    CandidateSet.empty(len(r), r.tokens.device) if r.candidates is None else r.candidates
                    for r in records
                ]
            )
        group, group_names = _concat_named(records, "group", "group_names", missing=None)
        version, version_names = _concat_named(records, "weight_version", "version_names", missing=-1)
        return SamplerRecord(
            torch.cat([r.tokens for r in records]),
            _concat_all(records, "logprobs"),
            candidates,
            _concat_temperature(records),
            group,
            group_names or (),
            version,
            version_names,
            specs,
        )

    def validate(
        self,
        vocab_size: int | None = None,
        loss_mask: Tensor | None = None,
        sequence_ids: Tensor | None = None,
    ) -> SamplerRecord:
        """Check every trained token (``loss_mask`` true, or all); returns self. One host sync on CUDA.

        On a CPU the checks work some hundred thousand candidates at a time, in bounded memory.

        Raises:
            RecordError: naming the first token at fault. Tolerances: log-prob ≤ 1e-6; mass of a head
                ≤ 1 + 1e-3, of a complete set 1 ± 1e-4; the sampled token's value among the candidates equals
                its own log-prob to rtol 1e-4 / atol 1e-5.
        """
        check_record(self, vocab_size, loss_mask, sequence_ids)
        return self


def missing_tokens(record: SamplerRecord) -> Tensor:
    """Tokens that a reader marked as missing (``on_missing="mask"``): bool ``[T]``, true where log q is NaN.

    Such tokens have no q: AND the complement into the loss mask, so that they leave the loss and the
    denominators. A loss mask that still trains one of them is refused by ``record.validate``. Their number is
    the sum.

    Raises:
        ValueError: the record holds no log-probs at all.
    """
    if record.logprobs is None:
        raise ValueError("this record holds no log-probs: every token is missing one")
    return record.logprobs.isnan()


def _index(tensor: Tensor | None, index: Tensor | slice) -> Tensor | None:
    return None if tensor is None else tensor[index]


def _to(tensor: Tensor | None, device: torch.device | str) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _concat_all(records: Sequence[SamplerRecord], name: str) -> Tensor | None:
    parts = [getattr(r, name) for r in records if len(r)] or [getattr(records[0], name)]
    if all(part is None for part in parts):
        return None
    if any(part is None for part in parts):
        raise ValueError(f"some records have {name} and others do not; record it everywhere")
    return torch.cat(parts)


def _concat_named(
    records: Sequence[SamplerRecord], name: str, names: str, missing: int | None
) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Concatenate an index field whose meaning depends on each record's own tuple of names."""
    parts = [getattr(r, name) for r in records]
    if all(part is None for part in parts):
        return None, None
    if missing is None and any(part is None and len(r) for part, r in zip(parts, records, strict=True)):
        raise ValueError(f"some records have {name} and others do not; record it everywhere")
    tables = [(part, getattr(r, names)) for r, part in zip(records, parts, strict=True) if part is not None]
    merged = tuple(dict.fromkeys(label for _, table in tables for label in table or ()))
    if merged and any(not table and bool((part >= 0).any()) for part, table in tables):
        if any(table and bool((part >= 0).any()) for part, table in tables):
            raise ValueError(f"some records have {names} and others do not; give it everywhere or nowhere")
        merged = ()  # names that no token has
    out = []
    for record, part in zip(records, parts, strict=True):
        if part is None:
            filler = 0 if missing is None else missing
            out.append(torch.full((len(record),), filler, dtype=torch.int64, device=record.tokens.device))
        elif merged:
            own = [merged.index(label) for label in getattr(record, names) or ()]
            table = torch.tensor([*own, len(merged)], device=part.device)  # what has no name still has none
            out.append(torch.where(part >= 0, table[part.clamp(0, len(own))], part))
        else:
            out.append(part)
    return torch.cat(out), merged or None


def _concat_temperature(records: Sequence[SamplerRecord]) -> float | Tensor:
    given = [r.temperature for r in records]
    first = given[0]
    if not isinstance(first, Tensor) and all(not isinstance(t, Tensor) and t == first for t in given):
        return first
    dtype = torch.float64 if any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in given) else None
    return torch.cat(
        [
            t if isinstance(t, Tensor) else torch.full((len(r),), t, dtype=dtype, device=r.tokens.device)
            for t, r in zip(given, records, strict=True)
        ]
    )
