"""Schedules to try things with: every named one with the numbers of chunks that it may have, and random ones."""

from collections.abc import Iterator
from random import Random

from raytrain3d.plan.schedule import SCHEDULES, Kind, Op, Schedule

CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved": (1, 2, 3), "breadth_first": (1, 2, 3), "zb_h1": (1,), "zb_v": (2,)}
assert CHUNKS.keys() == SCHEDULES.keys()

NAMED = [(name, chunks) for name, numbers in CHUNKS.items() for chunks in numbers]


def named_schedule(draw: Random) -> Schedule:
    """One of the named schedules in a random size."""
    name, chunks = draw.choice(NAMED)
    return SCHEDULES[name](draw.randint(1, 4), draw.randint(0, 6), chunks)


def random_schedule(draw: Random) -> Schedule:
    """A valid schedule that nobody would choose: stages anywhere, compute in any order in which it has its inputs, each
    backward whole or split."""
    num_ranks, num_stages, num_micro_batches = draw.randint(1, 4), draw.randint(1, 6), draw.randint(0, 6)
    placement = tuple(draw.randrange(num_ranks) for _ in range(num_stages))
    ops: list[list[Op]] = [[] for _ in range(num_ranks)]
    ready = [Op(Kind.FORWARD, 0, i) for i in range(num_micro_batches)]
    while ready:
        op = ready.pop(draw.randrange(len(ready)))
        ops[placement[op.stage]].append(op)
        ready += _enabled_by(op, num_stages - 1, draw.choice((Kind.BACKWARD, Kind.BACKWARD_INPUT)))
    return Schedule(name="random", num_micro_batches=num_micro_batches, placement=placement, ops=tuple(map(tuple, ops)))


def _enabled_by(op: Op, last: int, backward: Kind) -> Iterator[Op]:
    """What can run as soon as `op` is done; a backward, if any, is of kind `backward`."""
    if op.kind is Kind.FORWARD:
        yield Op(backward, last, op.micro_batch) if op.stage == last else Op(Kind.FORWARD, op.stage + 1, op.micro_batch)
    if op.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and op.stage > 0:
        yield Op(backward, op.stage - 1, op.micro_batch)
    if op.kind is Kind.BACKWARD_INPUT:
        yield Op(Kind.BACKWARD_WEIGHT, op.stage, op.micro_batch)
