"""Lowered programs run under NCCL's rules, and what `prove` rejects fails there."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random
from threading import Event

import pytest
from schedules import named_schedule, random_schedule
from thread_transport import Hang, Inbox, Wire, WrongMessage, run_on_threads

from raytrain3d.errors import PlanError
from raytrain3d.plan.program import Programs, lower, programs_for, prove
from raytrain3d.plan.schedule import Kind, Op, Schedule

LIMIT_S = 20.0
"""For programs that end; a hundred times what they take."""


def free(op: Op) -> float:
    return 0.0


def random_costs(programs: Programs, draw: Random) -> Callable[[Op], float]:
    """Some ops take no time, some ten times as long as others."""
    every = [op for ops in programs.ops for op in ops]
    return {op: draw.choice((0.0, 0.0, 1e-5, 1e-4)) for op in every}.__getitem__


def way_through(num_stages: int) -> tuple[int, ...]:
    return (*range(num_stages), *reversed(range(num_stages)))


@pytest.mark.parametrize("first", range(0, 500, 50))
@pytest.mark.parametrize("make", [named_schedule, random_schedule])
def test_random_schedules_run_and_every_receive_gets_its_message(make: Callable[[Random], Schedule], first: int) -> None:
    for seed in range(first, first + 50):
        draw = Random(seed)
        schedule = make(draw)
        programs = lower(schedule)
        through = run_on_threads(programs, random_costs(programs, draw), limit_s=LIMIT_S)
        assert through == dict.fromkeys(range(schedule.num_micro_batches), way_through(schedule.num_stages)), seed


def test_random_schedules_are_varied() -> None:
    """Among them: receives taken before they are needed, empty ranks, neighbours on one rank, channels of several stages."""
    schedules = [random_schedule(Random(seed)) for seed in range(500)]
    assert len(set(schedules)) > 450
    assert any(set(schedule.placement) != set(range(schedule.num_ranks)) for schedule in schedules)
    early = [programs for programs in map(lower, schedules) if any(receives_early(ops) for ops in programs.ops)]
    assert 100 < len(early) < 500


def receives_early(ops: tuple[Op, ...]) -> bool:
    """Whether a receive is followed by something else than the op that needs it."""
    return any(op.kind is Kind.RECEIVE_FORWARD and (after.kind, after.stage, after.micro_batch)
               != (Kind.FORWARD, op.stage, op.micro_batch) for op, after in pairwise(ops))


def several(make: Callable[[Random], Schedule], break_it: Callable[[Programs, Random], tuple[Programs, str] | None],
            count: int) -> Iterator[tuple[Programs, str]]:
    """`count` broken programs, each with the op at which it breaks."""
    seed = 0
    while count:
        draw = Random(seed := seed + 1)
        if broken := break_it(lower(make(draw)), draw):
            count -= 1
            yield broken


def moved(programs: Programs, rank: int, ops: list[Op]) -> Programs:
    return replace(programs, ops=(*programs.ops[:rank], tuple(ops), *programs.ops[rank + 1 :]))


def swap_receives(programs: Programs, draw: Random) -> tuple[Programs, str] | None:
    """Exchange two receives of one channel."""
    rank = draw.randrange(len(programs.ops))
    ops = list(programs.ops[rank])
    receives = [i for i, op in enumerate(ops) if op.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)]
    pairs = [(i, j) for i in receives for j in receives if i < j and programs.channel(ops[i]) == programs.channel(ops[j])]
    if not pairs:
        return None
    i, j = draw.choice(pairs)
    ops[i], ops[j] = ops[j], ops[i]
    return moved(programs, rank, ops), str(ops[i])


def receive_too_soon(programs: Programs, draw: Random) -> tuple[Programs, str] | None:
    """Wait for a gradient before sending the activation that it comes from; the order on the channel stays."""
    rank = draw.randrange(len(programs.ops))
    ops = list(programs.ops[rank])
    gradient = next((op for op in ops if op.kind is Kind.RECEIVE_BACKWARD), None)
    if gradient is None:
        return None
    ops.remove(gradient)
    ops.insert(ops.index(Op(Kind.SEND_FORWARD, gradient.stage, gradient.micro_batch)), gradient)
    return moved(programs, rank, ops), str(gradient)


@pytest.mark.parametrize("make", [named_schedule, random_schedule])
def test_swapped_receives_are_rejected_naming_both_ops(make: Callable[[Random], Schedule]) -> None:
    for programs, receive in several(make, swap_receives, 100):
        with pytest.raises(PlanError, match=rf"message \d+ is sent by \d+S[FB]\d+ but received by {receive}$"):
            prove(programs)


@pytest.mark.parametrize("make", [named_schedule, random_schedule])
def test_cycles_are_rejected_naming_the_ops(make: Callable[[Random], Schedule]) -> None:
    for programs, receive in several(make, receive_too_soon, 100):
        with pytest.raises(PlanError, match=rf"cannot run: .*rank \d at {receive} waits for rank \d's \d+SB\d+") as error:
            prove(programs)
        assert str(error.value).count("waits for") >= 2


@pytest.mark.parametrize("make", [named_schedule, random_schedule])
def test_without_the_proof_swapped_receives_get_wrong_messages(make: Callable[[Random], Schedule]) -> None:
    for programs, receive in several(make, swap_receives, 20):
        with pytest.raises(WrongMessage, match=rf"{receive} was met by \d+S[FB]\d+"):
            run_on_threads(programs, free, limit_s=LIMIT_S)


@pytest.mark.parametrize("make", [named_schedule, random_schedule])
def test_without_the_proof_cycles_hang(make: Callable[[Random], Schedule]) -> None:
    for programs, receive in several(make, receive_too_soon, 2):
        with pytest.raises(Hang, match=f"at {receive}"):
            run_on_threads(programs, free, limit_s=1.0)


def message(op: str) -> tuple[Op, tuple[int, ...]]:
    return Op(Kind.SEND_FORWARD, 0, int(op)), (0,)


def test_a_send_ends_when_its_receive_is_posted_and_none_overtakes() -> None:
    wire = Wire()
    first, second = wire.send(message("1")), wire.send(message("0"))
    assert not first.done()
    assert wire.receive().result(0) == message("1")
    assert first.done()
    assert not second.done()
    ahead = wire.receive(), wire.receive()
    assert second.done()
    assert ahead[0].result(0) == message("0")
    assert not ahead[1].done()


def test_two_receives_are_posted_ahead() -> None:
    wire = Wire()
    receives = [Op(Kind.RECEIVE_FORWARD, 1, i) for i in range(4)]
    inbox = Inbox(wire, receives)
    sends = [wire.send(message(str(i))) for i in range(4)]
    assert [send.done() for send in sends] == [True, True, False, False]
    assert inbox.take(receives[0], 0) == (0,)
    assert [send.done() for send in sends] == [True, True, True, False]


def test_sends_do_not_hold_up_compute() -> None:
    """Rank 1 starts only when rank 0 is at its last forward, five messages that nobody can have taken later."""
    last_forward = Event()

    def seconds(op: Op) -> float:
        if str(op) == "0F7":
            last_forward.set()
        if str(op) == "1F0":
            assert last_forward.wait(LIMIT_S)
        return 0.0

    assert len(run_on_threads(programs_for("gpipe", 2, 8), seconds, limit_s=LIMIT_S)) == 8
