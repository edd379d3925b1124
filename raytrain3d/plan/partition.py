"""Layers to stages: contiguous, every layer on exactly one stage, every stage with at least one layer.

Here by weights alone; `balance.py` goes on to the least simulated step time. The slowest rank sets the pace of a pipeline.
With a stage for each rank a split is chosen for the least cost of its slowest stage, exactly, by dynamic programme. Among
those the most even one wins (least sum of squares), and what is still equal goes to the split with fewer layers on earlier
stages, which hold the activations of more micro-batches. With several stages for each rank that split is where a search
starts: single layers move as long as the ranks become more even.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from raytrain3d.errors import PlanError

Stages = tuple[tuple[int, int], ...]
"""Stage -> (first layer, one past the last)."""

RESOLUTION = 2**40
"""Costs are compared as whole numbers of total / RESOLUTION, so that equal costs are equal whatever their rounding."""


def split_by_counts(counts: Sequence[int], num_layers: int) -> Stages:
    """Stages with the given numbers of layers. PlanError unless they are at least 1 and add up to `num_layers`."""
    if min(counts, default=0) < 1 or sum(counts) != num_layers:
        raise PlanError(f"stages of {list(counts)} layers do not hold {num_layers} layers with at least one each")
    return tuple(pairwise(accumulate(counts, initial=0)))


def counts_of(stages: Stages) -> tuple[int, ...]:
    """Layers of each stage."""
    return tuple(end - first for first, end in stages)


def counts_text(stages: Stages) -> str:
    """`5,5,4,2`."""
    return ",".join(map(str, counts_of(stages)))


def split_evenly(num_layers: int, num_stages: int) -> Stages:
    """Equal counts; the first stages take the remainder (the embedding there costs next to nothing)."""
    quotient, remainder = divmod(num_layers, num_stages)
    return split_by_counts([quotient + (stage < remainder) for stage in range(num_stages)], num_layers)


def split_by_cost(costs: Sequence[float], num_stages: int) -> Stages:
    """The contiguous split with the least cost of the slowest stage.

    costs: one per layer, at least 0, in any one unit: FLOPs, parameters or measured seconds.
    """
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise PlanError(f"{num_layers} layers cannot be split over {num_stages} stages: every stage keeps at least one")
    before = _summed(costs)
    limit = _least_maximum(before, num_stages)
    return _most_even(before, num_stages, limit)


def split_over_ranks(costs: Sequence[float], placement: Sequence[int]) -> Stages:
    """The split over stages that are dealt to ranks as `placement` says (stage -> rank), for a low cost of the slowest rank,
    then for even ranks. The least there is with one stage for each rank; else no move of one layer makes it better."""
    before = _summed(costs)
    counts = [end - first for first, end in split_by_cost(costs, len(placement))]
    while True:
        loads = _loads(before, counts, placement)
        fullest = [stage for stage, rank in enumerate(placement) if loads[rank] == max(loads) and counts[stage] > 1]
        moved = [_moved(counts, giver, taker) for giver in fullest for taker in range(len(counts)) if giver != taker]
        best = min(moved, key=lambda each: _unevenness(_loads(before, each, placement)), default=counts)
        if _unevenness(_loads(before, best, placement)) >= _unevenness(loads):
            return split_by_counts(counts, len(costs))
        counts = best


def _loads(before: list[int], counts: Sequence[int], placement: Sequence[int]) -> list[int]:
    """Cost by rank of a split into stages of `counts` layers."""
    loads, ends = [0] * (max(placement) + 1), list(accumulate(counts, initial=0))
    for rank, (first, end) in zip(placement, pairwise(ends), strict=True):
        loads[rank] += before[end] - before[first]
    return loads


def _moved(counts: list[int], giver: int, taker: int) -> list[int]:
    """One layer less on a stage, one more on another; those between keep their number."""
    return [count - (stage == giver) + (stage == taker) for stage, count in enumerate(counts)]


def _unevenness(loads: list[int]) -> tuple[int, int]:
    return max(loads), sum(load**2 for load in loads)


def _summed(costs: Sequence[float]) -> list[int]:
    """Cost of layers [0, i) by i, in whole units."""
    total = float(sum(costs))
    if min(costs) < 0:
        raise PlanError(f"layer costs must be at least 0, one is {min(costs)}")
    return list(accumulate((round(cost / total * RESOLUTION) if total else 0 for cost in costs), initial=0))


def _least_maximum(before: list[int], num_stages: int) -> int:
    """Least cost of the slowest stage. `before[i]` is the cost of layers [0, i)."""
    num_layers = len(before) - 1
    best = before[:]  # by number of layers taken from the front, on one stage
    for stage in range(2, num_stages + 1):
        best = [0] * stage + [min(max(best[first], before[end] - before[first]) for first in range(stage - 1, end))
                              for end in range(stage, num_layers + 1)]
    return best[num_layers]


def _most_even(before: list[int], num_stages: int, limit: int) -> Stages:
    """The split of least sum of squares with no stage above `limit`."""
    num_layers = len(before) - 1

    @cache
    def best(first: int, stages: int) -> tuple[int, int] | None:
        """(sum of squares, end of the first stage) for layers [first, num_layers) on `stages`; None: impossible."""
        if stages == 1:
            cost = before[num_layers] - before[first]
            return (cost**2, num_layers) if cost <= limit else None
        found: tuple[int, int] | None = None
        for end in range(first + 1, num_layers - stages + 2):
            cost = before[end] - before[first]
            if cost > limit:
                break
            rest = best(end, stages - 1)
            if rest is not None and (found is None or cost**2 + rest[0] < found[0]):
                found = (cost**2 + rest[0], end)
        return found

    ends = [0]
    for stages in range(num_stages, 0, -1):
        split = best(ends[-1], stages)
        assert split is not None, "the least maximum is reached by some split"
        ends.append(split[1])
    return tuple(pairwise(ends))
