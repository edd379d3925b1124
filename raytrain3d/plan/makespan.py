"""How long a step of one pipeline takes, fast: what a search over thousands of splits asks.

`plan.simulate` follows messages op by op and keeps the timeline. Which op waits for which does not depend on costs, so
here that is worked out once for a program; a split then takes one pass of additions and comparisons, and gets the same
makespan to the bit. The pass also tells the critical path. What is critical under one split is a way through the step
under every split, so its length there is a lower bound, known without a simulation.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.program import RECEIVES, SENDS, Programs, in_order, programs_for
from raytrain3d.plan.schedule import Kind, Op

Seconds = Sequence[float]
"""Costs of the ops of all stages, one stage after the other, each by kind in the order of COSTS; at the end a 0."""
COSTS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
START, NEVER = 0, 1
"""Numbers before those of the ops: what is done at second 0, and what was done long before."""


def stage_seconds(cost: LayerCost, slowdown: float) -> tuple[float, ...]:
    """One stage's part of `Seconds`, on a rank of that slowdown."""
    slow = cost * slowdown
    return slow.forward, slow.backward, slow.backward_input, slow.backward_weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """A chain of ops and messages through a step, each after the one before."""

    counts: tuple[tuple[int, int], ...]
    """(index into `Seconds`, number of ops that cost this)."""
    num_hops: int

    def length(self, seconds: Seconds, hop_s: float) -> float:
        """Seconds from the chain's start to its end: at most the makespan."""
        return sum([seconds[index] * count for index, count in self.counts]) + self.num_hops * hop_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """The compute ops of all ranks, each after what it needs, numbered from 2."""

    placement: tuple[int, ...]
    """Stage -> pipeline rank."""
    costs: tuple[int, ...]
    """By op: index into `Seconds`."""
    before: tuple[int, ...]
    """By op: the one before it on its rank, or START."""
    sources: tuple[int, ...]
    """By op: the one whose message it waits for, or NEVER."""

    def ends(self, seconds: Seconds, hop_s: float = 0.0) -> list[float]:
        """By number: when the op is done, in seconds from the start of the step."""
        ends = [0.0, -inf]
        for cost, before, source in zip(self.costs, self.before, self.sources, strict=True):
            start, arrival = ends[before], ends[source] + hop_s
            ends.append((arrival if arrival > start else start) + seconds[cost])
        return ends

    def makespan(self, seconds: Seconds, hop_s: float = 0.0) -> float:
        """Seconds until the last rank is done."""
        return max(self.ends(seconds, hop_s))

    def critical_path(self, ends: Sequence[float], hop_s: float = 0.0) -> Path:
        """The chain that ends last and has no gap, from what `ends` returned."""
        counts: Counter[int] = Counter()
        at, num_hops = ends.index(max(ends)), 0
        while at > NEVER:
            counts[self.costs[at - 2]] += 1
            before, source = self.before[at - 2], self.sources[at - 2]
            at, num_hops = (source, num_hops + 1) if ends[source] + hop_s > ends[before] else (before, num_hops)
        return Path(counts=tuple(counts.items()), num_hops=num_hops)


@lru_cache(maxsize=64)
def compiled(schedule: str, num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Compiled:
    """The program of a named schedule."""
    return compile_programs(programs_for(schedule, num_ranks, num_micro_batches, chunks))


def compile_programs(programs: Programs) -> Compiled:
    """Programs that `lower` made: a send follows the op that made its data."""
    made: dict[tuple[bool, int, int], int] = {}
    waiting: list[list[int]] = [[] for _ in programs.ops]
    latest = [START] * len(programs.ops)
    rows: list[tuple[int, int, int]] = []

    def add(rank: int, cost: int, source: int) -> None:
        rows.append((cost, latest[rank], source))
        latest[rank] = len(rows) + NEVER

    for rank, op in in_order(programs):
        if op.kind in RECEIVES:
            waiting[rank].append(made[_sent(op)])
        elif op.kind not in SENDS:
            *others, source = waiting[rank] or [NEVER]
            for other in others:  # an op after several receives: waiting for each of the others costs nothing itself
                add(rank, len(COSTS) * programs.schedule.num_stages, other)
            waiting[rank].clear()
            add(rank, len(COSTS) * op.stage + COSTS.index(op.kind), source)
            if op.kind is not Kind.BACKWARD_WEIGHT:
                made[op.kind is Kind.FORWARD, op.stage, op.micro_batch] = latest[rank]
    costs, before, sources = zip(*rows, strict=True) if rows else ((), (), ())
    return Compiled(placement=programs.schedule.placement, costs=costs, before=before, sources=sources)


def _sent(receive: Op) -> tuple[bool, int, int]:
    """What made the data of a message: whether a forward, its stage and micro-batch."""
    forward = receive.kind is Kind.RECEIVE_FORWARD
    return forward, receive.stage + (-1 if forward else 1), receive.micro_batch


@lru_cache(maxsize=64)
def straight_paths(schedule: str, num_ranks: int, num_micro_batches: int, chunks: int = 1) -> tuple[Path, ...]:
    """By rank: what is critical when that rank is by far the slowest. To it, through its ops, and back."""
    program = compiled(schedule, num_ranks, num_micro_batches, chunks)

    def path(slow: int) -> Path:
        seconds = [1e3 if rank == slow else 1.0 for rank in program.placement for _ in COSTS]
        return program.critical_path(program.ends([*seconds, 0.0]))

    return tuple(path(rank) for rank in range(num_ranks))
