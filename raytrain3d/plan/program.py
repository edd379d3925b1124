"""Lowering: from a schedule to the program of each pipeline rank, communication included.

Traffic runs over channels, one for each (sender, receiver, direction), each first in first out without tags (NCCL has
none). So on every channel the receiver must take messages in the order they were sent; `lower` puts sends right after
the op that made the data and receives right before the op that needs it, and `prove` checks order and absence of
deadlock for the result, whatever made it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest

from raytrain3d.errors import PlanError
from raytrain3d.plan.schedule import SCHEDULES, Kind, Op, Schedule

SENDS = {Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD}
RECEIVES = {receive: send for send, receive in SENDS.items()}
STEP = {Kind.SEND_FORWARD: 1, Kind.RECEIVE_FORWARD: 1, Kind.SEND_BACKWARD: -1, Kind.RECEIVE_BACKWARD: -1}
"""From the sender's stage to the receiver's."""


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
        if op.kind not in STEP:
            return None
        step, own = STEP[op.kind], self.schedule.rank_of(op.stage)
        if op.kind in SENDS:
            return Channel(sender=own, receiver=self.schedule.rank_of(op.stage + step), forward=step > 0)
        return Channel(sender=self.schedule.rank_of(op.stage - step), receiver=own, forward=step > 0)

    def text(self) -> str:
        """One line per rank, ops in order."""
        return "\n".join(f"rank {rank}: " + " ".join(map(str, ops)) for rank, ops in enumerate(self.ops))


def lower(schedule: Schedule) -> Programs:
    """Add sends and receives to a schedule and prove the result.

    A send follows the op that made its data. A receive comes right before the op that needs it, or earlier: a channel
    delivers in order, so what was sent before it is received before it. Neighbouring stages on one rank send nothing.
    """
    sending = Programs(schedule=schedule, ops=tuple(tuple(_with_sends(schedule, ops)) for ops in schedule.ops))
    coming = {channel: deque(map(receive_of, sends)) for channel, sends in _messages(sending, SENDS).items()}
    programs = replace(sending, ops=tuple(tuple(_with_receives(sending, ops, coming)) for ops in sending.ops))
    prove(programs)
    return programs


def _with_sends(schedule: Schedule, ops: Iterable[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        if op.kind is Kind.FORWARD and _has_other_rank(schedule, op.stage, 1):
            yield Op(Kind.SEND_FORWARD, op.stage, op.micro_batch)
        elif op.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and _has_other_rank(schedule, op.stage, -1):
            yield Op(Kind.SEND_BACKWARD, op.stage, op.micro_batch)


def _with_receives(sending: Programs, ops: Iterable[Op], coming: dict[Channel, deque[Op]]) -> Iterator[Op]:
    received: set[Op] = set()
    for op in ops:
        for needed in _needs(sending.schedule, op):
            channel = sending.channel(needed) if needed.kind in RECEIVES else None
            while channel is not None and needed not in received and coming.get(channel):
                received.add(message := coming[channel].popleft())
                yield message
        yield op


def _has_other_rank(schedule: Schedule, stage: int, step: int) -> bool:
    """Whether there is a stage `step` further, on another rank."""
    neighbour = stage + step
    return 0 <= neighbour < schedule.num_stages and schedule.rank_of(neighbour) != schedule.rank_of(stage)


@lru_cache(maxsize=64)
def programs_for(schedule: str, num_ranks: int, num_micro_batches: int, chunks: int = 1, *,
                 training: bool = True) -> Programs:
    """Lowered programs of a named schedule; without `training` its forwards alone. Replicas with different shares have
    different programs."""
    made = SCHEDULES[schedule](num_ranks, num_micro_batches, chunks)
    return lower(made if training else made.forwards())


def prove(programs: Programs) -> None:
    """Raise PlanError, naming the ops, if a channel's receive order differs from its send order, or if programs wait for
    each other or for an op that nobody runs.

    A send is free to leave whenever its program comes to it: it never holds up what follows.
    """
    sent, taken = _messages(programs, SENDS), _messages(programs, RECEIVES)
    for channel in sent.keys() | taken.keys():
        messages = zip_longest(sent.get(channel, []), taken.get(channel, []))
        for i, (send, receive) in enumerate(messages):
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
    return Op(SENDS[send.kind], send.stage + STEP[send.kind], send.micro_batch)


def in_order(programs: Programs) -> Iterator[tuple[int, Op]]:
    """Every op with its rank, each after what it needs.

    PlanError if the programs wait for each other: it names the ring of ops that do.
    """
    at = [0] * len(programs.ops)
    done: set[Op] = set()
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(programs.ops):
            while at[rank] < len(ops) and done.issuperset(_needs(programs.schedule, ops[at[rank]])):
                done.add(_result(ops[at[rank]]))
                yield rank, ops[at[rank]]
                at[rank] += 1
                moved = True
    stuck = {rank: ops[i] for rank, (i, ops) in enumerate(zip(at, programs.ops, strict=True)) if i < len(ops)}
    if stuck:
        raise PlanError("the programs cannot run: " + ", ".join(_ring(programs, stuck, done)))


def _needs(schedule: Schedule, op: Op) -> tuple[Op, ...]:
    """What must be done before `op`, as `_result` writes it."""
    match op.kind:
        case Kind.FORWARD:
            return _input(schedule, op)
        case Kind.BACKWARD | Kind.BACKWARD_INPUT:
            return (Op(Kind.FORWARD, op.stage, op.micro_batch), *_input(schedule, op))
        case Kind.SEND_FORWARD:
            return (Op(Kind.FORWARD, op.stage, op.micro_batch),)
        case Kind.SEND_BACKWARD | Kind.BACKWARD_WEIGHT:
            return (Op(Kind.BACKWARD_INPUT, op.stage, op.micro_batch),)
    return (Op(RECEIVES[op.kind], op.stage - STEP[op.kind], op.micro_batch),)


def _result(op: Op) -> Op:
    """A full backward counts as an input gradient, which it contains."""
    return Op(Kind.BACKWARD_INPUT, op.stage, op.micro_batch) if op.kind is Kind.BACKWARD else op


def _input(schedule: Schedule, op: Op) -> tuple[Op, ...]:
    """What brings the input of a compute op: a receive, or the neighbouring stage's op if that is on the same rank."""
    forward = op.kind is Kind.FORWARD
    step = -1 if forward else 1
    if _has_other_rank(schedule, op.stage, step):
        return (Op(Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD, op.stage, op.micro_batch),)
    if not 0 <= op.stage + step < schedule.num_stages:
        return ()
    return (Op(Kind.FORWARD if forward else Kind.BACKWARD_INPUT, op.stage + step, op.micro_batch),)


def _ring(programs: Programs, stuck: dict[int, Op], done: set[Op]) -> list[str]:
    """Who waits for whom, until the ring closes or ends at an op that nobody runs. stuck: rank -> its next op."""
    waits: dict[int, str] = {}
    rank = next(iter(stuck))
    while rank not in waits:
        needed = next(op for op in _needs(programs.schedule, stuck[rank]) if op not in done)
        owner = programs.schedule.rank_of(needed.stage)
        later = next((op for op in programs.ops[owner] if _result(op) == needed), None)
        if later is None:
            return [f"rank {rank} at {stuck[rank]} waits for {needed}, which nobody runs"]
        whose = "its own later" if owner == rank else f"rank {owner}'s"
        waits[rank] = f"rank {rank} at {stuck[rank]} waits for {whose} {later}"
        rank = owner
    return list(waits.values())[list(waits).index(rank):]
