"""The order of samples: complete, different per seed and epoch, even, and free of the layout."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import pytest

from raytrain3d.data.ideal import Phase
from raytrain3d.data.mixture import Mixture
from raytrain3d.data.sampler import Sampler, deal, permutation, spread


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 99, 100, 101, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1, 2**64 + 1])
def test_permutation_is_complete(size: int, seed: int) -> None:
    for epoch in range(3):
        order = permutation(seed, epoch, size)
        assert sorted(order(i) for i in range(size)) == list(range(size))


def test_permutation_of_a_huge_range_is_immediate() -> None:
    size = 10**15 + 7
    order = permutation(3, 0, size)
    found = {order(i) for i in range(1000)}
    assert len(found) == 1000
    assert all(0 <= value < size for value in found)
    assert max(found) > size // 2 > min(found)


def test_orders_differ_by_seed_and_epoch() -> None:
    orders = {(seed, epoch): tuple(permutation(seed, epoch, 50)(i) for i in range(50))
              for seed in (0, 1, 2, 2**64, 2**64 + 1) for epoch in range(5)}
    assert len(set(orders.values())) == len(orders)
    assert tuple(range(50)) not in orders.values()


def _chi_square(counts: Counter[int], cells: int, total: int) -> float:
    expected = total / cells
    return sum((counts[cell] - expected) ** 2 / expected for cell in range(cells))


@pytest.mark.parametrize("size", [5, 10, 23])
def test_every_sample_is_equally_likely_at_every_place(size: int) -> None:
    total = 3000
    for position in (0, 1, size - 1):
        counts = Counter(permutation(7, epoch, size)(position) for epoch in range(total))
        # six standard deviations above the mean of a chi-square with size - 1 degrees of freedom
        assert _chi_square(counts, size, total) < (size - 1) + 6 * (2 * (size - 1)) ** 0.5


def test_neighbours_in_an_epoch_are_not_related() -> None:
    size, cells = 20_000, 20
    order = permutation(11, 0, size)
    values = [order(i) for i in range(size)]
    steps = Counter((after - before) % size * cells // size for before, after in pairwise(values))
    assert _chi_square(steps, cells, size - 1) < (cells - 1) + 6 * (2 * (cells - 1)) ** 0.5


def _sampler(*sizes: int, seed: int, global_batch: int) -> Sampler:
    """All sources in equal shares."""
    names, phase = [str(size) for size in sizes], Phase(start=0, weights=(Fraction(1),) * len(sizes))
    mixture = Mixture(names, [phase], [None] * len(sizes), 0)
    return Sampler(seed=seed, sizes=sizes, mixture=mixture, global_batch=global_batch)


def _numbers(sampler: Sampler, step: int, places: Sequence[int]) -> list[int]:
    return [number for _, number in sampler.samples(step, places)]


def test_each_epoch_holds_each_sample_once() -> None:
    sampler = _sampler(30, seed=5, global_batch=8)
    stream = [number for step in range(1, 16) for number in _numbers(sampler, step, range(8))]
    for epoch in range(4):
        assert sorted(stream[epoch * 30:(epoch + 1) * 30]) == list(range(30))
    assert stream[:30] != stream[30:60]


def test_a_batch_larger_than_the_data_repeats_it() -> None:
    assert sorted(_numbers(_sampler(3, seed=5, global_batch=9), 1, range(9))) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_any_part_of_a_step_equals_that_part_of_the_whole() -> None:
    sampler = _sampler(1000, 77, seed=2, global_batch=12)
    whole = sampler.samples(40, range(12))
    assert [sampler.samples(40, [place])[0] for place in range(12)] == whole
    assert sampler.samples(40, range(5, 9)) == whole[5:9]


def test_order_is_fixed_for_ever() -> None:
    """Golden values: a change here would change every resumed run."""
    assert _numbers(_sampler(1000, seed=1, global_batch=6), 3, range(6)) == [616, 128, 91, 876, 259, 404]


def test_sources_have_orders_of_their_own() -> None:
    stream = [pick for step in range(1, 11) for pick in _sampler(50, 50, seed=1, global_batch=10).samples(step, range(10))]
    first, second = ([number for source, number in stream if source == wanted] for wanted in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        _sampler(10, seed=1, global_batch=2).samples(0, range(2))


def test_deal() -> None:
    assert deal(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert deal(1, 3) == [range(1), range(1, 1), range(1, 1)]
    assert deal(0, 2) == [range(0), range(0)]


def test_chosen_samples_are_spread_over_all() -> None:
    assert spread(range(4), 4, 10) == [0, 2, 5, 7]
    assert spread(range(2, 4), 4, 10) == [5, 7]
    assert spread(range(5), 5, 5) == [0, 1, 2, 3, 4]
    assert spread([], 0, 0) == []
