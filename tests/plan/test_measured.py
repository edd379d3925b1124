import random
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import pytest

from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.measured import RECENT, WINDOW, Estimate, Measured, RankTimes
from raytrain3d.plan.mesh import Mesh

FLOPS = [LayerCost(forward=1.0, backward_input=1.0, backward_weight=1.0)] * 4
HELD = {0: (0, 1), 1: (2, 3)}


def report(rank: int, layers: Iterable[int], factor: float = 1.0, micro_batches: int = 4) -> RankTimes:
    """Layers of 1 s forward and 2 s backward."""
    return RankTimes(rank=rank, num_micro_batches=micro_batches, forward=dict.fromkeys(layers, 1.0 * micro_batches * factor),
                     backward=dict.fromkeys(layers, 2.0 * micro_batches * factor))


def measure(steps: Sequence[Sequence[float]], held: Mapping[int, Iterable[int]] = HELD, mesh: Mesh | None = None,
            into: Measured | None = None) -> Measured:
    """steps: by step and rank, how many times as long as it should a rank takes."""
    measured = into or Measured(mesh or Mesh(pipeline=2), FLOPS)
    for factors in steps:
        measured.add([report(rank, held[rank], factor) for rank, factor in enumerate(factors)], step_s=max(factors))
    return measured


def estimate(measured: Measured) -> Estimate:
    found = measured.estimate()
    assert found is not None
    return found


def busy(found: Estimate, rank: int) -> float:
    """Seconds of one layer of a rank."""
    return (found.costs[HELD[rank][0]] * found.slowdowns[0][rank]).total


def test_costs_are_those_of_one_micro_batch() -> None:
    found = estimate(measure([(1.0, 1.0)] * 10))
    assert found.costs == (LayerCost(forward=1.0, backward_input=2.0, backward_weight=0.0),) * 4
    assert found.slowdowns == ((1.0, 1.0),)
    assert found.step_s == 1.0
    assert found.noise == 0.0


def test_split_backward() -> None:
    measured = Measured(Mesh(), FLOPS[:1])
    for _ in range(10):
        measured.add([RankTimes(rank=0, num_micro_batches=2, forward={0: 2.0}, backward={0: 6.0}, weight={0: 4.0})], 1.0)
    assert estimate(measured).costs == (LayerCost(forward=1.0, backward_input=3.0, backward_weight=2.0),)


def test_what_is_computed_again_is_no_cost_of_the_layer() -> None:
    """It depends on where the layer lives."""
    measured = Measured(Mesh(), FLOPS[:2])
    for _ in range(10):
        measured.add([RankTimes(rank=0, num_micro_batches=2, forward={0: 2.0, 1: 2.0}, backward={0: 6.0, 1: 4.0},
                                repeated={0: 1.0, 1: 0.0})], 1.0)
    assert estimate(measured).costs == (LayerCost(forward=1.0, backward_input=2.0, backward_weight=0.0),) * 2


def test_nothing_is_known_at_first() -> None:
    assert measure([]).estimate() is None
    measured = measure([(1.0, 1.0)] * (2 * RECENT - 1))
    assert measured.estimate() is None
    assert measure([(1.0, 1.0)], into=measured).estimate() is not None


def test_outliers_do_not_count() -> None:
    slow_now_and_then = [(9.0 if step % 5 == 0 else 1.0, 1.0) for step in range(40)]
    found = estimate(measure(slow_now_and_then))
    assert found.slowdowns == ((1.0, 1.0),)
    assert found.step_s == 1.0


def test_slow_first_steps_do_not_count() -> None:
    assert estimate(measure([(20.0, 20.0), (3.0, 2.0), *[(1.0, 1.0)] * 10])).costs[0].total == 3.0


@pytest.mark.parametrize("factor", [1.5, 0.6, 1.1])
def test_a_lasting_change_is_followed_at_once_without_noise(factor: float) -> None:
    found = estimate(measure([*[(1.0, 1.0)] * 30, *[(factor, 1.0)] * RECENT]))
    assert busy(found, 0) == pytest.approx(3 * factor)
    assert busy(found, 1) == pytest.approx(3.0)
    assert found.step_s == pytest.approx(max(factor, 1.0))


def test_a_small_change_is_followed_by_the_median() -> None:
    found = estimate(measure([*[(1.0, 1.0)] * 30, *[(1.02, 1.0)] * (WINDOW // 2 + 1)]))
    assert busy(found, 0) == pytest.approx(3.06)


@pytest.mark.parametrize("seed", range(10))
def test_a_lasting_change_is_followed_within_ten_steps_under_noise(seed: int) -> None:
    draw = random.Random(seed)
    steps = [(draw.gauss(1.0, 0.05), draw.gauss(1.0, 0.05)) for _ in range(60)]
    changed = [(1.5 * first, second) for first, second in steps[:10]]
    assert busy(estimate(measure([*steps, *changed])), 0) == pytest.approx(4.5, rel=0.08)


def test_noise_is_the_standard_error() -> None:
    """Of the median of WINDOW steps, which has 1.25 times that of the mean."""
    found = []
    for seed in range(40):
        draw = random.Random(seed)
        found.append(estimate(measure([(draw.gauss(1.0, 0.15), draw.gauss(1.0, 0.15)) for _ in range(60)])).noise)
    assert median(found) == pytest.approx(1.2533 * 0.15 / WINDOW**0.5, rel=0.25)
    assert min(found) > 0.01


def test_a_rank_whose_steps_agree_by_chance_counts_as_noisy_as_the_others() -> None:
    held, draw = {0: (0,), 1: (1,), 2: (2, 3)}, random.Random(1)
    noisy = [(draw.gauss(1.0, 0.1), draw.gauss(1.0, 0.1)) for _ in range(40 + RECENT)]
    before = measure([(*factors, 1.0) for factors in noisy[:40]], held, Mesh(pipeline=3))
    usual = estimate(before).noise
    assert estimate(measure([(*factors, 2.0) for factors in noisy[40:]], held, into=before)).noise > 1.2 * usual


def test_noise_after_a_change_is_that_of_few_steps() -> None:
    draw = random.Random(1)
    steps = [(draw.gauss(1.0, 0.02), draw.gauss(1.0, 0.02)) for _ in range(40)]
    before = estimate(measure(steps)).noise
    after = estimate(measure([*steps, *[(2.0 * first, second) for first, second in steps[:RECENT]]])).noise
    assert after == pytest.approx(before * (WINDOW / RECENT) ** 0.5, rel=0.5)


def test_after_a_move_the_step_time_is_that_of_the_new_split() -> None:
    measured = measure([(1.0, 1.0)] * 20)
    moved = {0: (0, 1, 2), 1: (3,)}
    measure([(1.3, 1.0)] * (RECENT - 1), moved, into=measured)
    assert measured.estimate() is None
    measure([(1.3, 1.0)], moved, into=measured)
    assert estimate(measured).step_s == 1.3


def test_other_shares_are_another_step_time() -> None:
    measured = Measured(Mesh(data=2), FLOPS)
    for shares, step_s, steps in (((4, 4), 1.0, 20), ((5, 3), 0.7, RECENT)):
        for _ in range(steps):
            measured.add([report(rank, range(4), 1.0, share) for rank, share in enumerate(shares)], step_s)
    assert estimate(measured).step_s == 0.7
    assert estimate(measured).costs[0].total == 3.0


def test_a_rank_that_gave_its_blocks_away_is_remembered_as_slow() -> None:
    """Until its speed changes."""
    flops = [*FLOPS, LayerCost(forward=9.0, backward_input=9.0, backward_weight=9.0)]
    measured = measure([(1.0, 1.5)] * 20, {0: (0, 1), 1: (2, 3, 4)}, into=Measured(Mesh(pipeline=2), flops))
    alone = {0: (0, 1, 2, 3), 1: (4,)}
    measure([(1.0, 1.5)] * 3 * WINDOW, alone, into=measured)
    assert estimate(measured).slowdowns == ((1.0, 1.5),)
    assert estimate(measured).costs[4].total == pytest.approx(3.0)
    measure([(1.0, 1.0)] * RECENT, alone, into=measured)
    assert estimate(measured).slowdowns == ((1.0, 1.0),)
    assert estimate(measured).costs[4].total == pytest.approx(3.0)


def test_the_slowest_tensor_rank_counts() -> None:
    """Rank 0 waits for rank 1 inside layer 3 for what rank 1 does in all layers; rank 1's own times are the work."""
    measured = Measured(Mesh(tensor=2), FLOPS)
    for _ in range(10):
        waiting = RankTimes(rank=0, num_micro_batches=1, forward={0: 1.0, 1: 1.0, 2: 1.0, 3: 2.9}, backward={})
        working = RankTimes(rank=1, num_micro_batches=1, forward=dict.fromkeys(range(4), 1.5), backward={})
        measured.add([waiting, working], 1.0)
    assert [cost.total for cost in estimate(measured).costs] == pytest.approx([1.5] * 4)


def test_a_replica_without_micro_batches_keeps_its_last_slowdown() -> None:
    measured = Measured(Mesh(data=2), FLOPS)
    for shares, steps in (((2, 2), 10), ((4, 0), 30)):
        for _ in range(steps):
            slow = report(1, range(4) if shares[1] else (), 3.0, shares[1])
            measured.add([report(0, range(4), 1.0, shares[0]), slow], 1.0)
    assert estimate(measured).slowdowns == ((1.0,), (3.0,))


def test_a_replica_that_never_had_one_counts_as_normal() -> None:
    measured = Measured(Mesh(data=2), FLOPS)
    for _ in range(10):
        measured.add([report(0, range(4)), report(1, (), micro_batches=0)], 1.0)
    assert estimate(measured).slowdowns == ((1.0,), (1.0,))
