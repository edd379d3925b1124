"""Which gangs take part in a job, and which could: room that is gone, room that has come, nodes that will go away.

Only looks and prepares. Who takes part changes in a new generation (`recoverer.py`), and the controller says when.
"""

import time
from collections.abc import Collection
from concurrent.futures import Future, wait
from typing import Any

from raytrain3d.config import JobConfig
from raytrain3d.gang.handle import Gangs
from raytrain3d.gang.worker import RankWorker
from raytrain3d.metrics.journal import Journal
from raytrain3d.plan.plan import Plan

HOMELESS_S = 3.0
"""For so long there must be no room for a lost rank before its gang is thought to have no place."""
AGAIN_S = 60.0
"""After a gang could not start, before another try."""


class Membership:
    """Of one job, whose gangs are `gangs`."""

    def __init__(self, config: JobConfig, gangs: Gangs, journal: Journal) -> None:
        self._mesh, self._gangs, self._journal = config.mesh, gangs, journal
        self._arriving: dict[int, list[Future[None]]] = {}
        self._not_before: dict[int, float] = {}
        self._noticed: dict[int, float] = {}
        """Replica -> when its node goes away, for notices that were told."""
        self._unanswered: set[int] = set()

    def can_do_without(self, replicas: Collection[int]) -> bool:
        """Whether the job may go on without these."""
        left = self._gangs.present.keys() - set(replicas)
        return self._mesh.is_elastic and len(left) >= self._mesh.fewest_replicas

    def without_place(self, lost: Collection[int], limit_s: float) -> list[int]:
        """Gangs whose new processes, for the ranks `lost`, cannot start: there is no room for them, or they have not
        answered within `limit_s`."""
        new = {replica: [handle.call(RankWorker.facts) for handle in gang.ranks if handle.rank in lost]
               for replica, gang in self._gangs.present.items()}
        waiting = {replica: futures for replica, futures in new.items() if futures}
        homeless: dict[int, float] = {}
        end = time.monotonic() + limit_s
        while waiting and time.monotonic() < end:
            wait([future for futures in waiting.values() for future in futures], timeout=0.2)
            waiting = {replica: futures for replica, futures in waiting.items() if not all(map(_is_fine, futures))}
            now = time.monotonic()
            homeless = {replica: homeless.get(replica, now) for replica in waiting if self._gangs.lacks_place(replica)}
            if len(homeless) == len(waiting) and all(now - since > HOMELESS_S for since in homeless.values()):
                break
        return sorted(waiting)

    def drop(self, replica: int) -> None:
        """The job goes on without this gang."""
        self._gangs.drop(replica)

    def look(self, step: int, plan: Plan) -> None:
        """Start gangs where there is room for them now, and hear of nodes that will go away."""
        for replica, left_s in sorted(self._gangs.leaving().items()):
            if replica not in self._noticed:
                self._unanswered.add(replica)
                self._journal.event("notice", step, f"a node of gang {replica} goes away in {left_s:.0f} s", replica=replica,
                                    seconds=left_s)
            self._noticed[replica] = time.monotonic() + left_s
        for replica in self._gangs.places():
            if replica not in self._arriving and time.monotonic() > self._not_before.get(replica, 0.0):
                gang = self._gangs.start(replica, plan.with_replicas([*plan.replicas, replica]))
                self._arriving[replica] = [handle.call(RankWorker.prepare) for handle in gang.ranks]
                self._journal.event("gang arrives", step, f"there is room for gang {replica}: its ranks start",
                                    replica=replica)
        for replica, futures in list(self._arriving.items()):
            errors = [error for future in futures if future.done() and (error := future.exception()) is not None]
            if errors:
                del self._arriving[replica]
                self._gangs.drop(replica)
                self._not_before[replica] = time.monotonic() + AGAIN_S
                self._journal.event("gang did not arrive", step, f"gang {replica} could not start: {errors[0]}",
                                    replica=replica)

    @property
    def arrived(self) -> list[int]:
        """Gangs whose ranks are all ready to join."""
        return sorted(replica for replica, futures in self._arriving.items() if all(map(_is_fine, futures)))

    @property
    def alarm(self) -> bool:
        """The lease should end early: who takes part has to change, or the state has to be saved."""
        return bool(self._unanswered or self.arrived)

    def admit(self, replica: int) -> None:
        """A gang that has arrived belongs to the job now."""
        del self._arriving[replica]
        self._gangs.admit(replica)
        self._noticed.pop(replica, None)

    def take_notices(self) -> list[int]:
        """Gangs on nodes that will go away, once."""
        found, self._unanswered = sorted(self._unanswered & self._gangs.present.keys()), set()
        return found

    def had_notice(self, rank: int, plan: Plan) -> bool:
        """Its node was said to go away."""
        return plan.mesh.coordinate(rank).data in self._noticed


def _is_fine(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None
