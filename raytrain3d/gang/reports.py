"""Step reports on their way from the ranks to the driver, read beside a running lease."""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, wait

from raytrain3d.gang.handle import RankHandle
from raytrain3d.gang.worker import RankWorker
from raytrain3d.train.report import StepReport


class ReportReader:
    """Asks every rank for its new reports and puts those of a step together."""

    def __init__(self, ranks: Sequence[RankHandle], after: int) -> None:
        self._ranks = ranks
        self.latest = {handle.rank: after for handle in ranks}
        """Rank -> its last reported step."""
        self._pending: dict[int, Future[list[StepReport]]] = {}
        self._steps: defaultdict[int, dict[int, StepReport]] = defaultdict(dict)

    @property
    def reached(self) -> int:
        """Last step that every rank has reported."""
        return min(self.latest.values())

    def poll(self, limit_s: float) -> list[tuple[StepReport, ...]]:
        """Reports, in rank order, of every step that has now been reported by all. Waits `limit_s` at most for answers;
        a rank that cannot answer is the business of whoever waits for its lease."""
        for handle in self._ranks:
            if handle.rank not in self._pending:
                self._pending[handle.rank] = handle.ask(RankWorker.reports, self.latest[handle.rank])
        wait(self._pending.values(), timeout=limit_s)
        for rank in [rank for rank, future in self._pending.items() if future.done()]:
            future = self._pending.pop(rank)
            if future.exception() is None:
                self._take(rank, future.result())
        whole = sorted(step for step, reports in self._steps.items() if len(reports) == len(self._ranks))
        return [tuple(report for _, report in sorted(self._steps.pop(step).items())) for step in whole]

    def rest(self, until: int, limit_s: float) -> list[tuple[StepReport, ...]]:
        """Reports of every step up to `until` from whoever has reported it. Waits `limit_s` at most for each of two answers.
        The last that is asked of this reader."""
        whole = [*self.poll(limit_s), *self.poll(limit_s)]  # the first answers may be to questions of before the failure
        return [*whole, *(tuple(report for _, report in sorted(self._steps[step].items()))
                                 for step in sorted(self._steps) if step <= until)]

    def _take(self, rank: int, reports: Sequence[StepReport]) -> None:
        for report in reports:
            self._steps[report.step][rank] = report
            self.latest[rank] = report.step
