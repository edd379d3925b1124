"""Lowering: from a schedule to the program of each pipeline rank, communication included.

Traffic runs over channels, one for each (sender, receiver, direction), each first in first out without tags (NCCL has
none). So on every channel the receiver must take messages in the order they were sent; `lower` puts sends right after
the op that made the data and receives right before the op that needs it, and `prove` checks order and absence of
deadlock for the result, whatever made it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from raytrain3d.errors import PlanError
from raytrain3d.plan.schedule import SCHEDULES, Kind, Op, Schedule

SENDS = {Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD}
RECEIVES = {receive: send for send, receive in SENDS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """One direction of traffic between two pipeline ranks. `forward` carries activations, else gradients."""

    sender: int
    receiver: int
    forward: bool

    def __str__(self) -> str:
        return f"{self.sender}->{self.receiver} {'activations' if self.forward else 'gradients'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """The ops of every pipeline rank, in execution order, with communication."""

    schedule: Schedule
    ops: tuple[tuple[Op, ...], ...]

    def channel(self, op: Op) -> Channel | None:
        """Channel of a send or receive; None for compute."""
        own = self.schedule.rank_of(op.stage)
        match op.kind:
            case Kind.SEND_FORWARD:
                return Channel(sender=own, receiver=self.schedule.rank_of(op.stage + 1), forward=True)
            case Kind.RECEIVE_FORWARD:
                return Channel(sender=self.schedule.rank_of(op.stage - 1), receiver=own, forward=True)
            case Kind.SEND_BACKWARD:
                return Channel(sender=own, receiver=self.schedule.rank_of(op.stage - 1), forward=False)
            case Kind.RECEIVE_BACKWARD:
                return Channel(sender=self.schedule.rank_of(op.stage + 1), receiver=own, forward=False)
        return None

    def receives(self, rank: int) -> dict[Channel, tuple[Op, ...]]:
        """Receives of `rank` by channel, in the order they arrive: what may be posted ahead."""
        found: dict[Channel, list[Op]] = {}
        for op in self.ops[rank]:
            channel = self.channel(op)
            if channel is not None and op.kind in RECEIVES:
                found.setdefault(channel, []).append(op)
        return {channel: tuple(ops) for channel, ops in found.items()}

    def text(self) -> str:
        """One line per rank, ops in order."""
        return "\n".join(f"rank {rank}: " + " ".join(map(str, ops)) for rank, ops in enumerate(self.ops))


def lower(schedule: Schedule) -> Programs:
    """Add sends and receives to a schedule and prove the result."""
    last = schedule.num_stages - 1

    def with_communication(op: Op) -> list[Op]:
        forward = op.kind is Kind.FORWARD
        first_end, other_end = (0, last) if forward else (last, 0)
        receive, send = ((Kind.RECEIVE_FORWARD, Kind.SEND_FORWARD) if forward
                         else (Kind.RECEIVE_BACKWARD, Kind.SEND_BACKWARD))
        before = [Op(receive, op.stage, op.micro_batch)] if op.stage != first_end else []
        after = [Op(send, op.stage, op.micro_batch)] if op.stage != other_end else []
        return [*before, op, *after]

    ops = tuple(tuple(o for op in rank_ops for o in with_communication(op)) for rank_ops in schedule.ops)
    programs = Programs(schedule=schedule, ops=ops)
    prove(programs)
    return programs


@lru_cache(maxsize=64)
def programs_for(schedule: str, num_ranks: int, num_micro_batches: int) -> Programs:
    """Lowered programs of a named schedule. Replicas with different shares have different programs."""
    return lower(SCHEDULES[schedule](num_ranks, num_micro_batches))


def prove(programs: Programs) -> None:
    """Raise PlanError if a channel's receive order differs from its send order, or if the programs deadlock.

    Deadlock is searched under the strictest rule: a send is free to leave, a receive needs its message.
    """
    sent, taken = _messages(programs, SENDS), _messages(programs, RECEIVES)
    for channel in sent.keys() | taken.keys():
        sends, receives = sent.get(channel, []), taken.get(channel, [])
        for i in range(max(len(sends), len(receives))):
            send = sends[i] if i < len(sends) else None
            receive = receives[i] if i < len(receives) else None
            if send is None or receive is None or receive_of(send) != receive:
                raise PlanError(f"channel {channel}: message {i} is sent by {send or 'no op'} but received by "
                                f"{receive or 'no op'}")
    for _ in in_order(programs):
        pass


def _messages(programs: Programs, kinds: dict[Kind, Kind]) -> dict[Channel, list[Op]]:
    found: dict[Channel, list[Op]] = {}
    for ops in programs.ops:
        for op in ops:
            channel = programs.channel(op)
            if channel is not None and op.kind in kinds:
                found.setdefault(channel, []).append(op)
    return found


def receive_of(send: Op) -> Op:
    """The receive that takes what `send` sends."""
    step = 1 if send.kind is Kind.SEND_FORWARD else -1
    return Op(SENDS[send.kind], send.stage + step, send.micro_batch)


def in_order(programs: Programs) -> Iterator[tuple[int, Op]]:
    """Every op with its rank, each after what it waits for: a send is free to leave, a receive needs its message.

    PlanError naming the op at which each rank is stuck if the programs wait for each other.
    """
    at = [0] * len(programs.ops)
    sent: set[Op] = set()
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(programs.ops):
            while at[rank] < len(ops) and (ops[at[rank]].kind not in RECEIVES or ops[at[rank]] in sent):
                op = ops[at[rank]]
                if op.kind in SENDS:
                    sent.add(receive_of(op))
                yield rank, op
                at[rank] += 1
                moved = True
    stuck = [f"rank {rank} at {ops[at[rank]]}" for rank, ops in enumerate(programs.ops) if at[rank] < len(ops)]
    if stuck:
        raise PlanError("the programs wait for each other: " + ", ".join(stuck))
