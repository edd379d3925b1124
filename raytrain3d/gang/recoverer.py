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
from raytrain3d.gang.membership import Membership
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
    done before the failure; `replan` hears of a plan for other replicas."""

    def __init__(self, config: JobConfig, fleet: Fleet, members: Membership, journal: Journal, stop: StopFlag, host: str, *,
                 serve: Callable[[], Store], go_back: Callable[[], int], saved: Callable[[], int],
                 rewind: Callable[[int, Stages], None], tell: Callable[[Sequence[StepReport]], None],
                 replan: Callable[[Plan], None]) -> None:
        self._config, self._fleet, self._members, self._journal, self._stop = config, fleet, members, journal, stop
        self._host, self._serve, self._go_back, self._saved = host, serve, go_back, saved
        self._rewind, self._tell, self._replan = rewind, tell, replan
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

    def join(self, plan: Plan) -> None:
        """All ranks make the groups of the present generation, and hold and compute what the plan says."""
        self._store = None  # of the generation before: whoever still waits there is freed
        self._store = self._serve()
        self._fleet.join(self._host, self._store.port, self.generation)
        if self._config.recovery.snapshot_interval is not None and len(plan.ranks) > 1:
            self._join_ring(plan)
        self._fleet.adopt(plan.stages, plan.shares)

    def _join_ring(self, plan: Plan) -> None:
        """Peers stay what they were at first, since they keep snapshots, until other replicas take part."""
        if not self._peers:
            nodes = [node for _, node in sorted(self._fleet.nodes.items())]
            neighbours = peers_of(nodes, plan.mesh.ranks_per_gang if len(plan.replicas) > 1 else plan.mesh.tensor)
            peers = {plan.ranks[i]: plan.ranks[peer] for i, peer in enumerate(neighbours)}
            self._peers = tuple(peers.get(rank, rank) for rank in range(plan.mesh.size))
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
        first = culprit(signs)
        cause: Cause = ("errors" if first.kind == "raised" else
                        "preemptions" if self._members.had_notice(first.rank, plan) else "deaths")
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
        remaining = self._without_homeless(step, lost, plan)
        return self._bring_together(step, remaining, [rank for rank in lost if rank in remaining.ranks])

    def take_in(self, replicas: Sequence[int], step: int, plan: Plan) -> int:
        """Gangs that have arrived take part from the next step on; they are filled by others. Returns the step that all
        hold."""
        self._begin()
        for replica in replicas:
            self._members.admit(replica)
        larger = plan.with_replicas([*plan.replicas, *replicas])
        self._change_to(larger)
        self._tell_event("gang taken in", step, f"{_gangs(replicas)} taken in, {_of(larger)}", replicas=list(replicas))
        return self._bring_together(step, larger, [rank for rank in larger.ranks if rank not in plan.ranks], planned=True)

    def give_up(self, replicas: Sequence[int], step: int, plan: Plan, why: str) -> int:
        """The job goes on without gangs that are still there. Returns the step that all hold."""
        self._begin()
        return self._bring_together(step, self._drop(replicas, step, plan, why), [], planned=True)

    def _begin(self) -> None:
        self._began = self._began or time.monotonic()
        self._store = None

    def _without_homeless(self, step: int, lost: Sequence[int], plan: Plan) -> Plan:
        """Where the mesh allows, gangs for which there is no room now are given up."""
        if not lost or not self._members.can_do_without([plan.mesh.coordinate(lost[0]).data]):
            return plan
        homeless = self._members.without_place(lost, self._config.recovery.replace_s)
        while homeless and not self._members.can_do_without(homeless):
            homeless.pop(0)  # for this one the job waits
        return self._drop(homeless, step, plan, "no room for it") if homeless else plan

    def _drop(self, replicas: Sequence[int], step: int, plan: Plan, why: str) -> Plan:
        for replica in replicas:
            self._members.drop(replica)
        smaller = plan.with_replicas([replica for replica in plan.replicas if replica not in replicas])
        self._change_to(smaller)
        self._tell_event("gang given up", step, f"{_gangs(replicas)} given up: {why}; {_of(smaller)}",
                         replicas=list(replicas))
        return smaller

    def _change_to(self, plan: Plan) -> None:
        self._peers = ()
        self._replan(plan)

    def _bring_together(self, step: int, plan: Plan, new: Sequence[int], *, planned: bool = False) -> int:
        """A new generation in which all ranks of the plan hold the same step. new: ranks that hold nothing. planned: nothing
        has failed."""
        standings = self._fleet.stand(set(plan.ranks) - set(new))
        self.generation += 1
        decision = decide(standings, plan.mesh, shards=plan.shard_group, peers=self._peers, saved=self._saved(),
                          ranks=plan.ranks)
        self._fleet.facts(may_stop=False)
        self.join(plan)
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
        self._report(step, reached, how, new, "regrouped" if planned else "recovered")
        return reached

    def _pause(self) -> None:
        end = time.monotonic() + self._budget.wait_s
        while time.monotonic() < end and self._stop.reason is None:
            time.sleep(0.1)

    def _report(self, step: int, reached: int, how: str, new: Sequence[int], kind: str) -> None:
        assert self._began is not None
        seconds, self._began = time.monotonic() - self._began, None
        again = max(0, step - reached)
        self._tell_event(
            kind, reached, f"{kind} in {seconds:.1f} s, generation {self.generation}: {how}; goes on after step "
            f"{reached}" + (f", {counted(again, 'step')} to be done again" if again else ""),
            generation=self.generation, seconds=seconds, replaced=list(new), again=again)

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
    return ", ".join(parts) or "the others hold all that there is"


def _gangs(replicas: Sequence[int]) -> str:
    return f"gang{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"


def _of(plan: Plan) -> str:
    return f"{len(plan.replicas)} of {plan.mesh.data} replicas take part"


def _place(step: int) -> str:
    return f"the checkpoint of step {step}" if step else "fresh weights, since there is no checkpoint"
