"""Activations that wait for their backward in host memory (`train.offload_activations`).

What autograd saves inside a layer goes to the host as it is saved, a storage once however many tensors are views of it,
and comes back when the backward of the layer first needs it. Copies run in order with the layer's own work, so bits do not
change; they take the time of the way there and back. On a CPU the host is the device: the same copies, and nothing saved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class OnHost:
    """A storage in host memory, and on its device again from the first use on."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        data = _bytes_of(tensor)
        self._data = torch.empty(data.shape, dtype=data.dtype, pin_memory=self.device.type == "cuda")
        self._data.copy_(data, non_blocking=True)
        self._is_back = False

    def back(self) -> torch.UntypedStorage:
        """On the device."""
        if not self._is_back:
            self._data = self._data.to(self.device, non_blocking=True, copy=True)
            self._is_back = True
        return self._data.untyped_storage()


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved tensor as a view of what is on the host."""

    storage: OnHost
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return empty.set_(self.storage.back(), self.offset, self.shape, self.stride)


def _bytes_of(tensor: Tensor) -> Tensor:
    """All of a tensor's storage. -> (bytes,) of uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@contextmanager
def saved_on_host(layer: nn.Module, entering: Tensor) -> Iterator[None]:
    """What a forward of `layer` saves goes to the host. What is there in any case stays: parameters and its input."""
    staying = {tensor.untyped_storage().data_ptr() for tensor in (entering, *layer.parameters())}
    gone: dict[int, tuple[OnHost, Tensor]] = {}
    """By address. Holds the tensors too, so that no other one gets the address within this forward."""

    def pack(tensor: Tensor) -> Tensor | Saved:
        address = tensor.untyped_storage().data_ptr()
        if address in staying:
            return tensor
        if address not in gone:
            gone[address] = OnHost(tensor), tensor
        return Saved(gone[address][0], tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(packed: Tensor | Saved) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.tensor()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    gone.clear()
