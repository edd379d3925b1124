"""Step reports on their way to the driver: merged by tensor group, whole once all leaders have them, asked for at the
pace of steps; and the wait for many answers at once."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from raytrain3d.gang.handle import Answers, Leader
from raytrain3d.gang.reports import ReportReader
from raytrain3d.gang.worker import LeaseEnd, LeaseRequest
from raytrain3d.train.report import StepReport, merge_reports


def report(rank: int, step: int, *, seconds: float = 0.0, compute: float = 1.0) -> StepReport:
    return StepReport(step=step, rank=rank, loss=2.0, tokens=10, gradient_norm=1.0, learning_rate=0.1, seconds=seconds,
                      compute_s=compute, data_wait_s=0.0, receive_wait_s=float(rank), reduce_wait_s=0.0, commit_wait_s=0.0,
                      optimizer_s=0.0, layer_forward_s={rank // 2: compute})


def test_a_tensor_group_is_one_report_of_its_slowest_rank() -> None:
    merged = merge_reports([report(3, 1, compute=1.0), report(0, 1, seconds=2.0), report(1, 1, seconds=3.0, compute=3.0),
                            report(2, 1, compute=2.0)], ranks=4, tensor=2)
    assert [each.rank for each in merged] == [1, 2]
    assert (merged[0].seconds, merged[0].compute_s, merged[0].receive_wait_s) == (3.0, 2.0, 0.5)
    assert merged[0].layer_forward_s == {0: 3.0} and merged[1].layer_forward_s == {1: 2.0}


def test_only_steps_that_all_ranks_have_done_are_merged() -> None:
    reports = [report(rank, step) for rank, steps in ((0, (1, 2, 3)), (1, (1, 2))) for step in steps]
    assert [(each.step, each.rank) for each in merge_reports(reports, ranks=2, tensor=1)] == [(1, 0), (1, 1), (2, 0), (2, 1)]


class Gang:
    """Two ranks that share a leader, and answer by themselves too."""

    def __init__(self, first: int) -> None:
        self.reports: dict[int, list[StepReport]] = {first: [], first + 1: []}
        self.is_led, self.asked = True, 0
        leader = Leader(tuple(self.reports), train=self._train, reports=self._gather)
        self.handles = [Handle(rank, leader, self) for rank in self.reports]

    def did(self, step: int, seconds: float = 0.0) -> None:
        for rank, reports in self.reports.items():
            reports.append(report(rank, step, seconds=seconds))

    def _train(self, lease: LeaseRequest) -> Future[LeaseEnd]:
        raise AssertionError("nobody trains")

    def _gather(self, after: int) -> Future[list[StepReport]]:
        self.asked += 1
        everything = [each for reports in self.reports.values() for each in reports if each.step > after]
        return answer(merge_reports(everything, ranks=2, tensor=2) if self.is_led else None)


class Handle:
    node = "here"

    def __init__(self, rank: int, leader: Leader, gang: Gang) -> None:
        self.rank, self.leader, self._gang = rank, leader, gang

    def ask(self, method: Any, after: int) -> Future[Any]:
        return answer([each for each in self._gang.reports[self.rank] if each.step > after])

    call = ask


def answer(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if value is None:
        future.set_exception(RuntimeError("lost"))
    else:
        future.set_result(value)
    return future


def numbers(steps: list[tuple[StepReport, ...]]) -> list[tuple[int, list[int]]]:
    return [(reports[0].step, [each.rank for each in reports]) for reports in steps]


@pytest.fixture
def gangs() -> tuple[Gang, Gang]:
    return Gang(0), Gang(2)


def reader_of(gangs: tuple[Gang, Gang]) -> ReportReader:
    return ReportReader([handle for gang in gangs for handle in gang.handles], after=0)


def test_a_step_is_whole_when_every_gang_has_reported_it(gangs: tuple[Gang, Gang]) -> None:
    reader = reader_of(gangs)
    gangs[0].did(1)
    assert reader.poll(1) == [] and reader.reached == 0
    gangs[0].did(2)
    gangs[1].did(1)
    assert numbers(reader.poll(1)) == [(1, [0, 2])] and reader.reached == 1
    gangs[1].did(2)
    assert numbers(reader.poll(1)) == [(2, [0, 2])]
    assert reader.latest == {0: 2, 1: 2, 2: 2, 3: 2}


def test_gangs_are_asked_once_a_step_when_steps_are_long(gangs: tuple[Gang, Gang]) -> None:
    reader = reader_of(gangs)
    for gang in gangs:
        gang.did(1, seconds=100.0)
    assert len(reader.poll(1)) == 1
    for gang in gangs:
        gang.did(2, seconds=100.0)
    assert reader.poll(1) == [] and gangs[0].asked == 1
    assert numbers(reader.poll(1, now=True)) == [(2, [0, 2])] and gangs[0].asked == 2


def test_after_a_failure_ranks_are_asked_one_by_one(gangs: tuple[Gang, Gang]) -> None:
    """The first gang has lost the rank that leads it; the other had answered before."""
    reader = reader_of(gangs)
    gangs[1].did(1)
    reader.poll(1)
    gangs[0].did(1)
    gangs[0].did(2)
    gangs[0].is_led = False
    assert numbers(reader.rest(1, 1)) == [(1, [0, 1, 2])]


def test_answers_are_over_with_the_last_or_with_a_failure() -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]
    answers = Answers(futures)
    answers.wait(0)
    assert not answers.all_there and not answers.any_failed
    futures[0].set_result(1)
    threading.Timer(0.05, lambda: futures[1].set_exception(ValueError())).start()
    answers.wait(10)
    assert answers.any_failed and not answers.all_there
    futures[2].set_result(1)
    assert answers.all_there
