"""Bytes of live tensors, counted from outside: how memory is measured on a CPU, which keeps no allocator statistics."""

from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are made inside it, in forwards and backwards, as long as they live. What a kernel takes for
    itself while it runs is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self._known: WeakSet[torch.UntypedStorage] = WeakSet()
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        finalize(storage, self._forget, storage.nbytes())

    def _forget(self, num_bytes: int) -> None:
        self.now -= num_bytes
