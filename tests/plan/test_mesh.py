from itertools import product

import pytest

from raytrain3d.plan.mesh import Coordinate, Mesh

SIZES = list(product((1, 2, 3), (1, 2, 4), (1, 2, 4)))


def test_tensor_is_fastest_and_data_slowest() -> None:
    mesh = Mesh(data=2, pipeline=3, tensor=4)
    assert mesh.rank(Coordinate(data=0, pipeline=0, tensor=1)) == 1
    assert mesh.rank(Coordinate(data=0, pipeline=1, tensor=0)) == 4
    assert mesh.rank(Coordinate(data=1, pipeline=2, tensor=3)) == 23
    assert mesh.group("tensor", 5) == (4, 5, 6, 7)
    assert mesh.group("pipeline", 5) == (1, 5, 9)
    assert mesh.group("data", 5) == (5, 17)
    assert mesh.gang(1) == range(12, 24)


@pytest.mark.parametrize(("data", "pipeline", "tensor"), SIZES)
def test_ranks_and_coordinates_are_inverse(data: int, pipeline: int, tensor: int) -> None:
    mesh = Mesh(data=data, pipeline=pipeline, tensor=tensor)
    assert [mesh.rank(at) for at in mesh] == list(range(mesh.size))
    assert mesh.size == data * mesh.ranks_per_gang


@pytest.mark.parametrize(("data", "pipeline", "tensor"), SIZES)
def test_groups_along_an_axis_divide_the_ranks(data: int, pipeline: int, tensor: int) -> None:
    mesh = Mesh(data=data, pipeline=pipeline, tensor=tensor)
    for axis, size in (("data", data), ("pipeline", pipeline), ("tensor", tensor)):
        groups = {mesh.group(axis, rank) for rank in range(mesh.size)}  # type: ignore[arg-type]
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        assert all(len(group) == size for group in groups)
        assert all(rank in mesh.group(axis, rank) for rank in range(mesh.size))  # type: ignore[arg-type]
