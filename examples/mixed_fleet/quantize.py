"""Number formats of the sampler fleet: BF16, FP8 e4m3 (per-tensor and block-scaled) and NVFP4.

Every quantizer takes a weight and returns what a weight-only kernel multiplies with: the nearest values that
the format can hold, dequantized to BF16. Scales are chosen from the largest magnitude of the tensor or block,
and all rounding is to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of a 4-bit float with two exponent bits and one mantissa bit, in the order of their codes."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
NVFP4_BLOCK = 16
FP8_BLOCK = 32
"""Side of a square FP8 block. Deployments use 128, which would span this model's matrices whole."""


def round_e4m3(x: Tensor) -> Tensor:
    """Round to FP8 e4m3, saturating at ±448, where torch's cast gives NaN. Any shape; keeps the dtype."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def round_e2m1(x: Tensor) -> Tensor:
    """Round to the sixteen values ±`E2M1_VALUES`, saturating at ±6. Any shape; keeps the dtype.

    Values are spaced 0.5 below 2, 1 between 2 and 4, and 2 above 4. `torch.round` sends ties to the even
    multiple of that spacing, which is also the even code: 0.25 → 0, 0.75 → 1, 1.25 → 1, 1.75 → 2, 2.5 → 2,
    3.5 → 4, 5 → 4.
    """
    magnitude = x.abs().clamp(max=E2M1_MAX)
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)).to(x.dtype)
    return torch.copysign(torch.round(magnitude / spacing) * spacing, x)


def _positive(scale: Tensor) -> Tensor:
    """Replace a zero scale (a block of zeros) by one, so that dividing by it is defined and gives zeros."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def fp32(weight: Tensor) -> Tensor:
    """The trainer's own weight, for a sampler without any error. Any shape."""
    return weight.float()


def bf16(weight: Tensor) -> Tensor:
    """The trainer's weight rounded to BF16. Any shape."""
    return weight.to(torch.bfloat16)


def fp8_per_tensor(weight: Tensor) -> Tensor:
    """FP8 e4m3 with one fp32 scale, the largest magnitude over 448. Any shape; returns BF16."""
    weight = weight.float()
    scale = _positive(weight.abs().amax() / E4M3_MAX)
    return (round_e4m3(weight / scale) * scale).to(torch.bfloat16)


def fp8_block(weight: Tensor, block: int = FP8_BLOCK) -> Tensor:
    """FP8 e4m3 with one fp32 scale for each `block` × `block` tile. `weight` is [out, in]; returns BF16.

    Raises:
        ValueError: a side of the weight is not a multiple of `block`.
    """
    rows, columns = weight.shape
    if rows % block or columns % block:
        raise ValueError(f"a weight of {rows} x {columns} does not divide into tiles of {block} x {block}")
    tiles = weight.float().view(rows // block, block, columns // block, block)
    scale = _positive(tiles.abs().amax(dim=(1, 3), keepdim=True) / E4M3_MAX)
    return (round_e4m3(tiles / scale) * scale).view(rows, columns).to(torch.bfloat16)


def nvfp4(weight: Tensor, block: int = NVFP4_BLOCK) -> Tensor:
    """NVFP4: e2m1 values, an e4m3 scale per `block` values of a row, an fp32 scale per tensor; returns BF16.

    The tensor's scale maps the largest block scale to 448, so that the e4m3 scales use their whole range. The
    values are divided by the scale *as stored*, which makes the rounding of the scale part of the format's
    error and no more. `weight` is [out, in].

    Raises:
        ValueError: the length of a row is not a multiple of `block`.
    """
    rows, columns = weight.shape
    if columns % block:
        raise ValueError(f"a row of {columns} values does not divide into blocks of {block}")
    blocks = weight.float().view(rows, columns // block, block)
    tensor_scale = _positive(blocks.abs().amax() / (E2M1_MAX * E4M3_MAX))
    block_scale = round_e4m3(blocks.abs().amax(dim=-1, keepdim=True) / (E2M1_MAX * tensor_scale))
    values = round_e2m1(blocks / _positive(block_scale * tensor_scale))
    return (values * block_scale * tensor_scale).view(rows, columns).to(torch.bfloat16)


PRECISIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "FP32": fp32,
    "BF16": bf16,
    "FP8 per-tensor": fp8_per_tensor,
    "FP8 block": fp8_block,
    "NVFP4": nvfp4,
}


@torch.no_grad()
def load_quantized(sampler: nn.Module, weights: dict[str, Tensor], precision: str) -> None:
    """Copy one version of the trainer's weights into a sampler, through the sampler's number format.

    Every matrix is quantized, the embedding table (which is also the output head) included; norms take the
    sampler's dtype. Deployments keep embedding and head in BF16. Including them doubles the KL between NVFP4
    samplers and trainer, which lets drift stand out from sampling noise within minutes.

    Args:
        sampler: a model in BF16, or in fp32 for a sampler without error.
        weights: the trainer's parameters by name, of the same shapes.
        precision: a key of `PRECISIONS`.
    """
    quantize = PRECISIONS[precision]
    for name, parameter in sampler.named_parameters():
        parameter.copy_(quantize(weights[name]) if parameter.ndim == 2 else weights[name])
