"""Pipeline schedules as data: which compute op each pipeline rank runs, in which order.

A schedule holds compute only. `program.py` adds the sends and receives, `simulate.py` times it, the runner executes it.
An op prints as stage, kind, micro-batch: `2F0`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What an op does. A full backward is input gradient and weight gradient together."""

    FORWARD = "F"
    BACKWARD = "B"
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
    num_stages: int
    ops: tuple[tuple[Op, ...], ...]
    """By pipeline rank."""

    @property
    def num_ranks(self) -> int:
        return len(self.ops)

    def rank_of(self, stage: int) -> int:
        """Pipeline rank that holds `stage`. Stages are dealt round robin."""
        return stage % self.num_ranks


def _forwards(stage: int, micro_batches: Iterable[int]) -> tuple[Op, ...]:
    return tuple(Op(Kind.FORWARD, stage, i) for i in micro_batches)


def _backwards(stage: int, micro_batches: Iterable[int]) -> tuple[Op, ...]:
    return tuple(Op(Kind.BACKWARD, stage, i) for i in micro_batches)


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards (https://arxiv.org/abs/1811.06965)."""
    every = range(num_micro_batches)
    ops = tuple(_forwards(stage, every) + _backwards(stage, every) for stage in range(num_ranks))
    return Schedule(name="gpipe", num_micro_batches=num_micro_batches, num_stages=num_ranks, ops=ops)


def one_forward_one_backward(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B with a flush: rank i warms up with p - 1 - i forwards, then alternates, so that it holds the activations of
    at most p - i micro-batches (https://arxiv.org/abs/2104.04473)."""
    def rank_ops(stage: int) -> tuple[Op, ...]:
        warmup = min(num_ranks - 1 - stage, num_micro_batches)
        steady = range(num_micro_batches - warmup)
        pairs = (op for i in steady for op in _forwards(stage, [warmup + i]) + _backwards(stage, [i]))
        return (*_forwards(stage, range(warmup)), *pairs, *_backwards(stage, range(len(steady), num_micro_batches)))

    ops = tuple(rank_ops(stage) for stage in range(num_ranks))
    return Schedule(name="1f1b", num_micro_batches=num_micro_batches, num_stages=num_ranks, ops=ops)


def forward_only(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Evaluation: forwards alone."""
    ops = tuple(_forwards(stage, range(num_micro_batches)) for stage in range(num_ranks))
    return Schedule(name="forward", num_micro_batches=num_micro_batches, num_stages=num_ranks, ops=ops)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe, "1f1b": one_forward_one_backward, "forward": forward_only,
}
"""Generators by the name in `pipeline.schedule`: (pipeline ranks, micro-batches) -> Schedule."""
