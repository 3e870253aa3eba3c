"""Bytes alive at once, storage by storage: what temporaries, saved tensors and gradients need together."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """``peak``: the most bytes that operations' arguments and results held together, after any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.storages = {key: held for key, held in self.storages.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.storages.values()))
        return result
