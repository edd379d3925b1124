"""What the driver does when ranks were lost: the acting half of `recovery.py`.

Survivors keep their processes and what they hold. They leave their groups, lost ranks get new processes, and all join the
next generation, in which everyone comes to hold the same step. Groups, and the store through which they are made, belong
to one generation, so nothing that an older one sends arrives. What fails meanwhile only begins it anew.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from raytrain3d.config import JobConfig
from raytrain3d.errors import RankFailed, RayTrain3DError
from raytrain3d.gang.budget import Budget, Cause
from raytrain3d.gang.failure import Sign, culprit, diagnose, is_loss
from raytrain3d.gang.fleet import Fleet
from raytrain3d.gang.recovery import GoBack, GoOn, Rewind, decide, ranks_text
from raytrain3d.gang.stop import StopFlag
from raytrain3d.metrics.journal import Journal
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.peers import peers_of
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.table import counted
from raytrain3d.train.report import StepReport

SHOWN = 6
"""Failures and recoveries that `raytrain3d status` shows."""


class Store(Protocol):
    """A rendezvous store that lives as long as the object."""

    @property
    def port(self) -> int: ...


class Recoverer:
    """Generations of one job. `serve` makes a store; `go_back` puts all ranks at the newest checkpoint and returns its step,
    which `saved` tells; `rewind` hears that they went back to a step and a split; `tell` takes reports of steps that were
    done before the failure."""

    def __init__(self, config: JobConfig, fleet: Fleet, journal: Journal, stop: StopFlag, host: str, *,
                 serve: Callable[[], Store], go_back: Callable[[], int], saved: Callable[[], int],
                 rewind: Callable[[int, Stages], None], tell: Callable[[Sequence[StepReport]], None]) -> None:
        self._config, self._fleet, self._journal, self._stop = config, fleet, journal, stop
        self._host, self._serve, self._go_back, self._saved = host, serve, go_back, saved
        self._rewind, self._tell = rewind, tell
        self._peers: tuple[int, ...] = ()
        self._budget = Budget(config.recovery)
        self._store: Store | None = None
        self._lost: set[int] = set()
        self._began: float | None = None
        self._history: deque[str] = deque(maxlen=SHOWN)
        self.generation = 0

    @property
    def history(self) -> tuple[str, ...]:
        """The last failures and recoveries, with their times."""
        return tuple(self._history)

    def join(self) -> None:
        """All ranks make the groups of the present generation."""
        self._store = None  # of the generation before: whoever still waits there is freed
        self._store = self._serve()
        self._fleet.join(self._host, self._store.port, self.generation)
        if self._config.recovery.snapshot_interval is not None:
            self._join_ring()

    def _join_ring(self) -> None:
        """Peers stay what they were at first: they keep snapshots."""
        if not self._peers:
            mesh, nodes = self._config.mesh, [node for _, node in sorted(self._fleet.nodes.items())]
            self._peers = peers_of(nodes, mesh.pipeline * mesh.tensor if mesh.data > 1 else mesh.tensor)
            if len(set(nodes)) == 1:
                self._journal.event("snapshots", 0, f"all ranks are on node {nodes[0]}, and so are the snapshots that they "
                                    "keep of each other: a lost node takes both")
        self._fleet.join_ring(self._peers)

    def close(self) -> None:
        """Give the store's port back."""
        self._store = None

    def failed(self, step: int, signs: Sequence[Sign], plan: Plan, *, starting: bool) -> RayTrain3DError | None:
        """Ranks failed, after `step` had been done. Returns the error that ends the run, if it cannot go on; starting: it
        cannot, since what is wrong then will be so again."""
        error = diagnose(signs, plan, self._fleet.nodes)
        if starting or not isinstance(error, RankFailed):
            return error
        now = time.monotonic()
        self._began = self._began or now
        lost = {sign.rank for sign in signs if is_loss(sign)}
        cause: Cause = "errors" if culprit(signs).kind == "raised" else "deaths"
        spent = self._budget.spend(cause, step, now)
        if spent is not None:
            return RankFailed(f"{error}\n{spent}", rank=error.rank, step=error.step, op=error.op)
        self._lost |= lost
        self._tell_event("failure", step, str(error).splitlines()[0], ranks=sorted(lost), cause=cause,
                         generation=self.generation, details=str(error))
        return None

    def recover(self, step: int, plan: Plan) -> int:
        """All ranks come to hold the same step, which is returned. step: the last one that was seen done."""
        self._pause()
        lost, self._lost = sorted(self._lost), set()
        self._store = None
        self._fleet.replace(lost, plan)
        standings = self._fleet.stand(set(range(plan.mesh.size)) - set(lost))
        self.generation += 1
        decision = decide(standings, plan.mesh, shards=plan.shard_group, peers=self._peers, saved=self._saved())
        self._fleet.facts(may_stop=False)
        self.join()
        self._fleet.adopt(plan.stages, plan.shares)
        match decision:
            case GoOn():
                self._fleet.recover(decision.step, decision.values, decision.fills)
                for reports in self._fleet.last_reports(decision.step):
                    self._tell(reports)
                reached, how = decision.step, _how(decision)
            case Rewind():
                for reports in self._fleet.last_reports(decision.step):
                    self._tell(reports)
                self._fleet.go_back(decision.step, decision.stages, decision.fills)
                self._rewind(decision.step, decision.stages)
                reached = decision.step
                how = (f"{decision.reason}, so all went back to the snapshot of step {reached}, "
                       f"{ranks_text([rank for rank, _ in decision.fills])} with what "
                       f"{ranks_text([keeper for _, keeper in decision.fills])} kept")
            case GoBack():
                reached = self._go_back()
                how = f"{decision.reason}, so all went back to {_place(reached)}"
        self._report(step, reached, how, lost)
        return reached

    def _pause(self) -> None:
        end = time.monotonic() + self._budget.wait_s
        while time.monotonic() < end and self._stop.reason is None:
            time.sleep(0.1)

    def _report(self, step: int, reached: int, how: str, lost: Sequence[int]) -> None:
        assert self._began is not None
        seconds, self._began = time.monotonic() - self._began, None
        again = max(0, step - reached)
        self._tell_event(
            "recovered", reached, f"recovered in {seconds:.1f} s, generation {self.generation}: {how}; goes on after step "
            f"{reached}" + (f", {counted(again, 'step')} to be done again" if again else ""),
            generation=self.generation, seconds=seconds, replaced=lost, again=again)

    def _tell_event(self, kind: str, step: int, text: str, **values: Any) -> None:
        self._journal.event(kind, step, text, **values)
        self._history.append(f"{time.strftime('%H:%M:%S')} {text}")


def _how(decision: GoOn) -> str:
    """`ranks 1, 3 filled from ranks 5, 7, step 12 carried out by ranks 0, 2`."""
    parts = []
    if decision.fills:
        ranks, donors = ([pair[i] for pair in decision.fills] for i in (0, 1))
        parts.append(f"{ranks_text(ranks)} filled from {ranks_text(donors)}")
    if decision.forward:
        parts.append(f"step {decision.step}, which was agreed on, carried out by {ranks_text(decision.forward)}")
    return ", ".join(parts) or "nobody has lost anything"


def _place(step: int) -> str:
    return f"the checkpoint of step {step}" if step else "fresh weights, since there is no checkpoint"
