"""What a job's step is made of, and how long it takes under a split: costs of layers, speeds of ranks, schedule, shares."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

from raytrain3d.errors import PlanError
from raytrain3d.plan.cost import LayerCost, stage_cost
from raytrain3d.plan.makespan import Path, compiled, stage_seconds, straight_paths
from raytrain3d.plan.partition import Stages

NUM_PATHS = 16
"""Critical paths of earlier splits that are tried on a new one, beside one for each rank, before it is simulated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A step, but for the split of its layers."""

    schedule: str
    """Key of `schedule.SCHEDULES`."""
    num_ranks: int
    """Pipeline ranks of a replica."""
    chunks: int = 1
    """Stages of each pipeline rank."""
    shares: tuple[int, ...]
    """Micro-batches by replica."""
    costs: tuple[LayerCost, ...]
    """By layer: seconds of one micro-batch on a rank of slowdown 1, without recompute."""
    repeated: Callable[[int, int], float] = lambda stage, layer: 0.0
    """(stage, layer) -> share of the layer's forward that is computed again there."""
    slowdowns: tuple[tuple[float, ...], ...]
    """By replica and pipeline rank: 1 is normal, 1.5 half again as slow."""
    hop_s: float = 0.0
    """From the end of an op to the arrival of its message."""
    excess: Callable[[Stages], float] | None = None
    """Bytes that ranks lack for a split, over all ranks; 0: it fits. Absent: every split fits."""

    def __post_init__(self) -> None:
        rows = {len(row) for row in self.slowdowns}
        if len(self.slowdowns) != len(self.shares) or rows != {self.num_ranks}:
            raise PlanError(f"slowdowns of {len(self.slowdowns)} replicas with {sorted(rows)} pipeline ranks: there are "
                            f"{len(self.shares)} replicas with {self.num_ranks}")
        if self.num_layers < self.num_stages:
            raise PlanError(f"{self.num_layers} layers cannot be split over {self.num_stages} stages: every stage keeps at "
                            f"least one")

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.chunks

    @property
    def num_layers(self) -> int:
        return len(self.costs)

    @property
    def placement(self) -> tuple[int, ...]:
        """Stage -> pipeline rank."""
        return compiled(self.schedule, self.num_ranks, 0, self.chunks).placement


    def stage_cost(self, stage: int, layers: tuple[int, int]) -> LayerCost:
        """Seconds of one micro-batch if `stage` has the layers from the first to before the second."""
        return stage_cost(self.costs, range(*layers), partial(self.repeated, stage))


def step_time(workload: Workload, stages: Stages) -> float:
    """Seconds of a step: replicas wait for the slowest of them. Optimizer and reductions left out."""
    return Simulator(workload).time(stages)


class Simulator:
    """Times many splits of one workload; what it learns from one rules out others."""

    def __init__(self, workload: Workload) -> None:
        replicas = dict.fromkeys(zip(workload.shares, workload.slowdowns, strict=True))
        self._replicas = [Replica(workload, share, slowdowns) for share, slowdowns in replicas]

    def time(self, stages: Stages, limit: float = inf) -> float:
        """Seconds of a step if that is below `limit`; else a number from `limit` up, mostly without a simulation."""
        longest = 0.0
        for i, replica in enumerate(self._replicas):
            longest = max(longest, replica.time(stages, limit))
            if longest >= limit:
                self._replicas.insert(0, self._replicas.pop(i))  # the slowest rules out neighbours, too
                break
        return longest


class Replica:
    """The pipeline of one replica with `share` micro-batches. slowdowns: by pipeline rank."""

    def __init__(self, workload: Workload, share: int, slowdowns: tuple[float, ...]) -> None:
        pipeline = (workload.schedule, workload.num_ranks, share, workload.chunks)
        self._workload = workload
        self._slowdowns = slowdowns
        self._program = compiled(*pipeline)
        self._paths = list(straight_paths(*pipeline))
        self._known: dict[tuple[int, tuple[int, int]], tuple[float, ...]] = {}

    def time(self, stages: Stages, limit: float = inf) -> float:
        """As `Simulator.time`."""
        seconds, hop_s = self._seconds(stages), self._workload.hop_s
        if limit < inf and (path := self._ruling_out(seconds, limit)) is not None:
            self._paths.insert(0, path)  # neighbours of this split follow
            return limit
        ends = self._program.ends(seconds, hop_s)
        if limit < inf:
            self._paths.insert(0, self._program.critical_path(ends, hop_s))
            del self._paths[NUM_PATHS + len(self._slowdowns):]
        return max(ends)

    def _ruling_out(self, seconds: list[float], limit: float) -> Path | None:
        """A path that alone takes `limit`, taken out of the list."""
        for i, path in enumerate(self._paths):
            if path.length(seconds, self._workload.hop_s) >= limit:
                return self._paths.pop(i)
        return None

    def _seconds(self, stages: Stages) -> list[float]:
        seconds: list[float] = []
        for key in enumerate(stages):
            if key not in self._known:
                stage, layers = key
                slowdown = self._slowdowns[self._program.placement[stage]]
                self._known[key] = stage_seconds(self._workload.stage_cost(stage, layers), slowdown)
            seconds += self._known[key]
        return [*seconds, 0.0]
