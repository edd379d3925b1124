"""Which rank holds all others up? From where each one is in its step, and what the programs say it may wait for. Pure.

A rank that answers nothing, or is not waiting for anyone, is the cause itself. If all wait, one of them waits for a message
that its sender has left behind, so the sender is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from raytrain3d.plan.plan import Plan
from raytrain3d.plan.program import RECEIVES, STEP, Programs, programs_for
from raytrain3d.plan.schedule import Op
from raytrain3d.train.position import PHASES, Position


@dataclass(frozen=True, kw_only=True, slots=True)
class Culprit:
    """The rank that the others wait for, and why it is thought to be."""

    rank: int
    why: str
    op: str | None
    step: int | None
    stack: str = ""


def find_culprit(positions: Mapping[int, Position | None], plan: Plan) -> Culprit:
    """positions: rank -> where it has been for too long, None if it does not answer. Every rank is there."""
    known = {rank: position for rank, position in positions.items() if position is not None}
    step = max((position.step for position in known.values()), default=None)
    silent = [rank for rank in positions if rank not in known]
    if silent:
        return _stopped(silent[0], known, step, plan)
    busy = [rank for rank, position in known.items() if position.phase is not None and not _waits(rank, position, plan)]
    if busy:
        rank = min(busy, key=lambda rank: known[rank].progress)
        return _of(rank, known[rank], f"it waits for nobody and is still {_where(known[rank])}")
    for rank, position in sorted(known.items()):
        found = _lost_message(rank, position, known, plan)
        if found is not None:
            return found
    rank = min(known, key=lambda rank: known[rank].progress)
    return _of(rank, known[rank], f"all wait, and it is the furthest behind: {_where(known[rank])}")


def _stopped(rank: int, known: Mapping[int, Position], step: int | None, plan: Plan) -> Culprit:
    """Where it stopped is known from what others wait for: at or before the first message that they have not got."""
    ops = _programs(rank, plan).ops[plan.mesh.coordinate(rank).pipeline]
    missed = [(ops.index(send), other, send) for other, position in known.items()
              if (found := _awaited(other, position, plan)) is not None and found[0] == rank for send in [found[1]]]
    if not missed:
        return Culprit(rank=rank, why="its process answers nothing", op=None, step=step)
    _, other, send = min(missed)
    return Culprit(rank=rank, why=f"its process answers nothing, and rank {other} waits for what {send} sends", op=str(send),
                   step=step)


def _awaited(rank: int, position: Position, plan: Plan) -> tuple[int, Op] | None:
    """(sender, op that sends) of the message that `rank` waits for, if it does."""
    if position.phase != "program" or position.op is None:
        return None
    at, programs = plan.mesh.coordinate(rank), _programs(rank, plan)
    op = next((op for op in programs.ops[at.pipeline] if str(op) == position.op), None)
    if op is None or op.kind not in RECEIVES:
        return None
    send = Op(RECEIVES[op.kind], op.stage - STEP[op.kind], op.micro_batch)
    return plan.mesh.rank(replace(at, pipeline=programs.schedule.rank_of(send.stage))), send


def _waits(rank: int, position: Position, plan: Plan) -> bool:
    """On a GPU the op that the device is at, not the one that the host is at."""
    ops = _programs(rank, plan).ops[plan.mesh.coordinate(rank).pipeline]
    return position.waits or (position.finished < len(ops) and ops[position.finished].kind in RECEIVES)


def _programs(rank: int, plan: Plan) -> Programs:
    """Of the rank's replica."""
    share = plan.shares[plan.mesh.coordinate(rank).data]
    return programs_for(plan.schedule, plan.mesh.pipeline, share, plan.chunks)


def _lost_message(rank: int, position: Position, positions: Mapping[int, Position], plan: Plan) -> Culprit | None:
    """The sender of what `rank` waits for, if it has passed the op that should have sent it."""
    found = _awaited(rank, position, plan)
    if found is None:
        return None
    sender, send = found
    theirs = positions[sender]
    ops = _programs(sender, plan).ops[plan.mesh.coordinate(sender).pipeline]
    if theirs.progress < (position.step, PHASES.index("program"), ops.index(send) + 1):
        return None
    return Culprit(rank=sender, why=f"it has passed {send}, but rank {rank} still waits for that message", op=str(send),
                   step=position.step, stack=theirs.stack)


def _of(rank: int, position: Position, why: str) -> Culprit:
    return Culprit(rank=rank, why=why, op=position.op, step=position.step, stack=position.stack)


def _where(position: Position) -> str:
    if position.phase == "program" and position.op is not None:
        return f"in op {position.op}"
    return {"data": "reading its data", "program": "between two ops", "reduction": "reducing gradients",
            "commit": "agreeing on the step", "update": "updating parameters", None: "between steps"}[position.phase]
