"""Records: files on disk, one safetensors file per batch, memory-mapped, with a versioned header and checksums.

Nothing is rounded. Candidates are mapped as they are; the columns with one integer per token take as few bytes as
their values need (a column of equal values takes none) and are unpacked on loading.

A file is complete or absent: it is written beside its place, flushed, and renamed. Every byte that matters is
covered by a checksum, so a truncated or corrupt file raises instead of training.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .candidates import CandidateSet
from .errors import RecordError
from .packing import pack, unpack
from .record import SamplerRecord
from .sampler_spec import specs_from_plain, specs_to_plain
from .trajectory import Batch, Trajectory

FORMAT = "offpolicy_corr.record"
VERSION = 3  # 1: no specs, columns not packed; 2: no mask, no sequence ids
_HEADER, _CHECKSUM = "header", "header_crc32"
_TENSORS = ("tokens", "logprobs", "temperature", "group", "weight_version")
_ROWS = ("ids", "logprobs", "offsets", "complete")
ATTEMPTS = 100  # to read a file that others replace
REMEDY = "Write the record again from its source; the file cannot be trusted."


def save_records(
    data: SamplerRecord | Trajectory | Batch, path: str | os.PathLike[str], compact: bool = False
) -> None:
    """Write a batch to ``path``. A process killed at any moment leaves the old file, or none.

    Args:
        data: a batch, or a trajectory or record that becomes one (see `Batch.of`): record, loss mask, sequence ids and
            the number of missing tokens are saved.
        compact: pack candidate ids too, 3 bytes each below 16.8 million: the file of a head is about an eighth
            smaller, and its ids are unpacked on loading instead of mapped.

    Raises:
        ImportError: safetensors is missing (``pip install offpolicy-corr[records]``).
    """
    library = _safetensors()
    columns: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    batch = Batch.of(data)
    record = batch.record
    for name, tensor in batch_tensors(batch).items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.is_floating_point() or (name == "candidates.ids" and not compact):
            shared = any(_overlap(tensor, other) for other in tensors.values())
            tensors[name] = tensor.clone() if shared else tensor  # the format has no shared memory
            continue
        if name == "candidates.offsets":  # its differences are small numbers
            tensor = tensor.diff(prepend=tensor.new_zeros(1))
        columns[name], packed = pack(tensor)
        if packed is not None:
            tensors[name] = packed
    header = json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "temperature": None if isinstance(record.temperature, Tensor) else float(record.temperature),
            "group_names": list(record.group_names),
            "version_names": None if record.version_names is None else list(record.version_names),
            "specs": specs_to_plain(record.specs),
            "missing": batch.missing,
            "columns": columns,
            "tensors": {name: _describe(tensor) for name, tensor in tensors.items()},
        },
        sort_keys=True,
    )
    metadata = {_HEADER: header, _CHECKSUM: str(zlib.crc32(header.encode()))}
    write_atomically(path, lambda partial: library.torch.save_file(tensors, partial, metadata))


def load_records(path: str | os.PathLike[str], verify: bool = True) -> Batch:
    """The batch at ``path``, its record with specs; candidates are mapped, pages come in as they are read.

    ``batch.validate()`` checks it where its mask trains.

    Args:
        verify: compare every tensor's checksum, which reads the whole file once. False checks the header and
            the file's size only.

    Raises:
        RecordError: truncated, corrupt, of another format or a newer version.
        FileNotFoundError: nothing there.
        ImportError: safetensors is missing (``pip install offpolicy-corr[records]``).
    """
    library = _safetensors()
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(path)
    header, tensors = _read(library, path)
    try:
        _compare(header["tensors"], tensors, verify)
        for name, about in header["columns"].items():
            tensors[name] = unpack(about, tensors.get(name))
        return _assemble(header, tensors)
    except RecordError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = f"the header describes no record ({str(error)[:80]})"
        raise RecordError(problem, field="file", remedy=REMEDY) from None


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    partial = path.with_name(f".{path.name}.{os.urandom(6).hex()}.partial")
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # less what the umask takes
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike[str], write: Callable[[str], object]) -> None:
    """Let ``write`` make a file beside ``path``, flush it to the disk, and only then rename it to ``path``."""
    path = Path(path)
    with _temporary(path) as partial:
        mode = (path if path.exists() else partial).stat().st_mode & 0o777
        write(str(partial))
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.chmod(mode)
        os.replace(partial, path)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """The rename itself must reach the disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _safetensors() -> Any:
    try:
        import_module("safetensors.torch")
        return import_module("safetensors")
    except ImportError:
        message = "saving and loading records needs safetensors: pip install offpolicy-corr[records]"
        raise ImportError(message) from None


def _read(library: Any, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of one file: safetensors opens the path twice, and it can be replaced in between."""
    for _ in range(ATTEMPTS):
        before, problem = path.stat(), None
        try:
            with library.safe_open(str(path), framework="pt") as file:
                header = _checked_header(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except RecordError as error:
            problem = error
        except (library.SafetensorError, OSError, ValueError, RuntimeError) as error:
            problem = RecordError(f"not a readable record ({str(error)[:80]})", field="file", remedy=REMEDY)
        if os.path.samestat(before, path.stat()):
            if problem is not None:
                raise problem from None
            return header, tensors
    remedy = "Let its writer pause, or write to another place."
    raise RecordError("the file is replaced faster than it can be read", field="file", remedy=remedy)


def batch_tensors(batch: Batch) -> dict[str, Tensor]:
    """Every tensor of a batch by the name it has in a file."""
    record = batch.record
    named = {name: getattr(record, name) for name in _TENSORS}
    named |= {"loss_mask": batch.loss_mask, "sequence_ids": batch.sequence_ids}
    if record.candidates is not None:
        named |= {f"candidates.{name}": getattr(record.candidates, name) for name in _ROWS}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _overlap(left: Tensor, right: Tensor) -> bool:
    begin, other = left.data_ptr(), right.data_ptr()
    return begin < other + right.nbytes and other < begin + left.nbytes


def _describe(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "crc32": _crc32(tensor)}


def _crc32(tensor: Tensor) -> int:
    return zlib.crc32(tensor.numpy().reshape(-1).view(np.uint8).data) if tensor.numel() else 0


def _checked_header(metadata: dict[str, str]) -> dict[str, Any]:
    text, checksum = metadata.get(_HEADER), metadata.get(_CHECKSUM)
    if text is None or checksum is None:
        remedy = "This is a safetensors file, and not one that save_records wrote."
        raise RecordError("no record header", field="file", remedy=remedy)
    if str(zlib.crc32(text.encode())) != checksum:
        raise RecordError("the header is corrupt", field="file", value=checksum, remedy=REMEDY)
    header = json.loads(text)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RecordError("another format", field="file", value=text[:80], remedy=REMEDY)
    if header.get("version") != VERSION:
        remedy = (
            f"This release reads version {VERSION}: use the release that wrote the file, or write it again."
        )
        raise RecordError("another version", field="file", value=header.get("version"), remedy=remedy)
    return header


def _compare(described: dict[str, Any], tensors: dict[str, Tensor], verify: bool) -> None:
    if set(described) != set(tensors):
        names = sorted(set(described) ^ set(tensors))
        raise RecordError("tensors missing or added", field="file", value=names, remedy=REMEDY)
    for name, tensor in tensors.items():
        expected = described[name]
        found = (str(tensor.dtype), list(tensor.shape))
        if found != (expected["dtype"], expected["shape"]):
            raise RecordError(f"{name} has another type or shape", field=name, value=found, remedy=REMEDY)
        if verify and _crc32(tensor) != expected["crc32"]:
            raise RecordError(f"the bytes of {name} are corrupt", field=name, remedy=REMEDY)


def _assemble(header: dict[str, Any], tensors: dict[str, Tensor]) -> Batch:
    candidates = None
    if "candidates.ids" in tensors:
        offsets = tensors["candidates.offsets"].cumsum(0)
        parts = tensors["candidates.ids"], tensors.get("candidates.logprobs"), offsets
        candidates = CandidateSet(*parts, tensors["candidates.complete"])
    versions = header["version_names"]
    record = SamplerRecord(
        tensors["tokens"],
        tensors.get("logprobs"),
        candidates,
        tensors["temperature"] if "temperature" in tensors else float(header["temperature"]),
        tensors.get("group"),
        tuple(header["group_names"]),
        tensors.get("weight_version"),
        None if versions is None else tuple(versions),
        specs_from_plain(header["specs"]),
    )
    return Batch(record, tensors["loss_mask"], tensors["sequence_ids"], int(header["missing"]))
