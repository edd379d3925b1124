"""Layers move between stages while the job runs: the acting half of rebalancing (`plan/rebalance.py` decides).

A move is a row of one-layer shifts across one stage boundary. Each is copied, acknowledged by all, committed in the
driver's plan, and only then let go at its source; so whatever happens, the plan names a place that holds each layer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from raytrain3d.errors import PlanError
from raytrain3d.gang.fleet import Fleet
from raytrain3d.metrics.journal import Journal
from raytrain3d.plan.moves import Shift, after, moves
from raytrain3d.plan.partition import Stages, split_by_counts
from raytrain3d.plan.plan import Plan


@dataclass(slots=True)
class Moved:
    """Everything that was moved so far."""

    layers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Rebalancer:
    """Changes the split of a running job. `keep` writes the plan down whenever it has changed."""

    def __init__(self, plan: Plan, fleet: Fleet, journal: Journal, keep: Callable[[Plan], None]) -> None:
        self.plan = plan
        self._fleet, self._journal, self._keep = fleet, journal, keep
        self._wanted: list[str] = []
        self.moved = Moved()

    def request(self, counts: str) -> None:
        """Someone asks for stages of so many layers (`5,5,4,2`); done or refused at the next boundary."""
        self._wanted.append(counts)

    def act(self, step: int) -> None:
        """Between two leases, after `step`: do what was asked for."""
        for counts in self._wanted:
            try:
                stages = parse_counts(counts, self.plan)
            except PlanError as error:
                self._journal.event("rebalance refused", step, f"rebalance to {counts}: {error}", layers=counts)
                continue
            self.move(step, stages, self.plan.shares, f"asked for {counts}")
        self._wanted.clear()

    def move(self, step: int, stages: Stages, shares: tuple[int, ...], reason: str) -> None:
        """From the split of the plan to `stages`, and to `shares`."""
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
            "rebalance", step, f"{reason}: layers {counts_of(old)} -> {counts_of(stages)}, micro-batches "
            f"{list(shares)}; {len(shifts)} shifts, {num_bytes / 2**20:.1f} MiB in {seconds:.2f} s", reason=reason,
            stages=[end - first for first, end in stages], shares=list(shares), shifts=len(shifts), bytes=num_bytes,
            seconds=seconds)

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
