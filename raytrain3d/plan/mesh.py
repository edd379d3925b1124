"""Ranks as a grid: data x pipeline x tensor, tensor fastest, so that neighbours in rank share a tensor group.

Pure arithmetic: where a rank stands, and which ranks form its group along an axis.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Axis = Literal["data", "pipeline", "tensor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinate:
    """Place of one rank on the mesh."""

    data: int
    pipeline: int
    tensor: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Sizes of the three axes."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def ranks_per_gang(self) -> int:
        return self.pipeline * self.tensor

    def rank(self, at: Coordinate) -> int:
        return (at.data * self.pipeline + at.pipeline) * self.tensor + at.tensor

    def coordinate(self, rank: int) -> Coordinate:
        rest, tensor = divmod(rank, self.tensor)
        data, pipeline = divmod(rest, self.pipeline)
        return Coordinate(data=data, pipeline=pipeline, tensor=tensor)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Ranks that differ from `rank` along `axis` only, `rank` included, in axis order."""
        at = self.coordinate(rank)
        return tuple(self.rank(replace(at, **{axis: i})) for i in range(getattr(self, axis)))

    def gang(self, replica: int) -> range:
        """Ranks of one replica."""
        return range(replica * self.ranks_per_gang, (replica + 1) * self.ranks_per_gang)

    def __iter__(self) -> Iterator[Coordinate]:
        return (self.coordinate(rank) for rank in range(self.size))
