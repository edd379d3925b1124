"""A rank as the driver sees it, whatever it runs in.

A request names a method of `RankWorker`, so an editor follows it and mypy checks its arguments; the answer is a future.
It fails with RankDied as soon as the process is known to be gone, and with RankRaised when the method raised.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from raytrain3d.gang.worker import RankError, RankWorker
from raytrain3d.plan.plan import Plan

P = ParamSpec("P")
T = TypeVar("T")


class RankDied(Exception):
    """The process of a rank is gone. The text is the cause."""


class RankRaised(Exception):
    """A rank's method raised."""

    def __init__(self, error: RankError) -> None:
        super().__init__(f"{error.kind}: {error.message}")
        self.error = error


class RankHandle(Protocol):
    """One rank."""

    @property
    def rank(self) -> int: ...

    @property
    def node(self) -> str:
        """Name of its node for people."""

    def call(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a method in the thread that trains, after earlier calls."""

    def ask(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a method at once, beside a call that may be under way."""


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


def settle(future: Future[T], outcome: T | RankError) -> None:
    """Complete `future` with what a rank answered."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, RankError):
        future.set_exception(RankRaised(outcome))
    else:
        future.set_result(outcome)
