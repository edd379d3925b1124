"""Runs lowered programs against the cost of each op: timeline, critical path, idle share, peak of held activations.

A send leaves at once and costs its rank nothing; its message arrives one hop later; a receive waits for it. Idle share
has two definitions that are often mixed up, so both are given, named: of wall time (share of the step in which a rank
does not compute) and of ideal time (idle over computing time; (p - 1) / m for GPipe and 1F1B with equal stages).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from raytrain3d.plan.program import RECEIVES, SENDS, Programs, in_order, receive_of
from raytrain3d.plan.schedule import Kind, Op


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One op in time, in seconds from the start of the step."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A simulated step."""

    spans: tuple[tuple[Span, ...], ...]
    """Compute ops by rank, in order."""
    critical_path: tuple[Span, ...]
    """The chain that ends last and has no gap, from 0 to the makespan: compute ops, and sends for the hops of messages that
    a rank waited for."""
    peak_in_flight: tuple[int, ...]
    """By rank: most micro-batches, of one stage each, that wait for their (weight) backward at a time."""

    @property
    def makespan(self) -> float:
        """Seconds until the last rank is done."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds of compute by rank."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def idle_of_wall(self) -> tuple[float, ...]:
        """By rank: idle over wall time, 0 to 1."""
        return tuple(idle_of_wall(busy, self.makespan) for busy in self.busy)

    @property
    def idle_of_ideal(self) -> tuple[float, ...]:
        """By rank: idle over computing time, 0 and up."""
        return tuple(self.makespan / busy - 1 if busy else 0.0 for busy in self.busy)


def idle_of_wall(busy: float, wall: float) -> float:
    """Share of `wall` (rank-seconds) that is not `busy`; 0 for an empty step."""
    return 1 - busy / wall if wall else 0.0


def simulate(programs: Programs, seconds: Callable[[Op], float], *, hop_s: float = 0.0) -> Timeline:
    """Time every op. seconds: cost of a compute op; hop_s: from the end of a send to its message's arrival.

    PlanError if the programs wait for each other.
    """
    clocks = [0.0] * len(programs.ops)
    chains: list[Chain | None] = [None] * len(programs.ops)
    spans: list[list[Span]] = [[] for _ in programs.ops]
    arrivals: dict[Op, tuple[float, Chain | None]] = {}
    for rank, op in in_order(programs):
        now = clocks[rank]
        if op.kind in RECEIVES:
            arrival, chain = arrivals[op]
            if arrival > now:
                clocks[rank], chains[rank] = arrival, chain
        elif op.kind in SENDS:
            hop = Span(op=op, start=now, end=now + hop_s)
            arrivals[receive_of(op)] = hop.end, (hop, chains[rank]) if hop_s else chains[rank]
        else:
            span = Span(op=op, start=now, end=now + seconds(op))
            spans[rank].append(span)
            clocks[rank], chains[rank] = span.end, (span, chains[rank])
    last = max(range(len(clocks)), key=lambda rank: clocks[rank])
    return Timeline(spans=tuple(map(tuple, spans)), critical_path=tuple(_unrolled(chains[last]))[::-1],
                    peak_in_flight=tuple(map(peak_in_flight, programs.ops)))


Chain = tuple[Span, "Chain | None"]
"""What brought a rank to where it is: the last span, and what brought it there."""


def _unrolled(chain: Chain | None) -> Iterator[Span]:
    """Newest first."""
    while chain is not None:
        span, chain = chain
        yield span


Held = Counter[tuple[int, Kind]]
"""(stage, last op done) -> micro-batches that wait on one rank: after F for their backward, after I for their W."""


CHANGES: dict[Kind, tuple[tuple[Kind, int], ...]] = {
    Kind.FORWARD: ((Kind.FORWARD, 1),), Kind.BACKWARD: ((Kind.FORWARD, -1),),
    Kind.BACKWARD_INPUT: ((Kind.FORWARD, -1), (Kind.BACKWARD_INPUT, 1)), Kind.BACKWARD_WEIGHT: ((Kind.BACKWARD_INPUT, -1),),
}
"""Compute op -> (last op done, how many micro-batches more)."""


def held_at_peak(ops: Iterable[Op], size: Callable[[int, Kind], float],
                 passing: Callable[[Op], float] = lambda op: 0.0) -> tuple[Held, Op | None]:
    """What one rank holds when it holds most, and the op within which that is, if it is within one; nothing in a program
    without backwards, which keeps nothing.

    size: what one micro-batch of a stage holds after F, or after I. passing: what is held within an op only.
    """
    held, most, during = Held(), Held(), None
    now = peak = 0.0
    training = False
    for op in ops:
        if now + passing(op) > peak:
            most, during, peak = held.copy(), op, now + passing(op)
        for after, count in CHANGES.get(op.kind, ()):
            held[op.stage, after] += count
            now += count * size(op.stage, after)
            training = training or count < 0
        if now > peak:
            most, during, peak = held.copy(), None, now
    return (+most, during) if training else (Held(), None)


def peak_in_flight(ops: Iterable[Op]) -> int:
    """Most micro-batches, of one stage each, that a rank holds at a time."""
    return held_at_peak(ops, lambda stage, kind: 1)[0].total()
