"""Mixtures: exact shares at every prefix, whatever the weights, phases and limits; the same from wherever one looks."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain3d.config import JobConfig, PhaseConfig, SourceConfig
from raytrain3d.data.ideal import Phase, exact, segments
from raytrain3d.data.mixture import Mixture
from raytrain3d.data.stretch import Stretch
from raytrain3d.errors import DataError


def mixture(*phases: tuple[int, Sequence[float]], limits: Sequence[int | None] | None = None, length: int = 0) -> Mixture:
    given = [Phase(start=start, weights=tuple(map(exact, weights))) for start, weights in phases]
    count = len(phases[0][1])
    return Mixture([f"s{i}" for i in range(count)], given, limits or [None] * count, length)


def stretch(weights: Sequence[float], limits: Sequence[int | None]) -> Stretch:
    return Stretch(list(segments([Fraction(weight) for weight in weights], limits)))


def check(found: Stretch, first: int, last: int) -> None:
    """Every prefix from `first` to `last` is within one sample of the ideal, and samples of a source come in order."""
    counts = list(found.counts(first))
    for place in range(first, last):
        source, number = found(place)
        assert number == counts[source]
        counts[source] += 1
        for each, count in enumerate(counts):
            assert abs(count - found.ideal(each, place + 1)) < 1
    assert found.counts(last) == tuple(counts)


weight = st.one_of(st.integers(1, 50), st.floats(1e-2, 1.0), st.sampled_from([1e-3, 1.0, 1 / 3]))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(weight, min_size=1, max_size=9), st.integers(0, 10**12))
def test_every_prefix_is_within_one_sample_of_the_ideal(weights: list[float], far: int) -> None:
    found = stretch(weights, [None] * len(weights))
    check(found, 0, 600)
    check(found, far, far + 300)
    border = far // found.block_size * found.block_size
    check(found, max(0, border - 50), border + 50)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.tuples(weight, st.one_of(st.none(), st.integers(0, 300))), min_size=1, max_size=5))
def test_limits_are_kept_to(sources: list[tuple[float, int | None]]) -> None:
    weights, limits = [each for each, _ in sources] + [1.0], [limit for _, limit in sources] + [None]
    found = stretch(weights, limits)
    check(found, 0, 900)
    for used, limit in zip(found.counts(10**6), limits, strict=True):
        assert limit is None or used == limit


def test_a_million_samples_have_their_shares() -> None:
    weights = [0.5, 0.3, 0.15, 0.05]
    mixed = mixture((0, weights))
    for places in (*range(1, 1_000_000, 9973), 1_000_000):
        for count, wanted in zip(mixed.counts(places), weights, strict=True):
            assert abs(count - places * wanted) < 1
    assert mixed.counts(1_000_000) == (500_000, 300_000, 150_000, 50_000)


def test_looking_anywhere_gives_what_going_through_gives() -> None:
    weights = [0.61, 0.27, 0.12]
    going = mixture((0, weights))
    whole = [going(place) for place in range(1000)]
    assert [mixture((0, weights))(place) for place in (999, 500, 256, 255, 0)] == [whole[i] for i in (999, 500, 256, 255, 0)]


def test_sources_that_are_used_up_give_their_place_to_the_others() -> None:
    mixed = mixture((0, [1, 1, 2]), limits=[100, None, None])
    assert mixed.counts(400) == (100, 100, 200)
    assert mixed.counts(1000) == (100, 300, 600)


def test_a_new_phase_changes_the_mix_where_it_begins() -> None:
    mixed = mixture((0, [1, 0]), (512, [0, 1]), (600, [3, 1]), length=2000)
    assert [mixed(place) for place in (0, 511, 512, 599)] == [(0, 0), (0, 511), (1, 0), (1, 87)]
    assert mixed.counts(1000) == (512 + 300, 88 + 100)
    places = [mixed(place) for place in range(2000)]
    for source in (0, 1):
        assert [number for given, number in places if given == source] == list(range(mixed.counts(2000)[source]))


def test_a_limit_counts_over_all_phases() -> None:
    mixed = mixture((0, [1, 1]), (100, [1, 1]), limits=[70, None], length=1000)
    assert list(accumulate(mixed.counts(n)[0] for n in (100, 140, 1000))) == [50, 120, 190]


@pytest.mark.parametrize(("phases", "limits", "message"), [
    ([(0, [1, 1])], [100, 200], r"mixed from sample 0 on is used up after 300 samples of the run, which needs 301"),
    ([(0, [1, 1]), (100, [1, 0])], [120, None], r"mixed from sample 100 on is used up after 170 samples"),
    ([(0, [1, 10**7])], [None, None], r"'s0' would give one of 10,000,001 samples, at least one of 1,048,576 is needed"),
])
def test_what_cannot_be_mixed_is_an_error(phases: list[tuple[int, list[float]]], limits: list[int | None],
                                          message: str) -> None:
    with pytest.raises(DataError, match=message):
        mixture(*phases, limits=limits, length=301)


def test_all_may_be_used_up_at_the_end_of_the_run() -> None:
    assert mixture((0, [1, 1]), limits=[100, 200], length=300).counts(300) == (100, 200)


def test_shares_of_a_job(job: Callable[..., JobConfig]) -> None:
    """By size, by temperature, by weight; phases begin at a number of tokens."""
    def counts(places: int, *, weights: Sequence[float | None] = (None, None), **data: object) -> tuple[int, ...]:
        sources = tuple(SourceConfig(name=name, path="x", weight=weight)
                        for name, weight in zip("ab", weights, strict=True))
        return Mixture.of(job(data={"path": None, "sources": sources, **data}), [9000, 1000], [10, 10]).counts(places)

    assert counts(1000) == (900, 100)
    assert counts(1000, temperature=2.0) == (750, 250)
    assert counts(1000, weights=(0.3, 0.1)) == (750, 250)
    phase = PhaseConfig(tokens=16 * 10 - 7, weights={"b": 1.0})
    assert [counts(places, phases=(phase,)) for places in (10, 20)] == [(9, 1), (9, 11)]
