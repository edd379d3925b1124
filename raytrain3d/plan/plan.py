"""Every layout decision of a job as one frozen value, made before any rank exists.

Ranks ask the plan, never each other: which layers a stage holds, which micro-batches are a replica's, in which order a
rank computes. `make_plan` decides, `Plan.table` shows, JSON keeps.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.cost import NO_COST, LayerCost, layer_costs, op_cost, stage_cost
from raytrain3d.plan.memory import Memory, local_parameters, rank_memory
from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.params import ModelSpec, model_spec
from raytrain3d.plan.partition import Stages, partition
from raytrain3d.plan.placement import Bundle, tensor_group_bundle
from raytrain3d.plan.program import Programs, programs_for
from raytrain3d.plan.simulate import idle_of_wall, peak_in_flight, simulate
from raytrain3d.plan.table import plan_table


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
class Plan:
    """Layout of a job."""

    mesh: Mesh
    schedule: str
    """Key of `schedule.SCHEDULES`."""
    chunks: int
    """Stages of each pipeline rank."""
    placement: tuple[int, ...]
    """Stage -> pipeline rank that holds it."""
    stages: Stages
    """Stage -> (first layer, one past the last)."""
    shares: tuple[int, ...]
    """Micro-batches of each replica in a step; may be 0."""
    device: str
    """`cpu` or `gpu`."""
    bundle: Bundle
    """What each tensor group asks of the cluster; a gang has one for every stage."""
    micro_batch: int
    """Samples that go through the pipeline together."""
    sequence: int
    """Tokens of a sample."""
    dtype: str
    sharding: str
    recompute: str
    num_parameters: int
    """Of the whole model, a tied weight once, padding left out."""
    estimates: tuple[RankEstimate, ...]
    """By pipeline rank."""
    idle_share: float
    """Predicted idle share of wall time over all ranks, messages taken as free."""
    idle_of_ideal: float
    """The same idle time over computing time."""

    @property
    def num_layers(self) -> int:
        return self.stages[-1][1]

    @property
    def tokens_per_step(self) -> int:
        return sum(self.shares) * self.micro_batch * self.sequence

    def layers_of(self, stage: int) -> range:
        return range(*self.stages[stage])

    def rank_of(self, stage: int) -> int:
        """Pipeline rank that holds `stage`."""
        return self.placement[stage]

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Stages of a pipeline rank, in pipeline order."""
        return tuple(stage for stage, rank in enumerate(self.placement) if rank == pipeline_rank)

    def layers_of_rank(self, pipeline_rank: int) -> tuple[int, ...]:
        """Layers of all stages of a pipeline rank, ascending."""
        return tuple(layer for stage in self.stages_of(pipeline_rank) for layer in self.layers_of(stage))

    def stage_of(self, layer: int) -> int:
        """The stage that holds `layer`."""
        return next(stage for stage, (first, end) in enumerate(self.stages) if first <= layer < end)

    def first_micro_batch(self, replica: int) -> int:
        """Index in the step's global batch of the replica's first micro-batch."""
        return sum(self.shares[:replica])

    def table(self) -> str:
        """The plan as text for people."""
        return plan_table(self)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The plan that `to_json` wrote. PlanError if the text is anything else."""
        try:
            raw: dict[str, Any] = json.loads(text)
            estimates = tuple(RankEstimate(**{**e, "stages": tuple(e["stages"]), "memory": Memory(**e["memory"])})
                              for e in raw["estimates"])
            stages = tuple((int(first), int(end)) for first, end in raw["stages"])
            return Plan(**{**raw, "mesh": Mesh(**raw["mesh"]), "bundle": Bundle(**raw["bundle"]), "stages": stages,
                           "placement": tuple(raw["placement"]), "shares": tuple(raw["shares"]),
                           "estimates": estimates})
        except (ValueError, TypeError, KeyError) as error:
            raise PlanError(f"not a plan: {type(error).__name__}: {error}") from error


def make_plan(config: JobConfig, *, device: str = "cpu") -> Plan:
    """Decide the layout of a job whose ranks run on `device` (`cpu` or `gpu`)."""
    if device not in ("cpu", "gpu"):
        raise PlanError(f"device is {device!r}: a plan is made for 'cpu' or 'gpu'")
    train, schedule, chunks = config.train, config.pipeline.schedule, config.pipeline.num_chunks
    mesh = Mesh(data=config.mesh.data, pipeline=config.mesh.pipeline, tensor=config.mesh.tensor)
    spec = model_spec(config.model, train, mesh.tensor)
    stages = partition(config, spec)
    shares = split_micro_batches(train.num_micro_batches, mesh.data)
    costs = _rank_costs(config, spec, stages)
    programs = {share: programs_for(schedule, mesh.pipeline, share, chunks) for share in set(shares)}
    timelines = {share: simulate(programs[share], lambda op: op_cost(op, costs)) for share in programs}
    busy = sum(sum(timelines[share].busy) for share in shares)
    idle = idle_of_wall(busy, mesh.data * mesh.pipeline * timelines[max(shares)].makespan)
    return Plan(
        mesh=mesh, schedule=schedule, chunks=chunks, placement=programs[max(shares)].schedule.placement, stages=stages,
        shares=shares, device=device,
        bundle=tensor_group_bundle(mesh, device=device, cpus_per_rank=config.placement.cpus_per_rank),
        micro_batch=train.micro_batch, sequence=train.sequence, dtype=train.dtype, sharding=train.sharding,
        recompute=train.recompute, num_parameters=spec.num_parameters,
        estimates=_estimates(config, spec, stages, costs, programs[max(shares)]),
        idle_share=idle, idle_of_ideal=idle / (1 - idle),
    )


def split_micro_batches(num_micro_batches: int, data: int) -> tuple[int, ...]:
    """Equal shares; the first replicas take the remainder."""
    quotient, remainder = divmod(num_micro_batches, data)
    return tuple(quotient + (replica < remainder) for replica in range(data))


def _rank_costs(config: JobConfig, spec: ModelSpec, stages: Stages) -> tuple[LayerCost, ...]:
    """FLOPs of one micro-batch by stage, on one rank."""
    layers, factor = layer_costs(config, spec), config.train.micro_batch / config.mesh.tensor
    return tuple(stage_cost(layers, range(*stage)) * factor for stage in stages)


def _estimates(config: JobConfig, spec: ModelSpec, stages: Stages, costs: tuple[LayerCost, ...],
               programs: Programs) -> tuple[RankEstimate, ...]:
    placement = programs.schedule.placement

    def estimate(rank: int) -> RankEstimate:
        layers = {stage: range(*stages[stage]) for stage in range(len(stages)) if placement[stage] == rank}
        cost = sum((costs[stage] for stage in layers), NO_COST)
        held = spec.states_of(layer for stage in layers.values() for layer in stage)
        return RankEstimate(
            stages=tuple(layers), parameters=sum(local_parameters(state, config.mesh.tensor) for state in held),
            memory=rank_memory(config, spec, layers, programs.ops[rank]), peak_in_flight=peak_in_flight(programs.ops[rank]),
            forward_flops=cost.forward, backward_flops=cost.backward)

    return tuple(map(estimate, range(config.mesh.pipeline)))
