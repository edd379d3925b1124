"""A job's pipeline under one schedule: stages, programs, simulated step, memory. And what schedule `auto` chooses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.cost import NO_COST, LayerCost, layer_costs, op_cost, stage_cost
from raytrain3d.plan.memory import missing_memory, rank_memory
from raytrain3d.plan.params import ModelSpec
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.peers import KEPT
from raytrain3d.plan.program import Programs, programs_for
from raytrain3d.plan.recompute import repeats
from raytrain3d.plan.simulate import Timeline, simulate
from raytrain3d.plan.splits import partition
from raytrain3d.plan.state_memory import Memory, local_parameters, moved_bytes
from raytrain3d.plan.table import schedule_name, size
from raytrain3d.plan.workload import Workload

Name = Literal["1f1b", "gpipe", "zb_h1", "interleaved", "breadth_first", "zb_v"]
SCHEDULE_CHUNKS: tuple[tuple[Name, tuple[int, ...]], ...] = (
    ("1f1b", (1,)), ("gpipe", (1,)), ("zb_h1", (1,)), ("interleaved", (2, 3, 4)), ("breadth_first", (2,)), ("zb_v", (2,)))
"""What `auto` tries, simple ones first: schedule and its numbers of chunks."""
ANY_CHUNKS = ("interleaved", "breadth_first")
Costs = tuple[LayerCost, ...]
TIE = 1e-3
"""Step times closer than this are equal: what is not simulated (messages, cost of an op's start) is more."""


MORE_SHARDING = {("none", "op"): "train.sharding optimizer", ("optimizer", "op"): "train.sharding gradients",
                 ("gradients", "op"): "train.sharding full", ("full", "step"): "train.keep_gathered op"}


class TooLarge(PlanError):
    """A job needs more memory than placement.memory_per_rank_gib."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEstimate:
    """What one pipeline rank holds and computes, over its stages."""

    stages: tuple[int, ...]
    parameters: int
    """Elements on one rank, vocabulary padding and the tied weight included."""
    memory: Memory
    """Bytes on one rank of the replica with the most micro-batches."""
    peak_in_flight: int
    """Most activations held at a time, of one micro-batch and one stage each."""
    forward_flops: float
    """Of one micro-batch on one rank."""
    backward_flops: float
    """Of one micro-batch on one rank, recompute included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A schedule that `auto` tried."""

    schedule: str
    chunks: int
    step_time: float
    """Simulated, over that of the chosen schedule."""
    memory: int
    """Bytes on the rank that needs most."""
    fits: bool
    """Within placement.memory_per_rank_gib."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One replica's pipeline under one schedule."""

    schedule: str
    chunks: int
    workload: Workload
    """What the split was made for."""
    stages: Stages
    costs: tuple[LayerCost, ...]
    """FLOPs of one micro-batch by stage, on one rank."""
    programs: Programs
    timeline: Timeline
    estimates: tuple[RankEstimate, ...]
    """By pipeline rank."""

    @property
    def fullest(self) -> int:
        """Pipeline rank that needs the most memory."""
        return max(range(len(self.estimates)), key=lambda rank: self.estimates[rank].memory.total)

    @property
    def memory(self) -> int:
        """Bytes on the rank that needs most."""
        return self.estimates[self.fullest].memory.total


def lay_out(config: JobConfig, spec: ModelSpec, num_micro_batches: int, measured: Costs | None = None) -> Layout:
    """The pipeline of a replica with `num_micro_batches`. The schedule must not be `auto`. measured: costs by layer, instead
    of FLOPs to split by."""
    schedule, chunks = config.pipeline.schedule, config.pipeline.num_chunks
    programs = programs_for(schedule, config.mesh.pipeline, num_micro_batches, chunks)
    workload = Workload(schedule=schedule, num_ranks=config.mesh.pipeline, chunks=chunks, shares=(num_micro_batches,),
                        costs=measured or layer_costs(config, spec), slowdowns=((1.0,) * config.mesh.pipeline,),
                        excess=missing_memory(config, spec, programs))
    if measured is None:  # measured backwards contain what was computed again
        workload = replace(workload, repeated=repeats(config, spec))
    stages = partition(config, spec, workload)
    costs = rank_costs(config, spec, stages)
    return Layout(schedule=schedule, chunks=chunks, workload=workload, stages=stages, costs=costs, programs=programs,
                  timeline=(timeline := simulate(programs, lambda op: op_cost(op, costs))),
                  estimates=_estimates(config, spec, stages, costs, programs, timeline))


def rank_costs(config: JobConfig, spec: ModelSpec, stages: Stages) -> tuple[LayerCost, ...]:
    """FLOPs of one micro-batch by stage, on one rank."""
    costs, factor = layer_costs(config, spec), config.train.micro_batch / config.mesh.tensor
    return tuple(stage_cost(costs, range(*layers), partial(repeats(config, spec), stage)) * factor
                 for stage, layers in enumerate(stages))


def _estimates(config: JobConfig, spec: ModelSpec, stages: Stages, costs: tuple[LayerCost, ...], programs: Programs,
               timeline: Timeline) -> tuple[RankEstimate, ...]:
    placement = programs.schedule.placement
    states = [sum(moved_bytes(state, config) for state in spec.states_of(
        layer for stage in range(len(stages)) if placement[stage] == rank for layer in range(*stages[stage])))
        for rank in range(config.mesh.pipeline)]
    # Whose copies a rank keeps depends on the nodes, so it is taken for the one with most.
    snapshots = [0 if config.recovery.snapshot_interval is None else KEPT * (own + max(states)) for own in states]

    def estimate(rank: int) -> RankEstimate:
        layers = {stage: range(*stages[stage]) for stage in range(len(stages)) if placement[stage] == rank}
        cost = sum((costs[stage] for stage in layers), NO_COST)
        held = spec.states_of(layer for stage in layers.values() for layer in stage)
        return RankEstimate(
            stages=tuple(layers), parameters=sum(local_parameters(state, config.mesh.tensor) for state in held),
            memory=replace(rank_memory(config, spec, layers, programs.ops[rank]), snapshots=snapshots[rank]),
            peak_in_flight=timeline.peak_in_flight[rank], forward_flops=cost.forward, backward_flops=cost.backward)

    return tuple(map(estimate, range(config.mesh.pipeline)))


def choose(config: JobConfig, spec: ModelSpec, num_micro_batches: int,
           measured: Costs | None = None) -> tuple[Layout, tuple[Candidate, ...]]:
    """The layout of a replica, and what `auto` chose it from, fastest first (nothing if the schedule was given).

    TooLarge if none keeps to placement.memory_per_rank_gib.
    """
    layouts = [lay_out(job, spec, num_micro_batches, measured) for job in _resolved(config)]
    limit = config.placement.memory_per_rank_gib
    fitting = [layout for layout in layouts if limit is None or layout.memory <= limit * 2**30]
    if not fitting:
        raise TooLarge(_too_large(config, layouts))
    least = min(layout.timeline.makespan for layout in fitting)
    equal = [layout for layout in fitting if layout.timeline.makespan <= least * (1 + TIE)]
    chosen = min(equal, key=lambda layout: (layout.chunks, layout.memory))
    candidates = [Candidate(schedule=each.schedule, chunks=each.chunks, memory=each.memory, fits=each in fitting,
                            step_time=each.timeline.makespan / chosen.timeline.makespan) for each in layouts]
    ordered = sorted(candidates, key=lambda each: each.step_time)
    return chosen, tuple(ordered) if config.pipeline.schedule == "auto" else ()


def _resolved(config: JobConfig) -> Iterator[JobConfig]:
    """The job under every schedule that it may have."""
    pipeline, ranks, num_layers = config.pipeline, config.mesh.pipeline, config.model.blocks + 2
    if pipeline.schedule != "auto":
        yield config
        return
    given = pipeline.layers or pipeline.recompute  # one for each stage
    wanted = pipeline.chunks or (len(given) // ranks if given is not None else None)
    for schedule, tried in SCHEDULE_CHUNKS:
        numbers = (wanted,) if wanted is not None and wanted > 1 and schedule in ANY_CHUNKS else tried
        for chunks in numbers:
            if ranks * chunks <= num_layers and wanted in (None, chunks):
                yield replace(config, pipeline=replace(pipeline, schedule=schedule, chunks=chunks))


def _too_large(config: JobConfig, layouts: Sequence[Layout]) -> str:
    closest = min(layouts, key=lambda layout: layout.memory)
    limit = config.placement.memory_per_rank_gib
    assert limit is not None
    which = "no schedule fits, closest is" if config.pipeline.schedule == "auto" else "too little for pipeline.schedule"
    return (f"placement.memory_per_rank_gib is {limit:g}: {which} {schedule_name(closest.schedule, closest.chunks)} with "
            f"{size(closest.memory)} on pipeline rank {closest.fullest}, {size(closest.memory - round(limit * 2**30))} too "
            f"much; less is needed with {', '.join(_savers(config))}")


def _savers(config: JobConfig) -> Iterator[str]:
    """Keys that lower the memory of a rank and are not yet at their end."""
    train, mesh, pipeline = config.train, config.mesh, config.pipeline
    if pipeline.schedule != "auto":
        yield "pipeline.schedule auto"
    if pipeline.recompute is not None:
        if set(pipeline.recompute) != {"full"}:
            yield "pipeline.recompute full on more stages"
    elif train.recompute != "full":
        yield "train.recompute full"
    if train.recompute_every > 1:
        yield "train.recompute_every 1"
    if mesh.tensor > 1 and not train.sequence_parallel:
        yield "train.sequence_parallel true"
    if mesh.replicas > 1 and (saver := MORE_SHARDING.get((train.sharding, train.keep_gathered))):
        yield saver
    if train.micro_batch > 1:
        yield f"train.micro_batch below {train.micro_batch}"
    if mesh.pipeline < config.model.blocks + 2:
        yield f"mesh.pipeline above {mesh.pipeline}"
    yield f"mesh.tensor above {mesh.tensor}"
