"""Every layout decision of a job as one frozen value, made before any rank exists.

Ranks ask the plan, never each other: which layers a stage holds, which micro-batches are a replica's, in which order a
rank computes. `make_plan` decides, `Plan.table` shows, JSON keeps.
"""

import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.layout import Candidate, Costs, Layout, RankEstimate, TooLarge, choose
from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.params import ModelSpec, model_spec
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.placement import Bundle, tensor_group_bundle
from raytrain3d.plan.recompute import describe
from raytrain3d.plan.remedy import fit_of, remedies, remedy_text
from raytrain3d.plan.sharding import with_any_sharding
from raytrain3d.plan.simulate import idle_of_wall
from raytrain3d.plan.splits import NamedSplit, compared
from raytrain3d.plan.state_memory import Memory
from raytrain3d.plan.table import plan_table


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
    split_by: str
    """What decided about the stages: `pipeline.layers`, a name of pipeline.partition, or an earlier run."""
    splits: tuple[NamedSplit, ...]
    """Splits to compare with, the best one last."""
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
    keep_gathered: str
    shard_group: int
    """Replicas that share one copy of what is sharded."""
    recompute: str
    """For people."""
    sequence_parallel: bool
    num_parameters: int
    """Of the whole model, a tied weight once, padding left out."""
    vacant: tuple[int, ...] = ()
    """Replicas without ranks at present (`mesh.data` is a range); their share is 0."""
    estimates: tuple[RankEstimate, ...]
    """By pipeline rank."""
    candidates: tuple[Candidate, ...]
    """What pipeline.schedule `auto` chose from, fastest first; empty if the schedule was given."""
    idle_share: float
    """Predicted idle share of wall time over all ranks, messages taken as free."""
    idle_of_ideal: float
    """The same idle time over computing time."""

    def decided(self, config: JobConfig) -> JobConfig:
        """The job that this is the plan of, with what was left to it."""
        sharding: Any = {"sharding": self.sharding, "keep_gathered": self.keep_gathered}
        return replace(config, train=replace(config.train, **sharding))

    @property
    def replicas(self) -> tuple[int, ...]:
        """Those that have ranks."""
        return tuple(replica for replica in range(self.mesh.data) if replica not in self.vacant)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the replicas that have any, ascending."""
        return tuple(rank for replica in self.replicas for rank in self.mesh.gang(replica))

    def with_replicas(self, replicas: Collection[int]) -> "Plan":
        """The same job on these replicas alone: nothing changes but their shares."""
        vacant = tuple(sorted(set(range(self.mesh.data)) - set(replicas)))
        if vacant == self.vacant:
            return self
        dealt = iter(split_micro_batches(sum(self.shares), len(replicas)))
        shares = tuple(0 if replica in vacant else next(dealt) for replica in range(self.mesh.data))
        return replace(self, vacant=vacant, shares=shares)

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
            splits = tuple(NamedSplit(**{**split, "layers": tuple(split["layers"])}) for split in raw["splits"])
            return Plan(**{**raw, "mesh": Mesh(**raw["mesh"]), "bundle": Bundle(**raw["bundle"]), "stages": stages,
                           "splits": splits, "placement": tuple(raw["placement"]), "shares": tuple(raw["shares"]),
                           "vacant": tuple(raw["vacant"]),
                           "estimates": estimates, "candidates": tuple(Candidate(**c) for c in raw["candidates"])})
        except (ValueError, TypeError, KeyError) as error:
            raise PlanError(f"not a plan: {type(error).__name__}: {error}") from error


def make_plan(config: JobConfig, *, device: str = "cpu", measured: Costs | None = None) -> Plan:
    """Decide the layout of a job whose ranks run on `device` (`cpu` or `gpu`). measured: seconds by layer, for
    pipeline.partition `measured`; absent: none are known yet."""
    if device not in ("cpu", "gpu"):
        raise PlanError(f"device is {device!r}: a plan is made for 'cpu' or 'gpu'")
    mesh = Mesh(data=config.mesh.replicas, pipeline=config.mesh.pipeline, tensor=config.mesh.tensor)
    spec = model_spec(config.model, config.train, mesh.tensor)
    shares = split_micro_batches(config.train.num_micro_batches, mesh.data)
    config, chosen, candidates = _choose(config, spec, max(shares), measured)
    train = config.train
    idle = _idle_share(chosen, shares)
    return Plan(
        mesh=mesh, schedule=chosen.schedule, chunks=chosen.chunks, placement=chosen.programs.schedule.placement,
        stages=chosen.stages, split_by=_split_by(config, measured), splits=compared(chosen.workload), shares=shares,
        device=device,
        bundle=tensor_group_bundle(mesh, device=device, cpus_per_rank=config.placement.cpus_per_rank),
        micro_batch=train.micro_batch, sequence=train.sequence, dtype=train.dtype, sharding=train.sharding,
        keep_gathered=train.keep_gathered, shard_group=config.shard_group, recompute=describe(config),
        sequence_parallel=train.sequence_parallel, num_parameters=spec.num_parameters, estimates=chosen.estimates,
        candidates=candidates, idle_share=idle, idle_of_ideal=idle / (1 - idle),
    )


def _choose(config: JobConfig, spec: ModelSpec, num_micro_batches: int,
            measured: Costs | None) -> tuple[JobConfig, Layout, tuple[Candidate, ...]]:
    """The job with its sharding, which under `auto` is the first one to fit, and what `layout.choose` gives for it."""
    *others, last = with_any_sharding(config)
    for job in others:
        with suppress(PlanError):
            return job, *choose(job, spec, num_micro_batches, measured)
    try:
        return last, *choose(last, spec, num_micro_batches, measured)
    except TooLarge as error:
        enough = remedy_text(remedies(last, fit_of(_step_of)))
        raise TooLarge(f"{error}; {enough}" if enough else str(error)) from None


def _step_of(config: JobConfig) -> float:
    """Simulated step of a job, in FLOPs, with a split that is found quickly: where that one fits the best one does. TooLarge
    if it does not."""
    pipeline = config.pipeline
    quick: Any = {"partition": "pipedream", "schedule": "1f1b" if pipeline.schedule == "auto" else pipeline.schedule}
    job = replace(config, pipeline=replace(pipeline, **quick))
    share = -(-config.train.num_micro_batches // config.mesh.replicas)
    layout, _ = choose(job, model_spec(job.model, job.train, job.mesh.tensor), share)
    return layout.timeline.makespan


def _split_by(config: JobConfig, measured: Costs | None) -> str:
    if config.pipeline.layers is not None:
        return "pipeline.layers"
    if config.pipeline.partition == "measured" and measured is None:
        return "flops: this run directory has no measured step yet"
    return config.pipeline.partition


def split_micro_batches(num_micro_batches: int, data: int) -> tuple[int, ...]:
    """Equal shares; the first replicas take the remainder."""
    quotient, remainder = divmod(num_micro_batches, data)
    return tuple(quotient + (replica < remainder) for replica in range(data))


def _idle_share(layout: Layout, shares: tuple[int, ...]) -> float:
    """Of the wall time of all ranks. Replicas wait for the one with the most micro-batches."""
    work_of_one = sum(cost.total for cost in layout.costs)
    return idle_of_wall(sum(shares) * work_of_one, len(shares) * len(layout.estimates) * layout.timeline.makespan)
