"""Collectives over the tensor axis as autograd functions: what forward and backward do to the activations.

| function      | forward    | backward   | placed                                      |
| `Enter`       | identity   | all-reduce | before column slices (query, gate, output)  |
| `Reduce`      | all-reduce | identity   | after row slices (attention output, down)   |
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from raytrain3d.parallel.groups import Group


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        ctx.group.reduce(grad)
        return grad, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        group.reduce(x)  # in place: x is the fresh result of a product
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Enter:
    """Identity forward, all-reduce backward."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return x if self._group.size == 1 else _Enter.apply(x, self._group)


class Reduce:
    """All-reduce forward, identity backward."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return x if self._group.size == 1 else _Reduce.apply(x, self._group)


class ReduceValue:
    """Sum or maximum over the group, outside autograd."""

    def __init__(self, group: Group, *, maximum: bool = False) -> None:
        self._group, self._maximum = group, maximum

    def __call__(self, x: Tensor) -> Tensor:
        self._group.reduce(x, maximum=self._maximum)
        return x
