"""Rectangle arithmetic against brute force on index tensors."""

import random

import pytest
import torch

from raytrain3d.checkpoint.layout import cover, full_rectangle, interval_rectangles, subtract
from raytrain3d.plan.params import Rectangle


def _cells(box: Rectangle, shape: tuple[int, ...]) -> set[int]:
    index = torch.arange(full_rectangle(shape).size).view(shape)
    return set(index[box.within(full_rectangle(shape))].flatten().tolist())


@pytest.mark.parametrize("shape", [(1,), (13,), (1, 7), (5, 1), (5, 7), (3, 2, 4)])
def test_every_interval_is_cut_exactly_and_in_flat_order(shape: tuple[int, ...]) -> None:
    size = full_rectangle(shape).size
    flat = torch.arange(size)
    for low in range(size + 1):
        for high in range(low, size + 1):
            boxes = interval_rectangles(shape, (0,) * len(shape), (low, high))
            assert len(boxes) <= {1: 1, 2: 3, 3: 5}[len(shape)]
            found = [flat.view(shape)[b.rectangle.within(full_rectangle(shape))] for b in boxes]
            assert [x for part in found for x in part.flatten().tolist()] == list(range(low, high))
            shard = flat[low:high]
            for b, expected in zip(boxes, found, strict=True):
                assert torch.equal(b.view(flat), expected)
                assert torch.equal(b.view(shard, start=low), expected)


def test_a_matrix_interval_is_head_rows_tail() -> None:
    boxes = interval_rectangles((4, 10), (8, 20), (7, 35), bounds=(12, 30))
    assert [(b.rectangle.offset, b.rectangle.shape, b.interval) for b in boxes] == [
        ((8, 27), (1, 3), (7, 10)), ((9, 20), (2, 10), (10, 30)), ((11, 20), (1, 5), (30, 35))]


def test_an_interval_beyond_the_slice_is_clipped() -> None:
    boxes = interval_rectangles((2, 3), (0, 0), (-100, 100))
    assert [(b.rectangle, b.interval) for b in boxes] == [(full_rectangle((2, 3)), (0, 6))]
    assert interval_rectangles((2, 3), (0, 0), (6, 9)) == []
    assert interval_rectangles((2, 3), (0, 0), (-4, 0)) == []


@pytest.mark.parametrize("bounds", [(5, 7), (9, 5), (4, 7), (6, 3)])
def test_padding_of_rows_and_columns_is_left_out(bounds: tuple[int, int]) -> None:
    # A local slice of (4, 4) at (4, 3): rows and columns at or beyond the bounds are padding.
    local = torch.arange(16)
    for low in range(16):
        for high in range(low, 17):
            found = {}
            for b in interval_rectangles((4, 4), (4, 3), (low, high), bounds):
                view = b.view(local)
                assert tuple(view.shape) == b.rectangle.shape
                for r in range(view.shape[0]):
                    for c in range(view.shape[1]):
                        found[b.rectangle.offset[0] + r, b.rectangle.offset[1] + c] = int(view[r, c])
            expected = {(4 + i // 4, 3 + i % 4): i for i in range(low, high)}
            assert found == {at: i for at, i in expected.items() if at[0] < bounds[0] and at[1] < bounds[1]}


def _random_box(rng: random.Random, shape: tuple[int, ...]) -> Rectangle:
    offset = tuple(rng.randrange(n) for n in shape)
    return Rectangle(offset=offset, shape=tuple(rng.randint(1, n - at) for n, at in zip(shape, offset, strict=True)))


@pytest.mark.parametrize("shape", [(17,), (6, 9), (3, 4, 5)])
def test_subtract_and_cover_against_sets(shape: tuple[int, ...]) -> None:
    rng = random.Random(7)
    for _ in range(150):
        wanted, held = _random_box(rng, shape), [_random_box(rng, shape) for _ in range(rng.randrange(6))]
        if held:
            rest = [_cells(b, shape) for b in subtract(wanted, held[0])]
            assert set().union(*rest) == _cells(wanted, shape) - _cells(held[0], shape)
            assert sum(map(len, rest)) == len(set().union(*rest))
        taken, missing = cover(wanted, held)
        left = _cells(wanted, shape)
        for index in range(len(held)):
            got = [_cells(box, shape) for i, box in taken if i == index]
            assert set().union(*got) == left & _cells(held[index], shape), "the first holder wins"
            assert sum(map(len, got)) == len(set().union(*got))
            left -= _cells(held[index], shape)
        assert set().union(*(_cells(b, shape) for b in missing)) == left
        assert sum(b.size for b in missing) == len(left)


def test_an_empty_wish_is_covered_by_nothing() -> None:
    assert cover(Rectangle(offset=(4, 0), shape=(0, 3)), []) == ([], [])
