import random
from collections.abc import Mapping

import pytest

from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.separate import Place, Separated, separate


def cost(seconds: float) -> LayerCost:
    return LayerCost(forward=seconds, backward_input=1.5 * seconds, backward_weight=0.5 * seconds)


def separated(now: Mapping[Place, Mapping[int, float]], former: Mapping[Place, Mapping[int, float]] | None = None,
              blocks: int = 8) -> Separated:
    """Layers 1 to `blocks` are alike, embedding and head are not. Times are those of a forward."""
    flops = [cost(0.01), *[cost(1.0)] * blocks, cost(4.0)]
    as_costs = {place: {layer: cost(time) for layer, time in times.items()} for place, times in now.items()}
    before = {place: {layer: cost(time) for layer, time in times.items()} for place, times in (former or {}).items()}
    return separate(as_costs, before, flops)


def forwards(found: Separated) -> dict[int, float]:
    return {layer: pytest.approx(found.costs[layer].forward) for layer in sorted(found.costs)}


def test_a_rank_whose_blocks_are_all_slow_is_slow_and_its_head_too() -> None:
    found = separated({(0, 0): {0: 0.1, 1: 1.0, 2: 1.0}, (0, 1): {3: 1.0, 4: 1.0}, (0, 2): {5: 1.5, 6: 1.5, 9: 6.0}})
    assert found.slowdowns == {(0, 0): 1.0, (0, 1): 1.0, (0, 2): pytest.approx(1.5)}
    assert forwards(found) == {0: 0.1, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0, 9: 4.0}


def test_a_block_slower_than_its_fellows_is_costly() -> None:
    found = separated({(0, 0): {1: 1.0, 2: 3.0}, (0, 1): {3: 1.0, 4: 1.0, 5: 2.0}})
    assert set(found.slowdowns.values()) == {1.0}
    assert forwards(found) == {1: 1.0, 2: 3.0, 3: 1.0, 4: 1.0, 5: 2.0}


def test_costly_block_on_a_slow_rank() -> None:
    found = separated({(0, 0): {1: 1.0, 2: 1.0}, (0, 1): {3: 2.0, 4: 2.0, 5: 6.0}, (0, 2): {6: 1.0, 7: 1.0}})
    assert found.slowdowns[0, 1] == pytest.approx(2.0)
    assert forwards(found)[5] == 3.0


def test_of_two_ranks_the_faster_is_normal() -> None:
    assert separated({(0, 0): {1: 1.5, 2: 1.5}, (0, 1): {3: 1.0, 4: 1.0}}).slowdowns == {(0, 0): 1.5, (0, 1): 1.0}


def test_replicas_tell_a_slow_rank_from_a_costly_block() -> None:
    """With a block on each rank only what differs between replicas is a rank's."""
    rank = separated({(0, 0): {1: 1.0}, (0, 1): {2: 1.5}, (1, 0): {1: 1.0}, (1, 1): {2: 1.0}})
    assert rank.slowdowns == {(0, 0): 1.0, (0, 1): 1.5, (1, 0): 1.0, (1, 1): 1.0}
    block = separated({(0, 0): {1: 1.0}, (0, 1): {2: 1.5}, (1, 0): {1: 1.0}, (1, 1): {2: 1.5}})
    assert set(block.slowdowns.values()) == {1.0}
    assert forwards(block) == {1: 1.0, 2: 1.5}


def test_a_lone_block_known_from_another_rank() -> None:
    """It took 2 where it was before, beside normal ones: it is costly, and its rank is normal."""
    now = {(0, 0): {1: 1.0, 2: 1.0}, (0, 1): {3: 2.0}}
    assert separated(now).slowdowns[0, 1] == 2.0
    known = separated(now, {(0, 0): {3: 2.0}})
    assert known.slowdowns[0, 1] == 1.0
    assert forwards(known)[3] == 2.0


def test_what_is_known_of_a_block_is_its_cost_not_its_time() -> None:
    """It took 3 on a rank of slowdown 1.5, and takes 4 where it is alone."""
    found = separated({(0, 0): {1: 1.0, 2: 1.0}, (0, 1): {4: 1.5, 5: 1.5}, (0, 2): {3: 4.0}, (0, 3): {6: 1.0, 7: 1.0}},
                      {(0, 1): {3: 3.0}})
    assert found.slowdowns[0, 2] == pytest.approx(2.0)


def test_a_rank_that_gave_its_blocks_away_is_as_slow_as_before() -> None:
    now = {(0, 0): {1: 1.0, 2: 1.0}, (0, 1): {3: 1.0, 4: 1.0}, (0, 2): {9: 6.0}}
    assert forwards(separated(now))[9] == 6.0
    known = separated(now, {(0, 2): {3: 1.5, 4: 1.5}})
    assert known.slowdowns[0, 2] == 1.5
    assert forwards(known)[9] == 4.0


def test_a_head_that_moved_tells_the_speed_of_a_rank_without_blocks() -> None:
    found = separated({(0, 0): {1: 1.0, 2: 1.0}, (0, 1): {9: 6.0}}, {(0, 0): {9: 4.0}})
    assert found.slowdowns[0, 1] == 1.5


def test_a_layer_without_time() -> None:
    found = separated({(0, 0): {0: 0.0, 1: 1.0, 2: 1.0}, (0, 1): {9: 0.0}})
    assert found.slowdowns == {(0, 0): 1.0, (0, 1): 1.0}


@pytest.mark.parametrize("seed", range(20))
def test_the_product_is_what_was_measured(seed: int) -> None:
    """Each layer with one replica; each rank in total, with more."""
    draw = random.Random(seed)
    replicas = draw.randint(1, 3)
    held = [(0, 1, 2), (3,), (4, 5, 6, 7), (8, 9)]
    now = {(replica, rank): {layer: draw.uniform(0.5, 4.0) for layer in layers}
           for replica in range(replicas) for rank, layers in enumerate(held)}
    found = separated(now)
    for place, times in now.items():
        product = {layer: (found.costs[layer] * found.slowdowns[place]) for layer in times}
        assert sum(one.total for one in product.values()) == pytest.approx(3 * sum(times.values()))
        if replicas == 1:
            assert [one.backward_weight for one in product.values()] == pytest.approx([time / 2 for time in times.values()])


@pytest.mark.parametrize("seed", range(20))
def test_true_costs_and_slowdowns_are_found(seed: int) -> None:
    """Alike blocks, fewer than half of the ranks slow."""
    draw = random.Random(seed)
    slowdowns = [1.0, 1.0, 1.0, 1 + draw.random()]
    draw.shuffle(slowdowns)
    costs = [0.1, *[1.0] * 8, draw.uniform(2, 5)]
    held = [(0, 1, 2), (3, 4), (5, 6), (7, 8, 9)]
    found = separated({(0, rank): {layer: costs[layer] * slowdowns[rank] for layer in layers}
                       for rank, layers in enumerate(held)})
    assert [found.slowdowns[0, rank] for rank in range(4)] == pytest.approx(slowdowns)
    assert [found.costs[layer].forward for layer in range(10)] == pytest.approx(costs)
