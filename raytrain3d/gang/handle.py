"""A rank as the driver sees it, whatever it runs in.

A request names a method of `RankWorker`, so an editor follows it and mypy checks its arguments; the answer is a future.
It fails with RankDied as soon as the process is known to be gone, and with RankRaised when the method raised.
"""

from collections.abc import Callable, Sequence
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


def settle(future: Future[T], outcome: T | RankError) -> None:
    """Complete `future` with what a rank answered."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, RankError):
        future.set_exception(RankRaised(outcome))
    else:
        future.set_result(outcome)
