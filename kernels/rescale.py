"""Row passes: multiply precomputed gradients by the upstream gradient without a host sync."""

# device functions have no types that mypy could check
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import define, on_device_of, tiles_for
from .row_passes import column_offsets


@triton.jit
def scale_rows(
    gradient, upstream, upstream_stride, row_stride, column_stride, width,
    CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``gradient[t] *= upstream[t · stride]``; a row whose factor is 1 is left alone, so a plain mean costs nothing."""
    t = tl.program_id(0).to(tl.int64)
    row_scale = tl.load(upstream + t * upstream_stride).to(tl.float32)
    if row_scale != 1.0:
        row = gradient + t * row_stride
        whole = width // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            _, offsets = column_offsets(start, column_stride, CONTIGUOUS, BLOCK)
            values = tl.load(row + offsets).to(tl.float32) * row_scale
            tl.store(row + offsets, values.to(gradient.dtype.element_ty))
        if whole < width:
            columns, offsets = column_offsets(whole, column_stride, CONTIGUOUS, BLOCK)
            values = tl.load(row + offsets, mask=columns < width, other=0.0).to(tl.float32) * row_scale
            tl.store(row + offsets, values.to(gradient.dtype.element_ty), mask=columns < width)


def scale_(gradient: Tensor, upstream: Tensor) -> Tensor:
    """``gradient`` ``[T, …]``, in place, times a scalar or ``[T]`` of any stride (0 included) on its device."""
    _SCALE(gradient, upstream)
    return gradient


def _launch(gradient: Tensor, upstream: Tensor) -> None:
    rows = gradient if gradient.dim() == 2 else gradient.view(1, -1)
    if rows.numel():
        stride = upstream.stride(0) if upstream.dim() else 0
        tiles = tiles_for(rows.shape[1], rows)
        with on_device_of(gradient):
            scale_rows[(rows.shape[0],)](
                rows, upstream, stride, *rows.stride(), rows.shape[1],
                **tiles.options(gradient.dtype, rows.stride(1) == 1),
            )  # fmt: skip


def _fake(gradient: Tensor, upstream: Tensor) -> None:
    pass


_SCALE = define("scale_", "(Tensor(a!) gradient, Tensor upstream) -> ()", ("gradient",), _launch, _fake)
