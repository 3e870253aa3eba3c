"""Records: placeholders that engines and frameworks send instead of a missing log-prob."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# −9999 (vLLM's HTTP shapes, SkyRL), −99999 (Tinker), −3.4e38 (SGLang's clamp) and −inf lie at or below this; no
# float32 softmax yields such a value for a token that was really drawn. JSON null and NaN arrive as NaN. An exact 0.0
# is a placeholder too, and also what a certain token has: only the token's candidates can tell the two apart (the
# readers look at them; `inspection.unsupported_zero_runs` finds runs of 0.0 without any).
SENTINEL = -9999.0


def is_missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    """True where a sampled token's log-prob is NaN, −inf, or one of the placeholders. Same shape."""
    return ~(values > SENTINEL)
