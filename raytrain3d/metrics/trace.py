"""Recorded timelines of a run: read, merged into one trace, and compared with the simulation.

The simulation gets the mean seconds that were measured for each kind of op on each stage. What is then left between both
idle shares is not in the schedule: uneven op times, messages, waiting in the runner. An idle share is of the wall time of
the pipeline part, which is that of the replica's slowest rank.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from raytrain3d.errors import ConfigError, PlanError
from raytrain3d.metrics.perfetto import Track, trace_events
from raytrain3d.metrics.trace_file import TRACES
from raytrain3d.plan.grid import parse_op
from raytrain3d.plan.mesh import Coordinate
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.program import programs_for
from raytrain3d.plan.schedule import Kind, Op
from raytrain3d.plan.simulate import Timeline, idle_of_wall, simulate
from raytrain3d.plan.table import aligned

COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """One rank's line of one step."""

    step: int
    rank: int
    start: float
    """In seconds since 1970."""
    seconds: float
    """Length of the pipeline part."""
    spans: tuple[tuple[Op, float, float], ...]
    """(op, start, end), in seconds from `start`."""

    @property
    def compute(self) -> float:
        """Seconds in compute ops."""
        return sum(end - start for op, start, end in self.spans if op.kind in COMPUTE)


def read_plan(run_directory: Path) -> Plan:
    """The plan of the run. ConfigError if there is none."""
    path = run_directory / "plan.json"
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{str(run_directory)!r} is no run directory: plan.json cannot be read ({error.strerror}); name "
                          "one such as runs/quickstart") from None
    except PlanError as error:
        raise ConfigError(f"{str(path)!r} is {error}") from None


def read_traces(run_directory: Path, plan: Plan) -> tuple[RecordedStep, ...]:
    """What the ranks recorded, a step that was done again only as it was done last. ConfigError if nothing is there, or a
    line is none of this plan's."""
    paths = sorted((run_directory / TRACES).glob("rank-*.jsonl"))
    if not paths:
        raise ConfigError(f"{str(run_directory / TRACES)!r} has no traces: run.trace_interval must be set when the run "
                          "trains, such as run.trace_interval=10")
    steps = {(line.rank, line.step): line for path in paths for line in _read(path, plan)}
    if not steps:
        raise ConfigError(f"{str(run_directory / TRACES)!r} has no recorded step yet: a rank writes one every "
                          "run.trace_interval steps")
    return tuple(steps.values())


def _read(path: Path, plan: Plan) -> Iterable[RecordedStep]:
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line end was cut off with the run
        try:
            raw = json.loads(line)
            spans = tuple((parse_op(op), float(start), float(end)) for op, start, end in raw["spans"])
            recorded = RecordedStep(step=int(raw["step"]), rank=int(raw["rank"]), start=float(raw["start"]),
                                    seconds=float(raw["seconds"]), spans=spans)
        except (ValueError, TypeError, KeyError, PlanError) as error:
            raise ConfigError(f"{path} line {number} is no recorded step: {type(error).__name__}: {error}") from None
        if (wrong := _other_layout(recorded, plan)) is not None:
            raise ConfigError(f"{path} line {number} has {wrong}: remove traces of an earlier layout of the run")
        yield recorded


def _other_layout(line: RecordedStep, plan: Plan) -> str | None:
    """What of the line cannot be of this plan."""
    if line.rank >= plan.mesh.size:
        return f"rank {line.rank}, plan.json has {plan.mesh.size} ranks"
    own = plan.stages_of(plan.mesh.coordinate(line.rank).pipeline)
    foreign = next((op for op, _, _ in line.spans if op.stage not in own), None)
    if foreign is None:
        return None
    return f"{foreign}, rank {line.rank} has stage {', '.join(map(str, own))} in plan.json"


def merged_trace(plan: Plan, steps: Sequence[RecordedStep]) -> str:
    """All ranks and steps as one trace file; times from the first step's start."""
    origin = min(line.start for line in steps)
    spans: dict[int, list[tuple[str, float, float]]] = defaultdict(list)
    for line in sorted(steps, key=lambda line: line.step):
        begin = line.start - origin
        spans[line.rank] += [(str(op), begin + start, begin + end) for op, start, end in line.spans]
    return trace_events(Track(replica=plan.mesh.coordinate(rank).data, rank=rank, name=track_name(plan, rank),
                              spans=tuple(spans[rank])) for rank in sorted(spans))


def simulated_trace(plan: Plan, timelines: Sequence[Timeline]) -> str:
    """Simulated steps as a trace file, a thread for each pipeline rank. timelines: by replica."""
    places = [Coordinate(data=data, pipeline=pipeline, tensor=0) for data in range(plan.mesh.data)
              for pipeline in range(plan.mesh.pipeline)]
    return trace_events(
        Track(replica=at.data, rank=plan.mesh.rank(at), name=f"pipeline rank {at.pipeline}",
              spans=tuple((str(span.op), span.start, span.end) for span in timelines[at.data].spans[at.pipeline]))
        for at in places)


def track_name(plan: Plan, rank: int) -> str:
    """`rank 5: pipeline 1, tensor 0`."""
    at = plan.mesh.coordinate(rank)
    return f"rank {rank}: pipeline {at.pipeline}, tensor {at.tensor}"


def measured_walls(plan: Plan, steps: Sequence[RecordedStep]) -> dict[tuple[int, int], float]:
    """(replica, step) -> seconds of the pipeline part on the slowest rank."""
    walls: dict[tuple[int, int], float] = defaultdict(float)
    for line in steps:
        key = plan.mesh.coordinate(line.rank).data, line.step
        walls[key] = max(walls[key], line.seconds)
    return walls


def measured_idle(plan: Plan, steps: Sequence[RecordedStep]) -> dict[int, float]:
    """By rank: share of the pipeline's wall time without compute, over all its recorded steps."""
    walls = measured_walls(plan, steps)
    busy, wall = defaultdict[int, float](float), defaultdict[int, float](float)
    for line in steps:
        busy[line.rank] += line.compute
        wall[line.rank] += walls[plan.mesh.coordinate(line.rank).data, line.step]
    return {rank: idle_of_wall(busy[rank], wall[rank]) for rank in sorted(busy)}


def simulated(plan: Plan, steps: Sequence[RecordedStep]) -> dict[int, Timeline]:
    """By micro-batches of a replica: the step that the measured op times make. ConfigError if a stage was not recorded."""
    lengths: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for op, start, end in (span for line in steps for span in line.spans):
        lengths[op.kind, op.stage].append(end - start)
    seconds = {what: fmean(values) for what, values in lengths.items()}
    missing = sorted(set(range(len(plan.stages))) - {stage for kind, stage in seconds if kind is Kind.FORWARD})
    if missing:
        raise ConfigError(f"no trace has an op of stage {', '.join(map(str, missing))}: copy the files in {TRACES}/ of "
                          "every node into one run directory")
    return {share: simulate(programs_for(plan.schedule, plan.mesh.pipeline, share, plan.chunks),
                            lambda op: seconds[op.kind, op.stage]) for share in set(plan.shares)}


def idle_table(plan: Plan, steps: Sequence[RecordedStep]) -> str:
    """Measured beside simulated idle share of every rank."""
    measured, timelines = measured_idle(plan, steps), simulated(plan, steps)
    rows, expected = [["rank", "place", "idle measured", "idle simulated"]], []
    for rank, idle in measured.items():
        at = plan.mesh.coordinate(rank)
        expected.append(timelines[plan.shares[at.data]].idle_of_wall[at.pipeline])
        place = f"replica {at.data}, {track_name(plan, rank).partition(': ')[2]}"
        rows.append([str(rank), place, f"{idle:.1%}", f"{expected[-1]:.1%}"])
    rows.append(["all", "mean", f"{fmean(measured.values()):.1%}", f"{fmean(expected):.1%}"])
    recorded = sorted({line.step for line in steps})
    wall = fmean(measured_walls(plan, steps).values())
    makespan = fmean(timelines[share].makespan for share in plan.shares)
    note = (f"Pipeline part of a step: {wall:.4g} s measured, {makespan:.4g} s simulated.\n"
            "Idle is the share of the pipeline's wall time without compute. Simulated with the mean measured seconds of "
            "each kind of op\non each stage, messages free. Recorded steps: " + ", ".join(map(str, recorded)))
    return "\n".join([*aligned(rows), "", note])
