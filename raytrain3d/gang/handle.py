"""A rank as the driver sees it, whatever it runs in.

A request names a method of `RankWorker`, so an editor follows it and mypy checks its arguments; the answer is a future.
It fails with RankDied as soon as the process is known to be gone, and with RankRaised when the method raised.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from raytrain3d.gang.worker import LeaseEnd, LeaseRequest, RankError, RankWorker
from raytrain3d.plan.plan import Plan
from raytrain3d.train.report import StepReport

P = ParamSpec("P")
T = TypeVar("T")


class RankDied(Exception):
    """The process of a rank is gone. The text is the cause."""


class RankRaised(Exception):
    """A rank's method raised."""

    def __init__(self, error: RankError) -> None:
        super().__init__(f"{error.kind}: {error.message}")
        self.error = error


@dataclass(frozen=True, eq=False, slots=True)
class Leader:
    """Who trains and reports for some ranks, so that a large fleet costs the driver a request for each gang."""

    ranks: tuple[int, ...]
    train: Callable[[LeaseRequest], Future[LeaseEnd]]
    """A lease on all of them. Fails with the first that fails; what happened the ranks are to be asked themselves, since
    the leader may be the one that is lost."""
    reports: Callable[[int], Future[list[StepReport]]]
    """Steps after the given one that all of them have done, a report for each tensor group; acknowledges older ones."""


class RankHandle(Protocol):
    """One rank."""

    @property
    def leader(self) -> Leader:
        """Perhaps one that it has in common with others."""

    @property
    def rank(self) -> int: ...

    @property
    def node(self) -> str:
        """Name of its node for people."""

    def call(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a method in the thread that trains, after earlier calls."""

    def ask(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a method at once, beside a call that may be under way."""


def leaders_of(ranks: Iterable[RankHandle]) -> list[Leader]:
    """Each once."""
    return list(dict.fromkeys(handle.leader for handle in ranks))


class Gang(Protocol):
    """The ranks of one replica, started together."""

    @property
    def ranks(self) -> Sequence[RankHandle]: ...

    def replace(self, rank: int, plan: Plan) -> None:
        """End the process of `rank`, if it has not ended, and begin to start a new one for it under `plan`."""

    def kill(self) -> None:
        """End every process at once and give back what was reserved; returns when they are gone."""


class Gangs(Protocol):
    """All gangs of a job. Where mesh.data is a range some replicas may have none."""

    @property
    def present(self) -> Mapping[int, Gang]:
        """By replica."""

    def lacks_place(self, replica: int) -> bool:
        """The cluster has no room for lost ranks of this gang at present."""

    def drop(self, replica: int) -> None:
        """End this gang, and ask for a place for another one."""

    def places(self) -> Sequence[int]:
        """Replicas that have no gang, but a place for one."""

    def start(self, replica: int, plan: Plan) -> Gang:
        """Begin to start a gang there, which is not `present` until `admit`."""

    def admit(self, replica: int) -> None:
        """The gang that was started belongs to the job now."""

    def leaving(self) -> Mapping[int, float]:
        """Replica -> seconds until one of its nodes goes away, for gangs on nodes with a notice."""


class FixedGangs:
    """Gangs that always have a place."""

    def __init__(self, gangs: Sequence[Gang]) -> None:
        self.present: dict[int, Gang] = dict(enumerate(gangs))

    def lacks_place(self, replica: int) -> bool:
        return False

    def drop(self, replica: int) -> None:
        raise AssertionError("there is always a place")

    def places(self) -> Sequence[int]:
        return ()

    def start(self, replica: int, plan: Plan) -> Gang:
        raise AssertionError("all were started")

    def admit(self, replica: int) -> None:
        raise AssertionError("all were started")

    def leaving(self) -> Mapping[int, float]:
        return {}


class Answers:
    """Whether all of many futures have answered, or one has failed. Costs nothing while neither happens, unlike
    `concurrent.futures.wait`, which touches every future each time."""

    def __init__(self, futures: Iterable[Future[T]]) -> None:
        waiting = list(futures)
        self._left, self._lock, self._over = len(waiting), threading.Lock(), threading.Event()
        self.any_failed = False
        for future in waiting:
            future.add_done_callback(self._note)

    @property
    def all_there(self) -> bool:
        return self._left == 0

    def wait(self, limit_s: float) -> None:
        """Until all are there or one has failed, `limit_s` at most."""
        self._over.wait(limit_s)

    def _note(self, future: Future[T]) -> None:
        failed = future.exception() is not None
        with self._lock:
            self._left -= 1
            self.any_failed = self.any_failed or failed
            if self.any_failed or self._left == 0:
                self._over.set()


def settle(future: Future[T], outcome: T | RankError) -> None:
    """Complete `future` with what a rank answered."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, RankError):
        future.set_exception(RankRaised(outcome))
    else:
        future.set_result(outcome)
