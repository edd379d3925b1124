"""Layers move between stages while the job runs: the acting half of rebalancing (`advisor.py` thinks).

A move is a row of one-layer shifts across one stage boundary. Each is copied, acknowledged by all, committed in the
driver's plan, and only then let go at its source; so whatever happens, the plan names a place that holds each layer.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError
from raytrain3d.gang.advisor import Advisor
from raytrain3d.gang.fleet import Fleet
from raytrain3d.metrics.journal import Journal
from raytrain3d.metrics.summary import RebalanceSummary
from raytrain3d.plan.measured import RECENT, Estimate
from raytrain3d.plan.mesh import Coordinate
from raytrain3d.plan.moves import Shift, after, moves
from raytrain3d.plan.partition import Stages, counts_of, counts_text, split_by_counts
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.rebalance import CERTAINTY, Keep, Move, Revert
from raytrain3d.plan.table import counted
from raytrain3d.train.report import StepReport

SLOW, NORMAL = 1.2, 1.1
"""Slowdown from which a rank is named, unless noise can feign it, and below which it is as fast as others again."""


def decides(config: JobConfig) -> bool:
    """Whether the driver thinks about moves at all: there must be ranks to move between."""
    return config.rebalance.mode != "off" and config.mesh.replicas * config.mesh.pipeline > 1


class Rebalancer:
    """Changes the split of a running job. `keep` writes the plan down whenever it has changed."""

    def __init__(self, config: JobConfig, plan: Plan, fleet: Fleet, journal: Journal, keep: Callable[[Plan], None]) -> None:
        self.plan = plan
        self._config, self._fleet, self._journal, self._keep = config, fleet, journal, keep
        self._advisor = Advisor(config, plan) if decides(config) else None
        self._wanted: list[str] = []
        self._named: set[tuple[int, int]] = set()
        self._trial_end = 0
        """Step after which the outcome of the last trial is known."""
        self.summary = RebalanceSummary()
        """What was done so far."""

    def watch(self, reports: Sequence[StepReport]) -> None:
        """One step, from all ranks."""
        if self._advisor is not None:
            self._advisor.watch(reports, self.plan)

    def request(self, counts: str) -> None:
        """Someone asks for stages of so many layers (`5,5,4,2`); done or refused at the next boundary."""
        self._wanted.append(counts)

    def next_decision(self, step: int) -> int | None:
        """The first step from `step` on after which there is a decision; None: there are none."""
        if self._advisor is None:
            return None
        regular = -(-step // self._config.rebalance.interval) * self._config.rebalance.interval
        return min(regular, self._trial_end) if step <= self._trial_end else regular

    def is_due(self, step: int) -> bool:
        """Whether `act` may do something after `step`: all reports up to it should have been watched before."""
        return bool(self._wanted) or self.next_decision(step) == step

    def act(self, step: int) -> None:
        """Between two leases, after `step`: do what was asked for, else what is best."""
        asked = bool(self._wanted)
        while self._wanted:  # taken off when it is done: after a failure in the midst of it the rest remains to be done
            self._do_request(step, self._wanted[0])
            self._wanted.pop(0)
        if self._advisor is not None and not asked:
            self._decide(step, self._advisor)

    def replan(self, plan: Plan) -> None:
        """Other replicas take part; the ranks are told by whoever changed that."""
        self.plan = plan
        self._keep(plan)

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

    def _decide(self, step: int, advisor: Advisor) -> None:
        estimate = advisor.estimate()
        if estimate is None:
            self._journal.note("rebalance waits", step, "too little is measured yet")
            return
        self._name_slow_ranks(step, estimate)
        decision = advisor.advise(step, self.plan, estimate)
        self._tell_outcome(step, advisor)
        if decision is None:
            self._journal.note("rebalance waits", step, "still looking for the best split")
            return
        self.summary = replace(self.summary, decisions=self.summary.decisions + 1)
        if isinstance(decision, Keep):
            self._journal.note("rebalance kept", step, decision.reason)
        elif self._config.rebalance.mode == "advise":
            self._journal.event("rebalance advice", step, f"advice: {decision.reason}")
        else:
            self._follow(step, advisor, decision)

    def _tell_outcome(self, step: int, advisor: Advisor) -> None:
        """What the last move brought, as soon as that is known."""
        gain = advisor.last_gain
        if gain is None or self.summary.achieved_gain is not None:
            return
        self.summary = replace(self.summary, achieved_gain=gain[1])
        self._journal.event("rebalance outcome", step, f"the last move was predicted to gain {gain[0]:.2f}x and gained "
                            f"{gain[1]:.2f}x", predicted=gain[0], achieved=gain[1])

    def _follow(self, step: int, advisor: Advisor, decision: Move | Revert) -> None:
        before = self.summary
        self.move(step, decision.split.stages, decision.split.shares, decision.reason)
        after = self.summary
        advisor.carried_out(decision, num_bytes=after.bytes - before.bytes, seconds=after.seconds - before.seconds,
                            shifts=after.layers - before.layers)
        if isinstance(decision, Move):
            self.summary = replace(after, predicted_gain=decision.gain, achieved_gain=None)
            self._trial_end = step + RECENT if decision.is_trial else 0

    def _name_slow_ranks(self, step: int, estimate: Estimate) -> None:
        slow, still = estimate.slow(max(SLOW, 1 + CERTAINTY * estimate.noise)), estimate.slow(NORMAL)
        for place in sorted(slow.keys() - self._named):
            where, values = self._where(*place)
            self._journal.event("slow rank", step, f"{where} is {slow[place]:.2f} times as slow as others",
                                slowdown=slow[place], **values)
        for place in sorted(self._named - still.keys()):
            where, values = self._where(*place)
            self._journal.event("slow rank recovered", step, f"{where} is as fast as others again", **values)
        self._named = self._named & still.keys() | slow.keys()

    def _where(self, replica: int, pipeline: int) -> tuple[str, dict[str, Any]]:
        """The ranks at a place, with their node: for people and for programs."""
        mesh = self.plan.mesh
        first = mesh.rank(Coordinate(data=replica, pipeline=pipeline, tensor=0))
        ranks, node = range(first, first + mesh.tensor), self._fleet.nodes[first]
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        return f"{named} (replica {replica}, pipeline rank {pipeline}) on node {node}", {"rank": first, "node": node}

    def move(self, step: int, stages: Stages, shares: tuple[int, ...], reason: str) -> None:
        """From the split of the plan to `stages`, and to `shares`."""
        start, before, old = time.monotonic(), self.summary, self.plan.stages
        shifts = moves(old, stages)
        for shift in shifts:
            self._shift(shift)
        if shares != self.plan.shares:
            self._commit(replace(self.plan, shares=shares))
        seconds, num_bytes = time.monotonic() - start, self.summary.bytes - before.bytes
        self.summary = replace(self.summary, moves=before.moves + 1, seconds=before.seconds + seconds)
        self._journal.event(
            "rebalance", step, f"{reason}; {counted(len(shifts), 'shift')}, {num_bytes / 2**20:.1f} MiB in {seconds:.2f} s",
            reason=reason, before=list(counts_of(old)), stages=list(counts_of(stages)),
            shares=list(shares), shifts=len(shifts), bytes=num_bytes, seconds=seconds)

    def _shift(self, shift: Shift) -> None:
        source, target = self.plan.rank_of(shift.source), self.plan.rank_of(shift.target)
        sent = self._fleet.copy_layer(shift.layer, source, target) if source != target else 0
        self.summary = replace(self.summary, layers=self.summary.layers + 1, bytes=self.summary.bytes + sent)
        self._commit(replace(self.plan, stages=after(self.plan.stages, shift)))

    def _commit(self, plan: Plan) -> None:
        """From here on `plan` is the truth, whoever dies; then the ranks follow."""
        self.plan = plan
        self._keep(plan)
        self._fleet.adopt(plan.stages, plan.shares)


def parse_counts(text: str, plan: Plan) -> Stages:
    """Stages from `5,5,4,2`. PlanError saying what is wrong with them."""
    words = text.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise PlanError(f"{text!r} are no numbers of layers: write one for each stage, such as {counts_text(plan.stages)}")
    if len(words) != len(plan.stages):
        raise PlanError(f"{len(words)} numbers for {len(plan.stages)} stages: write one for each, such as "
                        f"{counts_text(plan.stages)}")
    return split_by_counts([int(word) for word in words], plan.num_layers)
