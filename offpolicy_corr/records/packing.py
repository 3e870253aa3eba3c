"""Records: integer columns in as few bytes per value as they need, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def pack(values: Tensor) -> tuple[dict[str, Any], Tensor | None]:
    """A bool or integer column ``[n]`` as differences from its least value, little-endian bytes ``[n, width]``.

    Returns:
        What `unpack` needs to know, and the bytes; None where all values are equal (width 0).
    """
    array = values.numpy()
    array = array.view(np.uint8) if array.dtype == np.bool_ else array
    least, most = (int(array.min()), int(array.max())) if array.size else (0, 0)
    width = -(-(most - least).bit_length() // 8)
    about = {"dtype": values.numpy().dtype.name, "size": len(array), "least": least, "width": width}
    if width == 0:
        return about, None
    above = array - array.dtype.type(least)  # wraps where the range passes the type's, and back in `unpack`
    return about, torch.from_numpy(_bytes(above)[:, :width].copy())


def unpack(about: dict[str, Any], stored: Tensor | None) -> Tensor:
    """The column that `pack` was given.

    Raises:
        ValueError: ``about`` and the bytes do not fit together.
    """
    dtype = np.dtype(about["dtype"])
    size, width = about["size"], about["width"]
    shape = (size, 0) if stored is None else tuple(stored.shape)
    if dtype.name not in ("bool", "int32", "int64") or shape != (size, width) or width > dtype.itemsize:
        raise ValueError(f"{dtype} in {width} bytes cannot come from {shape}")
    values = np.zeros(size, dtype=np.uint8 if dtype == np.bool_ else dtype)
    if stored is not None:
        _bytes(values)[:, :width] = stored.numpy()
    values += values.dtype.type(about["least"])
    return torch.from_numpy(values.view(dtype))


def _bytes(array: Any) -> Any:
    """The bytes ``[n, itemsize]`` of a column, lowest first, sharing its memory."""
    little = array.dtype.newbyteorder("<")
    return array.astype(little, copy=False).view(np.uint8).reshape(len(array), array.dtype.itemsize)
