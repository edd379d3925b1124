"""Rectangles of parameters: what a flat shard holds of a matrix, which stored boxes cover a wanted one.

On disk there are only boxes of global, unpadded shapes, so a checkpoint knows nothing of the layout that wrote it. A
flat interval of a row-major matrix is at most three boxes: the end of a row, whole rows, the beginning of a row.
Needs nothing installed: tensors appear in annotations and are only sliced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytrain3d.plan.params import Rectangle

if TYPE_CHECKING:
    import torch

KINDS = ("weight", "master", "exp_avg", "exp_avg_sq")
"""What is saved of a parameter: itself, its FP32 master copy, and the two moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One rectangle of one parameter's state on this rank."""

    name: str
    """Global parameter name, such as `blocks.3.attention.query.weight`."""
    kind: str
    """One of KINDS."""
    rectangle: Rectangle
    """In the global, unpadded shape of the parameter."""
    tensor: torch.Tensor
    """Live view of exactly the rectangle's shape; written in place when loading."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalBox:
    """One box of a flat interval: where it lies in the parameter and where in the flat slot."""

    rectangle: Rectangle
    """In the global shape, padding clipped away."""
    interval: tuple[int, int]
    """Elements of the slot it comes from, counted from the slot's start."""
    box: tuple[int, ...]
    """Shape of those elements before padding is clipped."""

    def view(self, slot: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The live part of a flat tensor whose first element is element `start` of the slot; rectangle.shape."""
        low, high = self.interval
        return slot[low - start : high - start].view(self.box)[tuple(slice(n) for n in self.rectangle.shape)]


def interval_rectangles(shape: Sequence[int], offset: Sequence[int], interval: tuple[int, int],
                        bounds: Sequence[int] | None = None) -> list[IntervalBox]:
    """Boxes of elements [low, high) of a slice of `shape` (padding included) that lies at `offset` of its parameter.

    `interval` is counted from the slice's first element and may reach beyond it on both sides (a shard usually does).
    `bounds` is the global, unpadded shape: what lies outside is padding and left out. At most one box for a vector,
    three for a matrix; in flat order.
    """
    low, high = max(interval[0], 0), min(interval[1], math.prod(shape))
    boxes = []
    for at, box, first, last in _boxes(tuple(shape), low, high):
        whole = Rectangle(offset=tuple(a + b for a, b in zip(at, offset, strict=True)), shape=box)
        kept = whole if bounds is None else whole.intersect(full_rectangle(bounds))
        if kept is not None:
            boxes.append(IntervalBox(rectangle=kept, interval=(first, last), box=box))
    return boxes


def _boxes(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    """(offset, shape, low, high) of each box of the flat interval [low, high)."""
    if low >= high:
        return
    if len(shape) == 1:
        yield (low,), (high - low,), low, high
        return
    row = math.prod(shape[1:])
    first, last = -(-low // row), high // row
    if first > last:
        yield from _inside_row(shape, last, low, high)
        return
    yield from _inside_row(shape, first - 1, low, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row, last * row
    yield from _inside_row(shape, last, last * row, high)


def _inside_row(shape: tuple[int, ...], index: int, low: int,
                high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    base = index * math.prod(shape[1:])
    for at, box, first, last in _boxes(shape[1:], low - base, high - base):
        yield (index, *at), (1, *box), first + base, last + base


def full_rectangle(shape: Sequence[int]) -> Rectangle:
    """The whole of a parameter of `shape`."""
    return Rectangle(offset=(0,) * len(shape), shape=tuple(shape))


def subtract(box: Rectangle, hole: Rectangle) -> list[Rectangle]:
    """Disjoint boxes that are `box` without `hole`."""
    common = box.intersect(hole)
    if common is None:
        return [box]
    parts = []
    offset, shape = list(box.offset), list(box.shape)
    for dim, (start, length) in enumerate(zip(common.offset, common.shape, strict=True)):
        for low, high in ((offset[dim], start), (start + length, offset[dim] + shape[dim])):
            if low < high:
                parts.append(Rectangle(offset=(*offset[:dim], low, *offset[dim + 1 :]),
                                       shape=(*shape[:dim], high - low, *shape[dim + 1 :])))
        offset[dim], shape[dim] = start, length
    return parts


def cover(wanted: Rectangle, held: Iterable[Rectangle]) -> tuple[list[tuple[int, Rectangle]], list[Rectangle]]:
    """How to fill `wanted` from boxes that may overlap: [(index into `held`, box to take), ...] and the missing boxes.

    The taken boxes are disjoint, the first holder wins, and with nothing missing they are exactly `wanted`.
    """
    taken: list[tuple[int, Rectangle]] = []
    missing = [wanted] if wanted.size else []
    for index, source in enumerate(held):
        if not missing:
            break
        taken += [(index, common) for box in missing if (common := box.intersect(source)) is not None]
        missing = [part for box in missing for part in subtract(box, source)]
    return taken, missing
