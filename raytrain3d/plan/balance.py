"""The split of layers over stages, and of micro-batches over replicas, with the least simulated step time.

A slowest stage as fast as possible is where the search starts (exact, by dynamic programme), not where it ends: how
forward and backward differ, and how often a stage comes up on the critical path, depend on the schedule. So from there
boundaries move as long as the simulated step gets shorter, and where there are only a few thousand splits all of them
are looked at. Paths that were critical before rule out most splits without a simulation.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate, combinations, combinations_with_replacement, pairwise
from math import comb, inf

from raytrain3d.errors import PlanError
from raytrain3d.plan.moves import num_moves
from raytrain3d.plan.partition import Stages, split_evenly
from raytrain3d.plan.workload import Replica, Simulator, Workload

FEW = 5_000
"""Up to so many splits all are looked at."""
ROUNDING = 1e-6
"""Share of the step time below which a difference is none."""
TIE = 1e-3
"""Share of the step time that is not worth a move: what is not simulated is more."""

Score = tuple[float, float]
"""Bytes that are missing, seconds of a step. Less is better."""


def best_stages(workload: Workload, current: Stages | None = None) -> Stages:
    """The split of least step time that fits; of those within TIE of it the one fewest moves away from `current`.

    PlanError if none is found that fits.
    """
    search = Search(workload)
    starts = [slowest_stage_least(workload), split_evenly(workload.num_layers, workload.num_stages)]
    for start in [*starts, *([current] if current is not None else [])]:
        search.descend(start)
    for stages in every_split(workload):
        search.look_at(stages)
    if search.score[0]:
        raise PlanError(f"no split of {workload.num_layers} layers over {workload.num_stages} stages fits: ranks lack at "
                        f"least {search.score[0] / 2**30:.2f} GiB of memory")
    return search.best if current is None else search.nearest(current)


class Search:
    """The best split so far, and ways to a better one."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._simulator = Simulator(workload)
        self.best: Stages = ()
        self.score: Score = (inf, inf)

    def look_at(self, stages: Stages) -> None:
        score = self._if_below(self.score, stages)
        if score is not None:
            self.best, self.score = stages, score

    def descend(self, start: Stages) -> None:
        """From `start` to better neighbours until there is none."""
        at, score = start, self._if_below((inf, inf), start)
        while score is not None:
            self.look_at(at)
            at, score = self._first_below(score, neighbours(at))

    def nearest(self, current: Stages) -> Stages:
        """The split within TIE of the best that is fewest moves away from `current`."""
        def away(stages: Stages) -> int:
            return num_moves(current, stages)

        limit = self.score[0], self.score[1] * (1 + TIE)
        at = self._first_below(limit, sorted(every_split(self._workload), key=away))[0] or self.best
        while nearer := self._first_below(limit, [stages for stages in neighbours(at) if away(stages) < away(at)])[0]:
            at = nearer
        return at

    def _first_below(self, limit: Score, candidates: Iterable[Stages]) -> tuple[Stages, Score | None]:
        for stages in candidates:
            score = self._if_below(limit, stages)
            if score is not None:
                return stages, score
        return (), None

    def _if_below(self, limit: Score, stages: Stages) -> Score | None:
        """The score of `stages` if it is below `limit`."""
        excess, time = limit
        if excess:
            less = self._excess(stages)
            return (less, self._simulator.time(stages)) if less < excess else None
        time *= 1 - ROUNDING
        new = self._simulator.time(stages, time)
        return (0.0, new) if new < time and not self._excess(stages) else None

    def _excess(self, stages: Stages) -> float:
        return self._workload.excess(stages) if self._workload.excess is not None else 0.0


def every_split(workload: Workload) -> Iterator[Stages]:
    """All splits, if they are few."""
    layers, cuts = workload.num_layers, workload.num_stages - 1
    if comb(layers - 1, cuts) <= FEW:
        yield from (tuple(pairwise((0, *ends, layers))) for ends in combinations(range(1, layers), cuts))


def neighbours(stages: Stages) -> Iterator[Stages]:
    """Splits in which one stage has a layer more and another one less: the boundaries between them shift by one."""
    ends = [0, *(end for _, end in stages)]
    for first, last in combinations_with_replacement(range(1, len(stages)), 2):
        if ends[first] - ends[first - 1] > 1:
            yield _shifted(ends, first, last, -1)
        if ends[last + 1] - ends[last] > 1:
            yield _shifted(ends, first, last, 1)


def _shifted(ends: list[int], first: int, last: int, by: int) -> Stages:
    return tuple(pairwise((*ends[:first], *(end + by for end in ends[first:last + 1]), *ends[last + 1:])))


def slowest_stage_least(workload: Workload) -> Stages:
    """The split with the least busy time of the slowest stage over all replicas, exactly; of equal ones that with more
    layers on late stages. Chunks of a rank count apart, memory does not count."""
    weights = [max(share * slowdowns[rank] for share, slowdowns in zip(workload.shares, workload.slowdowns, strict=True))
               for rank in workload.placement]
    slowest = [0.0] + [inf] * workload.num_layers  # by number of layers taken from the front
    choices: list[list[int]] = []  # by stage and number of layers up to its end: its first layer
    for stage, weight in enumerate(weights):
        costs = (workload.stage_cost(stage, (layer, layer + 1)).total for layer in range(workload.num_layers))
        before = list(accumulate(costs, initial=0.0))
        rows = [min(((max(slowest[first], (before[end] - before[first]) * weight), first) for first in range(end)),
                    default=(inf, 0)) for end in range(len(before))]
        slowest, firsts = [row[0] for row in rows], [row[1] for row in rows]
        choices.append(firsts)
    ends = [workload.num_layers]
    for firsts in reversed(choices):
        ends.append(firsts[ends[-1]])
    return tuple(pairwise(reversed(ends)))


def best_shares(workload: Workload, stages: Stages) -> tuple[int, ...]:
    """The micro-batches of `workload.shares`, divided so that the slowest replica takes the least time.

    From the shares as they are, one micro-batch at a time goes from the slowest replica to the one that is done earliest
    with it: as few go as need to. A replica may end with none.
    """
    @cache
    def time(slowdowns: tuple[float, ...], share: int) -> float:
        return Replica(workload, share, slowdowns).time(stages)

    shares, slowdowns = list(workload.shares), workload.slowdowns
    replicas = range(len(shares))
    while True:
        source = max(replicas, key=lambda replica: time(slowdowns[replica], shares[replica]))
        target = min(replicas, key=lambda replica: time(slowdowns[replica], shares[replica] + 1))
        now = time(slowdowns[source], shares[source])
        if max(time(slowdowns[source], shares[source] - 1), time(slowdowns[target], shares[target] + 1)) >= now:
            return tuple(shares)
        shares[source] -= 1
        shares[target] += 1
