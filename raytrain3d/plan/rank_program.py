"""One rank's program, with everything about it that can be known before it runs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from raytrain3d.plan.program import RECEIVES, SENDS, STEP, Channel, Programs, programs_for, receive_of
from raytrain3d.plan.schedule import Op


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgram:
    """The ops of one pipeline rank in execution order."""

    ops: tuple[Op, ...]
    channels: Mapping[Op, Channel]
    """Of every send and receive."""
    arrivals: Mapping[Channel, tuple[Op, ...]]
    """Receives by channel, in the order their messages come: what may be posted ahead."""
    delivered: Mapping[Op, tuple[Op, ...]]
    """Receive -> sends of this rank that have arrived when its message comes, because the other rank took them before it
    sent that message. So sent tensors can be let go without asking and without waiting."""


def rank_program(programs: Programs, rank: int) -> RankProgram:
    """The program of pipeline rank `rank`."""
    ops = programs.ops[rank]
    channels = {op: channel for op in ops if (channel := programs.channel(op)) is not None}
    arrivals: dict[Channel, list[Op]] = defaultdict(list)
    for op, channel in channels.items():
        if op.kind in RECEIVES:
            arrivals[channel].append(op)
    return RankProgram(ops=ops, channels=channels, delivered=_delivered(programs, rank),
                       arrivals={channel: tuple(receives) for channel, receives in arrivals.items()})


def _delivered(programs: Programs, rank: int) -> dict[Op, tuple[Op, ...]]:
    found: dict[Op, list[Op]] = defaultdict(list)
    sender_of = {receive_of(op): op for op in programs.ops[rank] if op.kind in SENDS}
    for ops in programs.ops:
        answer: Op | None = None  # our receive of the first message that comes to us after the op looked at
        for op in reversed(ops):
            if op in sender_of and answer is not None:
                found[answer].append(sender_of[op])
            channel = programs.channel(op) if op.kind in SENDS else None
            if channel is not None and channel.receiver == rank:
                answer = receive_of(op)
    return {receive: tuple(sends) for receive, sends in found.items()}


def channels_of(placement: Sequence[int]) -> tuple[Channel, ...]:
    """Every channel between neighbouring stages on different ranks, in one order for all ranks."""
    found: dict[Channel, None] = {}
    for left, right in pairwise(placement):
        if left != right:
            found[Channel(sender=left, receiver=right, forward=True)] = None
            found[Channel(sender=right, receiver=left, forward=False)] = None
    return tuple(found)


@lru_cache(maxsize=64)
def rank_program_for(schedule: str, num_ranks: int, num_micro_batches: int, chunks: int, rank: int, *,
                     training: bool = True, present: int | None = None) -> RankProgram:
    """The program of `rank` under a named schedule. A replica that has only the first `present` micro-batches runs the
    other ops too, for what ranks of several replicas do together in them; it has no messages of them."""
    programs = programs_for(schedule, num_ranks, num_micro_batches, chunks, training=training)
    return rank_program(programs if present is None else _with_messages_of(programs, present), rank)


def _with_messages_of(programs: Programs, present: int) -> Programs:
    """Without sends and receives of micro-batches from `present` on. What is left keeps its order on both sides."""
    return replace(programs, ops=tuple(tuple(op for op in ops if op.micro_batch < present or op.kind not in STEP)
                                       for ops in programs.ops))
