"""Log-probs that are not there: the disguises in which engines and frameworks send a missing value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from .record import SamplerRecord

# −9999 (vLLM's HTTP shapes, SkyRL), −99999 (Tinker), −3.4e38 (SGLang's clamp) and −inf lie at or below this; no
# float32 softmax yields such a value for a token that was really drawn. JSON null and NaN arrive as NaN. The sixth
# disguise, an exact 0.0, is also what a certain token has: only what stands beside it tells (the readers compare it
# with the token's candidates; `statistics.unwitnessed_zero_runs` finds runs of it without any).
SENTINEL = -9999.0


def is_missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    """True where a sampled token's log-prob is NaN, infinite below, or one of the sentinels. Same shape."""
    return ~(values > SENTINEL)


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
