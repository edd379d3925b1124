"""Does a lease still go on? Where no step has been finished for a while, every rank is asked where it is; if none of them
moves for too long, the one that holds the others up is named.

What is too long follows from the steps measured so far: a slow step is not a hang.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

from raytrain3d.gang.diagnose import find_culprit
from raytrain3d.gang.failure import Sign
from raytrain3d.gang.handle import RankHandle
from raytrain3d.gang.worker import RankWorker
from raytrain3d.plan.plan import Plan
from raytrain3d.train.position import Position

ANSWER_S = 2.0
"""Longest wait for where a rank is; it answers in milliseconds unless its process is stopped."""
UNWATCHED = 0.25
"""Share of the limit without a finished step after which ranks are asked; what they do then counts as movement."""
FIRST = 3
"""The limit is as many times as long until the first step of a generation is done: it may load or compile kernels."""
TIMES_STEP = 4
"""Ranks may stand still for as many times as long as the slowest step has taken."""


class HangWatch:
    """Watches the leases of one job. `least_s`: shortest time without any movement that is a hang."""

    def __init__(self, least_s: float) -> None:
        self._least_s, self._slowest_s, self._is_first = least_s, 0.0, True
        self._seen: dict[int, tuple[int, int, int]] = {}
        self._moved = time.monotonic()

    def begin_generation(self) -> None:
        """Some processes are new."""
        self._is_first = True

    def begin(self) -> None:
        """A lease begins, or a step was finished: all are on the move, as far as is known."""
        self._seen, self._moved = {}, time.monotonic()

    def saw_steps(self, seconds: Iterable[float]) -> None:
        """Steps were finished that took so long."""
        self._slowest_s, self._is_first = max([self._slowest_s, *seconds]), False
        self.begin()

    @property
    def limit_s(self) -> float:
        return max(self._least_s * (FIRST if self._is_first else 1), TIMES_STEP * self._slowest_s)

    def check(self, ranks: Sequence[RankHandle], plan: Plan) -> Sign | None:
        """The sign of the rank that holds the others up, if they hang. Asks nobody while steps are finished in time."""
        if not self._seen and time.monotonic() - self._moved < UNWATCHED * self.limit_s:
            return None
        positions = _positions(ranks)
        progress = {rank: position.progress for rank, position in positions.items() if position is not None}
        if any(self._seen.get(rank) != now for rank, now in progress.items()):
            self._seen, self._moved = progress, time.monotonic()
        if time.monotonic() - self._moved < self.limit_s:
            return None
        found = find_culprit(positions, plan)
        return Sign(rank=found.rank, kind="hung", step=found.step, op=found.op, traceback=found.stack,
                    cause=f"nobody has moved for {time.monotonic() - self._moved:.0f} s; {found.why}")


def _positions(ranks: Sequence[RankHandle]) -> dict[int, Position | None]:
    futures: dict[int, Future[Position]] = {handle.rank: handle.ask(RankWorker.position) for handle in ranks}
    wait(futures.values(), timeout=ANSWER_S)
    return {rank: future.result() if future.done() and future.exception() is None else None
            for rank, future in futures.items()}
