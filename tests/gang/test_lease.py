"""Leases through the leaders of gangs: one that comes late, and what is known when one fails."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from fake_jobs import fake_job
from fake_trainer import FakeTrainer

from raytrain3d.gang.fleet import Fleet, FleetFailed, Limits
from raytrain3d.gang.handle import FixedGangs, Leader, RankDied, RankRaised
from raytrain3d.gang.stop import StopFlag
from raytrain3d.gang.worker import LeaseEnd, LeaseRequest, RankError, RankSettings, RankWorker
from raytrain3d.plan.plan import Plan, make_plan


@pytest.fixture
def worker(tmp_path: Path) -> RankWorker:
    """The only rank of generation 0."""
    config = fake_job(tmp_path, mesh=(1, 1, 1), hundredths=0)
    made = RankWorker(RankSettings(config=config, plan=make_plan(config), rank=0, address="127.0.0.1", log_directory=None,
                                   device_index=None, make_trainer=FakeTrainer))  # type: ignore[arg-type]
    made.run(RankWorker.join, "127.0.0.1", 1, 0, (0,))
    return made


def lease(first: int, last: int, generation: int) -> LeaseRequest:
    return LeaseRequest(first=first, last=last, left_out=frozenset(), generation=generation)


def test_a_lease_of_an_older_generation_is_not_begun(worker: RankWorker) -> None:
    assert worker.run(RankWorker.train, lease(1, 3, 0)) == LeaseEnd(step=3, stopped=False)
    worker.run(RankWorker.join, "127.0.0.1", 1, 1, (0,))
    assert worker.run(RankWorker.train, lease(4, 6, 0)) == LeaseEnd(step=3, stopped=False)
    assert [report.step for report in worker.reports(0)] == [1, 2, 3]
    assert worker.run(RankWorker.train, lease(4, 6, 1)) == LeaseEnd(step=6, stopped=False)


def test_an_error_is_told_until_the_next_generation(worker: RankWorker) -> None:
    assert worker.run(RankWorker.error) is None
    broken = worker.run(RankWorker.recover, 5, None, [])  # a rank that holds nothing must be filled
    assert isinstance(broken, RankError) and worker.run(RankWorker.error) is broken
    worker.run(RankWorker.join, "127.0.0.1", 1, 1, (0,))
    assert worker.run(RankWorker.error) is None


class Rank:
    """Tells the error that it ended its lease with."""

    node = "here"

    def __init__(self, rank: int, leader: Leader, error: Exception | None) -> None:
        self.rank, self.leader, self._error = rank, leader, error

    def call(self, method: Callable[..., Any], *_: Any) -> Future[Any]:
        return answered(self._error if method is RankWorker.error else None)

    ask = call


class Gang:
    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks

    def replace(self, rank: int, plan: Plan) -> None:
        raise AssertionError("not asked for")

    def kill(self) -> None:
        raise AssertionError("not asked for")


def answered(outcome: object) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future


def failure(plan: Plan, lead: list[object], errors: dict[int, Exception]) -> FleetFailed:
    """Of a lease on gangs of two ranks. lead: what their leaders answer; errors: what ranks tell, by rank."""
    gangs = []
    for number, outcome in enumerate(lead):
        leader = Leader((2 * number, 2 * number + 1), train=lambda _, outcome=outcome: answered(outcome),  # type: ignore[misc]
                        reports=lambda _: answered([]))
        gangs.append(Gang([Rank(rank, leader, errors.get(rank)) for rank in leader.ranks]))
    fleet = Fleet(FixedGangs(gangs), StopFlag(), Limits())
    with pytest.raises(FleetFailed) as caught:
        fleet.wait(fleet.train(1, 20), 1, plan)
    return caught.value


def test_what_happened_is_told_by_the_ranks_not_by_the_leader(tmp_path: Path) -> None:
    plan = make_plan(fake_job(tmp_path, mesh=(2, 2, 1)))
    ended = LeaseEnd(step=20, stopped=False)
    error = RankError(rank=3, kind="MemoryError", message="no room", traceback="", step=7, op="1F0")
    signs = failure(plan, [ended, RankDied("the leader is gone")], {2: RankDied("killed"), 3: RankRaised(error)}).signs
    assert [(sign.rank, sign.kind, sign.step) for sign in signs] == [(2, "died", 1), (3, "raised", 7)]


def test_where_no_rank_knows_of_an_error_the_leader_is_believed(tmp_path: Path) -> None:
    plan = make_plan(fake_job(tmp_path, mesh=(2, 2, 1)))
    signs = failure(plan, [LeaseEnd(step=20, stopped=False), RankDied("cut off")], {}).signs
    assert [(sign.rank, sign.kind, sign.cause) for sign in signs] == [(2, "died", "cut off")]
