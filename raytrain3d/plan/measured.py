"""What layers cost and how slow ranks are, from the reports of a running job.

Of each rank the last WINDOW steps are kept and their median is the estimate: an outlier does not move it. When the last
RECENT steps all differ from those before by more than noise does, the rank or its layers have changed: what is older is
dropped, so that the estimate follows within a few steps. `separate.py` tells slow ranks from costly layers.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median

from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.separate import Place, median_cost, separate

WINDOW = 20
"""Steps behind an estimate."""
RECENT = 4
"""Steps that show a change, and fewest behind an estimate."""
LEAST_CHANGE = 0.03
"""Smaller changes are followed by the median alone."""
SPREADS = 1.5
"""Standard deviations of a step's time that each of the RECENT steps is off, to be a change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """One step of one rank: seconds by layer, summed over micro-batches."""

    rank: int
    num_micro_batches: int
    forward: Mapping[int, float]
    backward: Mapping[int, float]
    """Input gradients of split backwards, whole backwards else."""
    weight: Mapping[int, float] = field(default_factory=dict)
    """Weight gradients of split backwards."""
    repeated: Mapping[int, float] = field(default_factory=dict)
    """Share of the forward that is computed again within the backward. Absent: nothing."""

    def layers(self) -> dict[int, LayerCost]:
        """Of one micro-batch, by layer, without recompute. A backward that is not split is all input gradient: its parts are
        one op."""
        return {layer: LayerCost(forward=forward, backward_input=self._backward_alone(layer, forward),
                                 backward_weight=self.weight.get(layer, 0.0)) * (1 / self.num_micro_batches)
                for layer, forward in self.forward.items()}

    def _backward_alone(self, layer: int, forward: float) -> float:
        return max(0.0, self.backward.get(layer, 0.0) - self.repeated.get(layer, 0.0) * forward)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Running estimates; times in seconds."""

    costs: tuple[LayerCost, ...]
    """By layer: one micro-batch on a rank of slowdown 1."""
    slowdowns: tuple[tuple[float, ...], ...]
    """By replica and pipeline rank."""
    step_s: float
    """A step under the present split."""
    noise: float
    """Standard error of the time of the least well known rank, as a share of it."""

    def slow(self, least: float) -> dict[Place, float]:
        """Slowdowns of the ranks for which they are `least` or more."""
        return {(replica, rank): slowdown for replica, row in enumerate(self.slowdowns)
                for rank, slowdown in enumerate(row) if slowdown >= least}


class Measured:
    """Takes the reports of every step. flops: by layer, to know which layers are alike."""

    def __init__(self, mesh: Mesh, flops: Sequence[LayerCost]) -> None:
        self._mesh, self._flops = mesh, tuple(flops)
        self._ranks = {(replica, rank): RankHistory() for replica in range(mesh.data) for rank in range(mesh.pipeline)}
        self._steps: deque[float] = deque(maxlen=WINDOW)
        """Seconds of the last ones that were as they are now."""
        self._shares: dict[int, int] = {}

    def add(self, reports: Sequence[RankTimes], step_s: float) -> None:
        """One step, of all ranks. step_s: its wall time."""
        for place, times in self._by_place(reports).items():
            self._ranks[place].add(times)
        shares = {self._mesh.coordinate(report.rank).data: report.num_micro_batches for report in reports}
        alike = min((rank.num_steps for rank in self._seen.values()), default=1) if shares == self._shares else 1
        self._shares = shares
        self._steps.append(step_s)
        while len(self._steps) > alike:
            self._steps.popleft()

    @property
    def _seen(self) -> dict[Place, "RankHistory"]:
        return {place: rank for place, rank in self._ranks.items() if rank.num_steps}

    def _by_place(self, reports: Sequence[RankTimes]) -> dict[Place, dict[int, LayerCost]]:
        """Tensor ranks wait for each other inside a layer, so the slowest of them, which does not wait, tells how the work
        is spread over the layers, and it sets the pace."""
        found: dict[Place, dict[int, LayerCost]] = {}
        for report in reports:
            at = self._mesh.coordinate(report.rank)
            place, times = (at.data, at.pipeline), report.layers() if report.num_micro_batches else {}
            if times and total(times) > total(found.get(place, {})):
                found[place] = times
        return found

    def estimate(self) -> Estimate | None:
        """None as long as a rank was seen for less than RECENT steps with its layers, or twice as many in all."""
        ranks = self._seen
        if len(self._steps) < RECENT or not all(rank.is_known for rank in ranks.values()):
            return None
        separated = separate({place: rank.now() for place, rank in ranks.items()},
                             {place: rank.former for place, rank in ranks.items()}, self._flops)
        if separated.costs.keys() != set(range(len(self._flops))):
            return None
        slowdowns = tuple(tuple(separated.slowdowns.get((replica, rank), 1.0) for rank in range(self._mesh.pipeline))
                          for replica in range(self._mesh.data))
        return Estimate(costs=tuple(separated.costs[layer] for layer in range(len(self._flops))), slowdowns=slowdowns,
                        step_s=median(self._steps), noise=self._noise(list(ranks.values())))

    def _noise(self, ranks: Sequence["RankHistory"]) -> float:
        """A median of n values has sqrt(pi / 2n) of their standard deviation. Ranks are noisy alike, so none counts as
        quieter than the median one: a few steps may agree by chance."""
        usual = median(rank.spread for rank in ranks)
        return max(1.2533 * max(rank.spread, usual) / sqrt(rank.num_steps) for rank in ranks)


class RankHistory:
    """Last steps of one pipeline rank."""

    def __init__(self) -> None:
        self.samples: deque[dict[int, LayerCost]] = deque(maxlen=WINDOW)
        """By step."""
        self.former: dict[int, LayerCost] = {}
        """Layers that have left, as long as the rank is as fast as it was."""
        self._totals: deque[float] = deque(maxlen=WINDOW)
        """By step with the present layers."""
        self._deviations: deque[float] = deque(maxlen=WINDOW)
        """By step, from what was expected; 0.05 is 5 % off."""

    @property
    def num_steps(self) -> int:
        """With the present layers."""
        return len(self._totals)

    @property
    def is_known(self) -> bool:
        """Whether there are enough steps to know time and spread."""
        return min(self.num_steps, len(self._deviations)) >= RECENT

    @property
    def spread(self) -> float:
        """Standard deviation of a step's time as a share of it, outliers aside."""
        return 1.4826 * median(self._deviations) if self._deviations else 0.0

    def now(self) -> dict[int, LayerCost]:
        """Estimate of the present layers."""
        return {layer: self._layer(layer) for layer in self.samples[-1]}

    def add(self, times: dict[int, LayerCost]) -> None:
        """One step more; of what is no longer so the rank keeps nothing."""
        if self.samples and times.keys() != self.samples[-1].keys():
            self._leave(times)
        if self.num_steps >= RECENT:
            self._deviations.append(abs(total(times) / median(self._totals) - 1))
        self.samples.append(times)
        self._totals.append(total(times))
        if self._has_changed():
            self._forget()

    def _leave(self, times: Mapping[int, LayerCost]) -> None:
        self.former = {layer: cost for layer, cost in {**self.former, **self.now()}.items() if layer not in times}
        self._totals.clear()

    def _has_changed(self) -> bool:
        totals = list(self._totals)
        before, recent = totals[:-RECENT], totals[-RECENT:]
        if len(before) < RECENT:
            return False
        limit, usual = max(LEAST_CHANGE, SPREADS * self.spread), median(before)
        off = [time / usual - 1 for time in recent]
        return min(off) > limit or max(off) < -limit

    def _forget(self) -> None:
        """Everything before the last RECENT steps, and how far those were off: that was no noise."""
        self.former.clear()
        for _ in range(RECENT):
            self._deviations.pop()
        for kept in (self.samples, self._totals):
            while len(kept) > RECENT:
                kept.popleft()

    def _layer(self, layer: int) -> LayerCost:
        return median_cost([sample[layer] for sample in self.samples if layer in sample])


def total(times: Mapping[int, LayerCost]) -> float:
    """Forward and backward of all layers."""
    return sum(cost.total for cost in times.values())
