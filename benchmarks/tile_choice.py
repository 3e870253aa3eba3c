"""Benchmark: launch every kernel with chosen tiles, to compare them and to test tiles that short rows never get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from offpolicy_corr.kernels import rescale, triton_logprobs, triton_loss, vocab_parallel
from offpolicy_corr.kernels.launch import Tiles


@contextmanager
def using_tiles(tiles: Tiles) -> Iterator[None]:
    """Every launch in this block takes ``tiles``. Not for use beside launches of other threads."""

    def choose(*_: Any, **__: Any) -> Tiles:
        return tiles

    with ExitStack() as stack:
        for module in (rescale, triton_logprobs, triton_loss, vocab_parallel):
            stack.enter_context(patch.object(module, "tiles_for", choose))
        yield
