"""Pipeline schedules as data: which compute op each pipeline rank runs, in which order.

A schedule holds compute only. `program.py` adds the sends and receives, `simulate.py` times it, the runner executes it.
An op prints as stage, kind, micro-batch: `2F0`.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

from raytrain3d.errors import PlanError


class Kind(StrEnum):
    """What an op does. A full backward is input gradient and weight gradient together; split, the input gradient comes at
    once (the stage before waits for it) and the weight gradient whenever the schedule has time for it."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"


@dataclass(frozen=True, slots=True)
class Op:
    """One action of one stage on one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Compute order of all pipeline ranks."""

    name: str
    num_micro_batches: int
    placement: tuple[int, ...]
    """Stage -> pipeline rank that holds it."""
    ops: tuple[tuple[Op, ...], ...]
    """By pipeline rank."""

    @property
    def num_ranks(self) -> int:
        return len(self.ops)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def rank_of(self, stage: int) -> int:
        """Pipeline rank that holds `stage`."""
        return self.placement[stage]

    def forwards(self) -> "Schedule":
        """Evaluation: the forwards alone, in the same order."""
        ops = tuple(tuple(op for op in rank_ops if op.kind is Kind.FORWARD) for rank_ops in self.ops)
        return replace(self, ops=ops)


Step = tuple[Kind, int]
"""Kind of op and stage."""


def gpipe(num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards (https://arxiv.org/abs/1811.06965)."""
    _require_chunks("gpipe", chunks, 1)
    return replace(breadth_first(num_ranks, num_micro_batches, 1), name="gpipe")


def one_forward_one_backward(num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Schedule:
    """1F1B with a flush: rank i warms up with p - 1 - i forwards, then alternates, so that it holds the activations of
    at most p - i micro-batches (https://arxiv.org/abs/2104.04473)."""
    _require_chunks("1f1b", chunks, 1)

    def steps(rank: int) -> list[Step]:
        forwards, backwards = ([(kind, rank)] * num_micro_batches for kind in (Kind.FORWARD, Kind.BACKWARD))
        return _alternate(forwards, backwards, warmup=num_ranks - 1 - rank)

    return _schedule("1f1b", num_micro_batches, tuple(range(num_ranks)), steps)


def interleaved(num_ranks: int, num_micro_batches: int, chunks: int) -> Schedule:
    """1F1B over several chunks per rank, which divides the idle time by them (https://arxiv.org/abs/2104.04473).

    A group of micro-batches goes through one chunk, then through the next; p of them in the paper, where m is a multiple
    of p. Here any m is cut into m // p groups of nearly equal size. None is smaller than p, so no rank waits for a group
    to come round (a short last group may even deadlock), and the idle time is the same for every m >= p. A rank holds
    one group for every chunk but the last, so a little over a multiple of p costs memory instead of time.
    """
    num_groups = max(num_micro_batches // num_ranks, 1)
    groups = [num_micro_batches // num_groups + (i < num_micro_batches % num_groups) for i in range(num_groups)]

    def steps(rank: int) -> list[Step]:
        stages = range(rank, num_ranks * chunks, num_ranks)
        forwards = [(Kind.FORWARD, stage) for size in groups for stage in stages for _ in range(size)]
        backwards = [(Kind.BACKWARD, stage) for size in groups for stage in reversed(stages) for _ in range(size)]
        return _alternate(forwards, backwards, warmup=(chunks - 1) * groups[0] + 2 * (num_ranks - 1 - rank))

    return _schedule("interleaved", num_micro_batches, _round_robin(num_ranks, chunks), steps)


def breadth_first(num_ranks: int, num_micro_batches: int, chunks: int) -> Schedule:
    """All micro-batches through a chunk before the next chunk, back likewise; GPipe if there is one chunk
    (https://arxiv.org/abs/2211.05953)."""
    def steps(rank: int) -> list[Step]:
        stages = range(rank, num_ranks * chunks, num_ranks)
        return [(kind, stage) for kind, order in ((Kind.FORWARD, stages), (Kind.BACKWARD, reversed(stages)))
                for stage in order for _ in range(num_micro_batches)]

    return _schedule("breadth_first", num_micro_batches, _round_robin(num_ranks, chunks), steps)


def zero_bubble_h1(num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Schedule:
    """1F1B with split backward: rank i is i weight gradients behind its input gradients, so that it holds the activations
    of at most p micro-batches and has work while the last input gradients run back (https://arxiv.org/abs/2401.10241)."""
    _require_chunks("zb_h1", chunks, 1)
    whole = one_forward_one_backward(num_ranks, num_micro_batches)
    return replace(whole, name="zb_h1", ops=tuple(tuple(_split(ops, rank)) for rank, ops in enumerate(whole.ops)))


def _split(ops: Iterable[Op], behind: int) -> Iterator[Op]:
    """Each full backward as input gradient and, `behind` input gradients later or at the end, weight gradient."""
    owed: deque[Op] = deque()
    for op in ops:
        if op.kind is not Kind.BACKWARD:
            yield op
            continue
        yield replace(op, kind=Kind.BACKWARD_INPUT)
        owed.append(replace(op, kind=Kind.BACKWARD_WEIGHT))
        if len(owed) > behind:
            yield owed.popleft()
    yield from owed


def zero_bubble_v(num_ranks: int, num_micro_batches: int, chunks: int = 2) -> Schedule:
    """Split backward over two chunks per rank in a V: stages i and 2p - 1 - i on rank i, so that the last stage's gradients
    start on the rank that reads the input; every rank holds p micro-batches (https://arxiv.org/abs/2401.10241, section 6).

    Without a gap when F, I and W of a stage take equally long and m >= 2p - 1. Fewer micro-batches take the order of
    2p - 1 and leave out the ones that do not exist.
    """
    _require_chunks("zb_v", chunks, 2)
    full = max(num_micro_batches, 2 * num_ranks - 1)

    def steps(rank: int) -> list[Step]:
        below = num_ranks - rank  # ranks from here to the tip of the V
        down, up = ([(kind, stage) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
                    for stage in (rank, 2 * num_ranks - 1 - rank))
        (down_f, down_i, down_w), (up_f, up_i, up_w) = down, up
        fed = full - below - num_ranks + 1  # rounds of the steady phase that have a new micro-batch to start
        return ([down_f] * (2 * below - 1) + [up_f, down_f] * rank + up * below
                + (down + up) * fed + [down_i, down_w, *up] * (below - 1)
                + [down_i, up_i] * rank + [down_i, down_w] * below + [up_w] * rank + [down_w] * rank)

    placement = tuple(min(stage, 2 * num_ranks - 1 - stage) for stage in range(2 * num_ranks))
    return _schedule("zb_v", num_micro_batches, placement, steps)


def _alternate(forwards: list[Step], backwards: list[Step], warmup: int) -> list[Step]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return [*forwards[:warmup], *steady, *backwards[max(len(forwards) - warmup, 0):]]


def _round_robin(num_ranks: int, chunks: int) -> tuple[int, ...]:
    return tuple(range(num_ranks)) * chunks


def _require_chunks(name: str, chunks: int, valid: int) -> None:
    if chunks != valid:
        raise PlanError(f"schedule {name} with {chunks} chunks per pipeline rank: it has always {valid}")


def _schedule(name: str, num_micro_batches: int, placement: tuple[int, ...],
              steps: Callable[[int], list[Step]]) -> Schedule:
    """The n-th time that a stage does a kind of op, it does it for micro-batch n. So every schedule adds up a stage's
    gradients in the same order. steps: of a pipeline rank; those beyond the last micro-batch are left out."""
    def ops(rank: int) -> Iterator[Op]:
        seen: Counter[Step] = Counter()
        for step in steps(rank):
            if seen[step] < num_micro_batches:
                yield Op(*step, seen[step])
            seen[step] += 1

    return Schedule(name=name, num_micro_batches=num_micro_batches, placement=placement,
                    ops=tuple(tuple(ops(rank)) for rank in range(max(placement) + 1)))


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved, "breadth_first": breadth_first,
    "zb_h1": zero_bubble_h1, "zb_v": zero_bubble_v,
}
"""Generators by the name in `pipeline.schedule`: (pipeline ranks, micro-batches, chunks per rank) -> Schedule.

Each is there for every number of micro-batches, 0 included: shares change when replicas come and go."""
