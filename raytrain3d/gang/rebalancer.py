"""Layers move between stages while the job runs: the acting half of rebalancing (`advisor.py` thinks).

A move is a row of one-layer shifts across one stage boundary. Each is copied, acknowledged by all, committed in the
driver's plan, and only then let go at its source; so whatever happens, the plan names a place that holds each layer.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError
from raytrain3d.gang.advisor import Advisor
from raytrain3d.gang.fleet import Fleet
from raytrain3d.metrics.journal import Journal
from raytrain3d.plan.mesh import Coordinate
from raytrain3d.plan.moves import Shift, after, moves
from raytrain3d.plan.partition import Stages, split_by_counts
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.rebalance import Keep
from raytrain3d.plan.table import counted
from raytrain3d.train.report import StepReport


def decides(config: JobConfig) -> bool:
    """Whether the driver thinks about moves at all: there must be ranks to move between."""
    return config.rebalance.mode != "off" and config.mesh.data * config.mesh.pipeline > 1


@dataclass(slots=True)
class Moved:
    """Everything that was moved so far."""

    layers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Rebalancer:
    """Changes the split of a running job. `keep` writes the plan down whenever it has changed."""

    def __init__(self, config: JobConfig, plan: Plan, fleet: Fleet, journal: Journal, keep: Callable[[Plan], None]) -> None:
        self.plan = plan
        self._config, self._fleet, self._journal, self._keep = config, fleet, journal, keep
        self._advisor = Advisor(config, plan) if decides(config) else None
        self._wanted: list[str] = []
        self._named: set[tuple[int, int]] = set()
        self._gain: tuple[float, float] | None = None
        self.moved = Moved()

    def watch(self, reports: Sequence[StepReport]) -> None:
        """One step, from all ranks."""
        if self._advisor is not None:
            self._advisor.watch(reports, self.plan)

    def request(self, counts: str) -> None:
        """Someone asks for stages of so many layers (`5,5,4,2`); done or refused at the next boundary."""
        self._wanted.append(counts)

    def is_due(self, step: int) -> bool:
        """Whether `act` may do something after `step`: all reports up to it should have been watched before."""
        return bool(self._wanted) or (self._advisor is not None and step % self._config.rebalance.interval == 0)

    def act(self, step: int) -> None:
        """Between two leases, after `step`: do what was asked for, else what is best."""
        asked = bool(self._wanted)
        while self._wanted:  # taken off when it is done: after a failure in the midst of it the rest remains to be done
            self._do_request(step, self._wanted[0])
            self._wanted.pop(0)
        if self._advisor is not None and not asked:
            self._name_slow_ranks(step, self._advisor)
            self._follow(step, self._advisor)

    def return_to(self, stages: Stages) -> None:
        """The ranks went back to a split of before."""
        if stages != self.plan.stages:
            self.plan = replace(self.plan, stages=stages)
            self._keep(self.plan)

    def close(self) -> None:
        if self._advisor is not None:
            self._advisor.close()

    def _do_request(self, step: int, counts: str) -> None:
        try:
            stages = parse_counts(counts, self.plan)
        except PlanError as error:
            self._journal.event("rebalance refused", step, f"rebalance to {counts}: {error}", layers=counts)
            return
        self.move(step, stages, self.plan.shares, f"asked for stages {counts}")

    def _follow(self, step: int, advisor: Advisor) -> None:
        decision = advisor.advise(step, self.plan)
        if (gain := advisor.last_gain) is not None and gain != self._gain:
            self._gain = gain
            self._journal.event("rebalance outcome", step, f"the last move was predicted to gain {gain[0]:.2f}x and gained "
                                f"{gain[1]:.2f}x", predicted=gain[0], achieved=gain[1])
        if decision is None or isinstance(decision, Keep):
            reason = decision.reason if decision is not None else "too little is known yet"
            self._journal.note("rebalance kept", step, reason)
            return
        if self._config.rebalance.mode == "advise":
            self._journal.event("rebalance advice", step, f"advice: {decision.reason}")
            return
        before, start = self.moved.num_bytes, time.monotonic()
        shifts = self.move(step, decision.split.stages, decision.split.shares, decision.reason)
        advisor.carried_out(decision, num_bytes=self.moved.num_bytes - before, seconds=time.monotonic() - start,
                            shifts=shifts)

    def _name_slow_ranks(self, step: int, advisor: Advisor) -> None:
        slow, mesh = advisor.slow_ranks(), self.plan.mesh
        for (replica, pipeline), slowdown in slow.items():
            if (replica, pipeline) not in self._named:
                first = mesh.rank(Coordinate(data=replica, pipeline=pipeline, tensor=0))
                ranks = ", ".join(map(str, range(first, first + mesh.tensor)))
                node = self._fleet.nodes[first]
                self._journal.event("slow rank", step, f"rank {ranks} (replica {replica}, pipeline rank {pipeline}) on node "
                                    f"{node} is {slowdown:.2f} times as slow as others", rank=first, node=node,
                                    slowdown=slowdown)
        self._named = set(slow)

    def move(self, step: int, stages: Stages, shares: tuple[int, ...], reason: str) -> int:
        """From the split of the plan to `stages`, and to `shares`. Returns the number of one-layer shifts."""
        start, before, old = time.monotonic(), self.moved.num_bytes, self.plan.stages
        shifts = moves(old, stages)
        for shift in shifts:
            self._shift(shift)
        if shares != self.plan.shares:
            self._commit(replace(self.plan, shares=shares))
        self.moved.layers += len(shifts)
        seconds, num_bytes = time.monotonic() - start, self.moved.num_bytes - before
        self.moved.seconds += seconds
        self._journal.event(
            "rebalance", step, f"{reason}; {counted(len(shifts), 'shift')}, {num_bytes / 2**20:.1f} MiB in {seconds:.2f} s",
            reason=reason, before=[end - first for first, end in old], stages=[end - first for first, end in stages],
            shares=list(shares), shifts=len(shifts), bytes=num_bytes, seconds=seconds)
        return len(shifts)

    def _shift(self, shift: Shift) -> None:
        source, target = self.plan.rank_of(shift.source), self.plan.rank_of(shift.target)
        if source != target:
            self.moved.num_bytes += self._fleet.copy_layer(shift.layer, source, target)
        self._commit(replace(self.plan, stages=after(self.plan.stages, shift)))

    def _commit(self, plan: Plan) -> None:
        """From here on `plan` is the truth, whoever dies; then the ranks follow."""
        self.plan = plan
        self._keep(plan)
        self._fleet.adopt(plan.stages, plan.shares)


def counts_of(stages: Stages) -> str:
    """`5,5,4,2`."""
    return ",".join(str(end - first) for first, end in stages)


def parse_counts(text: str, plan: Plan) -> Stages:
    """Stages from `5,5,4,2`. PlanError saying what is wrong with them."""
    words = text.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise PlanError(f"{text!r} are no numbers of layers: write one for each stage, such as {counts_of(plan.stages)}")
    if len(words) != len(plan.stages):
        raise PlanError(f"{len(words)} numbers for {len(plan.stages)} stages: write one for each, such as "
                        f"{counts_of(plan.stages)}")
    return split_by_counts([int(word) for word in words], plan.num_layers)
