"""Which rank is named when nobody moves, from where all are and what the programs say."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, RunConfig, TrainConfig
from raytrain3d.gang.diagnose import find_culprit
from raytrain3d.gang.hang import HangWatch
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.plan.program import RECEIVES, programs_for
from raytrain3d.train.position import Position


def plan() -> Plan:
    """2 replicas x 3 stages; 4 micro-batches each."""
    return make_plan(JobConfig(
        run=RunConfig(name="r"), data=DataConfig(path="d"), mesh=MeshConfig(data=2, pipeline=3),
        model=ModelConfig(vocabulary=16, hidden=8, blocks=4, heads=2, feed_forward=8),
        train=TrainConfig(steps=10, global_batch=8, sequence=8)))


def in_op(rank: int, text: str, *, waits: bool, step: int = 5) -> Position:
    """The rank is in this op of its program."""
    ops = programs_for("1f1b", 3, 4).ops[rank % 3]
    finished = next(i for i, op in enumerate(ops) if str(op) == text)
    return Position(step=step, phase="program", op=text, finished=finished, waits=waits, stack=f"stack of {rank}")


def first_op(rank: int, kinds: Callable[[Any], bool]) -> str:
    return next(str(op) for op in programs_for("1f1b", 3, 4).ops[rank % 3] if kinds(op.kind))


COMMIT = Position(step=5, phase="commit", finished=99, waits=True)
REDUCE = Position(step=5, phase="reduction", finished=99, waits=True)


def test_a_rank_asleep_in_an_op_is_named() -> None:
    """Stage 1 of replica 0 sleeps in a forward; its neighbours wait for messages, the other replica for its reductions."""
    positions = {0: in_op(0, first_op(0, lambda k: k in RECEIVES), waits=True), 1: in_op(1, "1F1", waits=False),
                 2: in_op(2, "2RF1", waits=True), 3: REDUCE, 4: REDUCE, 5: REDUCE}
    found = find_culprit(positions, plan())
    assert (found.rank, found.op, found.step, found.stack) == (1, "1F1", 5, "stack of 1")
    assert "waits for nobody and is still in op 1F1" in found.why


def test_a_stopped_process_is_named_whatever_others_do() -> None:
    positions = {0: in_op(0, "0F1", waits=False), 1: None, **dict.fromkeys(range(2, 6), COMMIT)}
    found = find_culprit(positions, plan())
    assert found.rank == 1 and "answers nothing" in found.why


def test_where_a_stopped_process_is_follows_from_what_others_wait_for() -> None:
    positions = {**dict.fromkeys(range(3), REDUCE), 3: None, 4: in_op(4, "1RF2", waits=True),
                 5: in_op(5, "2RF2", waits=True)}
    found = find_culprit(positions, plan())
    assert (found.rank, found.op) == (3, "0SF2") and "rank 4 waits for what 0SF2 sends" in found.why


def test_of_two_that_wait_for_nobody_the_one_behind_is_named() -> None:
    positions = {**dict.fromkeys(range(6), COMMIT), 4: in_op(4, "1F3", waits=False), 5: in_op(5, "2F0", waits=False)}
    assert find_culprit(positions, plan()).rank == 5


def test_the_sender_of_a_lost_message_is_named_with_its_op() -> None:
    """Stage 0 of replica 1 has gone on to wait for gradients; stage 1 still waits for the activation it should have sent."""
    positions = {0: REDUCE, 1: REDUCE, 2: REDUCE, 3: in_op(3, "0RB0", waits=True), 4: in_op(4, "1RF0", waits=True),
                 5: in_op(5, "2RF0", waits=True)}
    found = find_culprit(positions, plan())
    assert (found.rank, found.op) == (3, "0SF0")
    assert "has passed 0SF0, but rank 4 still waits for that message" in found.why


def test_a_lost_gradient_is_found_from_the_reduction_too() -> None:
    positions = {**dict.fromkeys(range(6), REDUCE), 0: in_op(0, "0RB3", waits=True)}
    found = find_culprit(positions, plan())
    assert (found.rank, found.op) == (1, "1SB3")


def test_what_the_device_is_at_decides_where_the_host_has_run_ahead() -> None:
    """On GPUs every host is at the commit; the events tell that stages 1 and 2 wait and stage 0 computes."""
    ahead = {rank: in_op(rank, text, waits=False) for rank, text in
             {0: "0F1", 1: "1RF1", 2: "2RF1", 3: "0B3", 4: "1B3", 5: "2B3"}.items()}
    assert find_culprit(ahead, plan()).rank == 0


class FakeRank:
    """Answers where it is, or nothing."""

    def __init__(self, rank: int, positions: list[Position | None]) -> None:
        self.rank, self.positions, self.asked = rank, positions, 0

    def ask(self, method: Any) -> Future[Position]:
        self.asked += 1
        future: Future[Position] = Future()
        position = self.positions.pop(0) if len(self.positions) > 1 else self.positions[0]
        if position is not None:
            future.set_result(position)
        return future


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def watch_for(seconds: int, ranks: list[FakeRank], watch: HangWatch, clock: list[float]) -> tuple[int, Any] | None:
    """(second, sign) at which a hang is found."""
    for second in range(1, seconds + 1):
        clock[0] += 1
        sign = watch.check(ranks, plan())  # type: ignore[arg-type]
        if sign is not None:
            return second, sign
    return None


def running(least_s: float) -> HangWatch:
    """After some quick steps."""
    watch = HangWatch(least_s)
    watch.saw_steps([0.1])
    return watch


def test_a_hang_is_found_after_the_limit_and_nobody_is_asked_before(clock: list[float]) -> None:
    ranks = [FakeRank(rank, [COMMIT if rank else in_op(0, "0F1", waits=False)]) for rank in range(6)]
    watch = running(10.0)
    assert watch_for(2, ranks, watch, clock) is None and ranks[0].asked == 0
    found = watch_for(20, ranks, watch, clock)
    assert found is not None and found[0] == 11
    assert (found[1].rank, found[1].kind, found[1].op, found[1].traceback) == (0, "hung", "0F1", "stack of 0")
    assert "nobody has moved for 10 s" in found[1].cause


def test_a_slow_step_that_moves_is_no_hang(clock: list[float]) -> None:
    moving = [in_op(0, f"0{kind}{i}", waits=False) for kind in "FB" for i in range(4) for _ in range(9)]
    ranks = [FakeRank(rank, [COMMIT]) for rank in range(1, 6)]
    watch = running(10.0)
    assert watch_for(72, [FakeRank(0, [*moving]), *ranks], watch, clock) is None


def test_the_limit_follows_the_slowest_step(clock: list[float]) -> None:
    watch = HangWatch(10.0)
    watch.saw_steps([1.0, 20.0, 2.0])
    ranks = [FakeRank(rank, [COMMIT if rank else in_op(0, "0F1", waits=False)]) for rank in range(6)]
    found = watch_for(120, ranks, watch, clock)
    assert found is not None and found[0] == 100
    watch.begin()
    assert watch_for(79, ranks, watch, clock) is None


def test_the_first_step_of_new_processes_may_take_longer(clock: list[float]) -> None:
    watch = running(10.0)
    watch.begin_generation()
    ranks = [FakeRank(rank, [COMMIT if rank else in_op(0, "0F1", waits=False)]) for rank in range(6)]
    assert watch_for(29, ranks, watch, clock) is None
    assert watch_for(20, ranks, watch, clock) is not None
