"""Step reports on their way from the ranks to the driver, read beside a running lease."""

import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, wait

from raytrain3d.gang.handle import Leader, RankHandle, leaders_of
from raytrain3d.gang.worker import RankWorker
from raytrain3d.train.report import StepReport

LONGEST_PAUSE_S = 10.0
"""Between two readings, however long steps take."""


class ReportReader:
    """Asks every leader for new reports, about once a step if steps are long, and puts those of a step together."""

    def __init__(self, ranks: Sequence[RankHandle], after: int) -> None:
        self._ranks = ranks
        self._leaders = leaders_of(ranks)
        self.latest = {handle.rank: after for handle in ranks}
        """Rank -> its last reported step."""
        self._pending: dict[Leader, Future[list[StepReport]]] = {}
        self._steps: defaultdict[int, dict[int, StepReport]] = defaultdict(dict)
        self._pause, self._asked = 0.0, 0.0

    @property
    def reached(self) -> int:
        """Last step that every rank has reported."""
        return min(self.latest.values())

    def poll(self, limit_s: float, *, now: bool = False) -> list[tuple[StepReport, ...]]:
        """Reports, in rank order, of every step that has now been reported by all. Waits `limit_s` at most for answers;
        a rank that cannot answer is the business of whoever waits for its lease. now: even if it is early."""
        if now or time.monotonic() - self._asked >= self._pause:
            self._asked = time.monotonic()
            for leader in self._leaders:
                if leader not in self._pending:
                    self._pending[leader] = leader.reports(self.latest[leader.ranks[0]])
        wait(self._pending.values(), timeout=limit_s)
        for leader in [leader for leader, future in self._pending.items() if future.done()]:
            future = self._pending.pop(leader)
            if future.exception() is None:
                self._take(leader.ranks, future.result())
        whole = self._up_to(self.reached)
        if whole:
            self._pause = min(LONGEST_PAUSE_S, max(report.seconds for report in whole[-1]))
        return whole

    def rest(self, until: int, limit_s: float) -> list[tuple[StepReport, ...]]:
        """Reports of every step up to `until` from whoever has reported it, each asked by itself: who leads a gang may be
        lost. Waits `limit_s` at most for each of two answers. The last that is asked of this reader."""
        whole = self.poll(limit_s, now=True)  # may answer questions of before the failure
        asked = {handle.rank: handle.ask(RankWorker.reports, self.latest[handle.rank]) for handle in self._ranks}
        wait(asked.values(), timeout=limit_s)
        for rank, future in asked.items():
            if future.done() and future.exception() is None:
                self._take((rank,), future.result())
        return [*whole, *self._up_to(until)]

    def _take(self, ranks: Sequence[int], reports: Sequence[StepReport]) -> None:
        """reports: in order of step."""
        for report in reports:
            self._steps[report.step][report.rank] = report
        if reports:
            self.latest.update(dict.fromkeys(ranks, reports[-1].step))

    def _up_to(self, step: int) -> list[tuple[StepReport, ...]]:
        found = sorted(each for each in self._steps if each <= step)
        return [tuple(report for _, report in sorted(self._steps.pop(each).items())) for each in found]
