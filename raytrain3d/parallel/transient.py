"""Memory that comes and goes under a tensor while every view of it stays valid.

What is sharded over the data axis is whole only while a layer is at work. Parameters and their gradients are views that
modules, autograd and optimizer hold on to, so the tensor stays and its storage is resized, as FSDP does
(https://arxiv.org/abs/2304.11277). The tensor must be all of its storage.
"""

from torch import Tensor


def allocate(tensor: Tensor) -> Tensor:
    """Give it memory, with any content. Returns an alias to write through: what autograd has saved of the tensor is
    brought back with the same values, so its version must not count that as a change."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    return tensor.data


def release(tensor: Tensor) -> None:
    """Take its memory away. Nothing may read or write it until it is allocated again."""
    tensor.untyped_storage().resize_(0)


def is_allocated(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0
