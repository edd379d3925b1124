"""Collectives over the tensor axis: what happens between the residual stream and the slices of divided matrices.

A seam is a pair of them, one forward and one backward. Without sequence parallelism every rank has the whole residual
stream (https://arxiv.org/abs/1909.08053); with it, an equal part of every sequence (https://arxiv.org/abs/2205.05198).

| seam    | placed                                     | forward                  | backward                 |
|---------|--------------------------------------------|--------------------------|--------------------------|
| enter   | before column slices                       | identity, or all-gather  | all-reduce, or scatter   |
| reduce  | after row slices and rows of the embedding | all-reduce, or scatter   | identity, or all-gather  |

Scatter is short for reduce-scatter. An all-reduce moves as much as a reduce-scatter and an all-gather.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from raytrain3d.parallel.groups import Group

Collective = Callable[[Group, Tensor], Callable[[], Tensor]]
"""Begins; what it returns waits for the result. x: (batch, seq, width)."""


def keep(group: Group, x: Tensor) -> Callable[[], Tensor]:
    """The identity."""
    return lambda: x


def all_reduce(group: Group, x: Tensor) -> Callable[[], Tensor]:
    """The sum over the group, in the place of x."""
    x = x.contiguous()
    work = group.start_reduce(x)

    def finish() -> Tensor:
        work.wait()
        return x

    return finish


def all_gather(group: Group, x: Tensor) -> Callable[[], Tensor]:
    """(batch, part of seq, width) of every member, in their order, as (batch, seq, width)."""
    parts = x.new_empty((group.size, *x.shape))
    work = group.all_gather(parts.flatten(), x.flatten())

    def finish() -> Tensor:
        work.wait()
        return parts.transpose(0, 1).flatten(1, 2)

    return finish


def scatter(group: Group, x: Tensor) -> Callable[[], Tensor]:
    """This member's part of the sum: (batch, seq, width) -> (batch, part of seq, width)."""
    parts = x.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()
    own = torch.empty_like(parts[0])
    work = group.reduce_scatter(own.flatten(), parts.flatten())

    def finish() -> Tensor:
        work.wait()
        return own

    return finish


class _Across(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seam: "Seam") -> Tensor:
        ctx.seam = seam
        return seam.start_forward(x.view_as(x))()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.seam.start_backward(grad)(), None


class Seam:
    """As `model.functional.Seam` asks for."""

    def __init__(self, group: Group, forward: Collective, backward: Collective) -> None:
        self._group, self._forward, self._backward = group, forward, backward
        self.name = f"{group.name}: {forward.__name__}, {backward.__name__}"

    @property
    def idle(self) -> bool:
        return self._group.size == 1

    def length(self, sequence: int) -> int:
        if self._forward is all_gather:
            return sequence * self._group.size
        return sequence // self._group.size if self._forward is scatter else sequence

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.idle else _Across.apply(x, self)

    def start_forward(self, x: Tensor) -> Callable[[], Tensor]:
        return self._begin(self._forward, x)

    def start_backward(self, grad: Tensor) -> Callable[[], Tensor]:
        return self._begin(self._backward, grad)

    def _begin(self, collective: Collective, x: Tensor) -> Callable[[], Tensor]:
        return keep(self._group, x) if self.idle else collective(self._group, x)


def enter(group: Group, *, sequence_parallel: bool) -> Seam:
    """From the residual stream to what all column slices read."""
    return Seam(group, all_gather, scatter) if sequence_parallel else Seam(group, keep, all_reduce)


def reduce(group: Group, *, sequence_parallel: bool) -> Seam:
    """From the partial sums of row slices to the residual stream."""
    return Seam(group, scatter, all_gather) if sequence_parallel else Seam(group, all_reduce, keep)


class ReduceValue:
    """Sum or maximum over the group, outside autograd."""

    def __init__(self, group: Group, *, maximum: bool = False) -> None:
        self._group, self._maximum = group, maximum

    def __call__(self, x: Tensor) -> Tensor:
        self._group.reduce(x, maximum=self._maximum)
        return x
