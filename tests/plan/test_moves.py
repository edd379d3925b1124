import random
from itertools import accumulate, pairwise

import pytest

from raytrain3d.plan.moves import Shift, after, moves, num_moves
from raytrain3d.plan.partition import Stages


def split(*counts: int) -> Stages:
    return tuple(pairwise(accumulate(counts, initial=0)))


def random_split(draw: random.Random, num_layers: int, num_stages: int) -> Stages:
    return tuple(pairwise((0, *sorted(draw.sample(range(1, num_layers), num_stages - 1)), num_layers)))


def follow(stages: Stages, shifts: tuple[Shift, ...]) -> list[Stages]:
    """Every split on the way, each layer checked to be at the border that it crosses."""
    way = [stages]
    for shift in shifts:
        held = [list(range(*stage)) for stage in way[-1]]
        ahead = shift.target == shift.source + 1
        assert ahead or shift.target == shift.source - 1
        assert shift.layer == held[shift.source].pop(-1 if ahead else 0)
        held[shift.target].insert(0 if ahead else len(held[shift.target]), shift.layer)
        way.append(tuple((layers[0], layers[-1] + 1) for layers in held))
        assert way[-1] == after(way[-2], shift)
    return way


@pytest.mark.parametrize("seed", range(60))
def test_every_split_on_the_way_is_valid_and_there_are_fewest(seed: int) -> None:
    draw = random.Random(seed)
    num_layers = draw.randint(1, 14)
    num_stages = draw.randint(1, num_layers)
    current, target = (random_split(draw, num_layers, num_stages) for _ in range(2))
    shifts = moves(current, target)
    way = follow(current, shifts)
    assert way[-1] == target
    assert all(end > first for stages in way for first, end in stages)
    borders = zip(current, target, strict=True)
    assert len(shifts) == num_moves(current, target) == sum(abs(a - b) for (a, _), (b, _) in borders)


def test_no_stage_holds_more_than_before_or_after_where_it_can_be_avoided() -> None:
    """The stage that gives first has room for what it takes."""
    assert [str(s.boundary) for s in moves(split(4, 4, 4, 4), split(5, 4, 4, 3))] == ["0", "1", "2"]
    assert [s.layer for s in moves(split(4, 4, 4, 4), split(3, 4, 4, 5))] == [11, 7, 3]


def test_a_stage_of_one_layer_takes_before_it_gives() -> None:
    assert moves(split(1, 1, 2), split(2, 1, 1)) == (Shift(layer=2, source=2, target=1), Shift(layer=1, source=1, target=0))


def test_a_split_is_no_move_away_from_itself() -> None:
    assert moves(split(3, 2), split(3, 2)) == ()
