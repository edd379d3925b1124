"""Seconds of a training step on given nodes, by simulating its schedule with timed layers, then what follows the pipeline:
reduction of gradients, gathering of weights, update."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from raytrain3d.config import JobConfig, Recompute
from raytrain3d.plan.calibration import Calibration
from raytrain3d.plan.catalogue import Node
from raytrain3d.plan.collectives import TENSOR_PIPELINE_DATA, Group, Links, Order, group_along, stride_of
from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.data_time import DataTimer
from raytrain3d.plan.layer_time import LayerTime, LayerTimer, sequence_parallel
from raytrain3d.plan.makespan import COSTS, NEVER, compiled, stage_seconds
from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.params import ModelSpec
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.schedule import Kind
from raytrain3d.plan.state_memory import ELEMENT_BYTES, local_parameters

LONG = 2
"""A pipeline of p ranks is simulated with at most LONG x p micro-batches. More go on as its last p did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes, what they reach, and how ranks lie on them."""

    node: Node
    calibration: Calibration
    order: Order = TENSOR_PIPELINE_DATA
    scattered_messages: bool = False
    """Each rank of a tensor group sends its part of what all of them hold, and the receivers gather it (Megatron-LM). With
    sequence parallelism there is nothing to gather."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step, and of its parts on the rank that is busiest."""

    total: float
    pipeline: float
    """Simulated: from the first forward to the last backward."""
    busy: float
    """Of the pipeline part, on its busiest rank; the rest is idle."""
    tensor: float
    """Of that, tensor-parallel collectives that show."""
    launch: float
    """Of that, waiting for the host to launch."""
    messages: float
    """Of that, handing over to other stages."""
    data: float
    """Gradients and weights over the replicas, as far as it shows."""
    update: float
    """Optimizer, norms, bookkeeping."""

    @property
    def idle(self) -> float:
        """Of the busiest rank in the pipeline part."""
        return self.pipeline - self.busy


@dataclass(frozen=True, kw_only=True)
class StepTimer:
    """Times steps of one job on one cluster, for any split of its layers. The schedule must not be `auto`."""

    config: JobConfig
    spec: ModelSpec
    cluster: Cluster
    known: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """What timers of alike jobs share."""

    @cached_property
    def mesh(self) -> Mesh:
        mesh = self.config.mesh
        return Mesh(data=mesh.replicas, pipeline=mesh.pipeline, tensor=mesh.tensor)

    @cached_property
    def links(self) -> Links:
        return Links(node=self.cluster.node, calibration=self.cluster.calibration)

    @cached_property
    def tensor_group(self) -> Group:
        return self._along("tensor")

    @cached_property
    def data_timer(self) -> DataTimer:
        return DataTimer(config=self.config, links=self.links, replicas=self._along("data"), crowd=self._crowd,
                         calls=-(-len(self.spec.layers) // self.mesh.pipeline), num_micro_batches=self.num_micro_batches)

    @cached_property
    def num_micro_batches(self) -> int:
        """Of the replica that has most."""
        return -(-self.config.train.num_micro_batches // self.mesh.data)

    @cached_property
    def layer_times(self) -> tuple[LayerTime, ...]:
        """Under train.recompute."""
        return self._layer_times(self.config.train.recompute)

    def _layer_times(self, recompute: Recompute) -> tuple[LayerTime, ...]:
        train, slow = self.config.train, self._along("pipeline").crosses
        key = (self.mesh.tensor, train.micro_batch, recompute, train.recompute_every, train.sequence_parallel,
               train.offload_activations, slow, self._crowd)
        if key not in self.known:
            timer = LayerTimer(config=self.config, node=self.cluster.node, calibration=self.cluster.calibration,
                               tensor=self.tensor_group, slow_launches=slow, recompute=recompute, crowd=self._crowd)
            self.known[key] = timer.time_all(self.spec.layers)
        found: tuple[LayerTime, ...] = self.known[key]
        return found

    @property
    def _crowd(self) -> float:
        """By how many ranks are on a node, from one to all that it has room for."""
        devices = self.cluster.node.devices
        if devices == 1:
            return 1.0
        return 1 + (self.cluster.calibration.crowd - 1) * (min(self.mesh.size, devices) - 1) / (devices - 1)

    def _stage_times(self, stage: int, layers: tuple[int, int]) -> tuple[LayerTime, ...]:
        """Of the layers of `stage`, under its own recompute if there is one."""
        by_stage = self.config.pipeline.recompute
        times = self.layer_times if by_stage is None else self._layer_times(by_stage[stage])
        return times[layers[0]:layers[1]]

    @cached_property
    def layer_seconds(self) -> tuple[float, ...]:
        """By layer, forward and backward of a micro-batch: what a split balances."""
        return tuple(max((time.compute + time.tensor).total, time.launch.total) for time in self.layer_times)

    def time(self, stages: Stages) -> StepTime:
        """A step with that split."""
        parts = [self._stage(stage, layers) for stage, layers in enumerate(stages)]
        pipeline = pipeline_s(self.config.pipeline.schedule, self.mesh.pipeline, self.num_micro_batches,
                              self.config.pipeline.num_chunks, [part.cost for part in parts], self.hop_s)
        ranks = [[part for part, rank in zip(parts, self.placement, strict=True) if rank == at]
                 for at in range(self.mesh.pipeline)]
        busiest = max(ranks, key=lambda held: sum(part.cost.total for part in held))
        most = max(sum(part.elements for part in held) for held in ranks)
        window = min(sum(part.cost.backward for part in held) for held in ranks)
        data, update = self.data_timer.sharing_s(most, window), self.data_timer.update_s(most)
        count = self.num_micro_batches
        return StepTime(total=pipeline + data + update, pipeline=pipeline, data=data, update=update,
                        busy=count * sum(part.cost.total for part in busiest),
                        tensor=count * sum(part.tensor for part in busiest),
                        launch=count * sum(part.launch for part in busiest),
                        messages=count * sum(part.messages for part in busiest))

    def stage_costs(self, stages: Stages) -> tuple[LayerCost, ...]:
        """Seconds of one micro-batch by stage."""
        return tuple(self._stage(stage, layers).cost for stage, layers in enumerate(stages))

    def bound_s(self, stages: Stages) -> float:
        """At most what `time` gives, without a simulation: the busiest rank, after the forwards before its own."""
        costs = self.stage_costs(stages)
        before = accumulate((cost.forward for cost in costs), initial=0.0)
        busy = busy_of(costs, self.placement)
        return max(start + self.num_micro_batches * own for start, own in zip(before, busy, strict=False))

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Stage -> pipeline rank."""
        return placement_of(self.config.pipeline.schedule, self.mesh.pipeline, self.config.pipeline.num_chunks)

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Trained elements of each state on one tensor rank, by its index."""
        key = "elements", self.mesh.tensor
        if key not in self.known:
            self.known[key] = tuple(0 if state.frozen else local_parameters(state, self.mesh.tensor)
                                    for state in self.spec.states)
        found: tuple[int, ...] = self.known[key]
        return found

    def _stage(self, stage: int, layers: tuple[int, int]) -> "_Stage":
        held = self._stage_times(stage, layers)
        compute = sum((time.compute for time in held), NOTHING)
        tensor = sum((time.tensor for time in held), NOTHING)
        device, host = compute + tensor, sum((time.launch for time in held), NOTHING)
        slower = LayerCost(**{name: max(getattr(device, name), getattr(host, name))
                              for name in ("forward", "backward_input", "backward_weight")})
        shown = self.cluster.calibration.exposed_handover
        ahead, back = (shown * self._message_s(at) for at in (stage, stage - 1))
        cost = LayerCost(forward=slower.forward + ahead, backward_input=slower.backward_input + back,
                         backward_weight=slower.backward_weight)
        states = self.spec.states_of(range(*layers))
        return _Stage(cost=cost, tensor=tensor.total, launch=slower.total - device.total, messages=ahead + back,
                      elements=sum(self.elements[state.index] for state in states))

    def _message_s(self, stage: int) -> float:
        """From `stage` to the next; 0 if there is none or it is on the same rank."""
        ranks, chunks = self.mesh.pipeline, self.config.pipeline.num_chunks
        if not 0 <= stage < ranks * chunks - 1 or ranks == 1:
            return 0.0
        if self.config.pipeline.schedule == "zb_v" and stage == ranks - 1:
            return 0.0
        train = self.config.train
        size = train.micro_batch * train.sequence * self.config.model.hidden * ELEMENT_BYTES[train.dtype]
        crosses = self._leaves_node(stage % ranks, (stage + 1) % ranks)
        if sequence_parallel(self.config):
            return self.links.message_s(size / self.mesh.tensor, crosses=crosses)
        if self.cluster.scattered_messages:
            gather = self.links.gather_s(size, self.tensor_group)
            return self.links.message_s(size / self.mesh.tensor, crosses=crosses) + gather
        return self.links.message_s(size, crosses=crosses)

    def _leaves_node(self, rank: int, other: int) -> bool:
        """Whether two pipeline ranks of the first replica are on different nodes."""
        stride, devices = stride_of("pipeline", self.mesh, self.cluster.order), self.cluster.node.devices
        return rank * stride // devices != other * stride // devices

    @cached_property
    def hop_s(self) -> float:
        """Delay of a message beyond the time in which it holds up its sender."""
        stages = self.mesh.pipeline * self.config.pipeline.num_chunks
        longest = max(map(self._message_s, range(stages)))
        return (1 - self.cluster.calibration.exposed_handover) * longest

    def _along(self, axis: str) -> Group:
        return group_along(axis, self.mesh, self.cluster.node, self.cluster.order)  # type: ignore[arg-type]

    def ideal_s(self) -> float:
        """Less than any split takes: work spread evenly, then what the schedule leaves idle with equal stages."""
        work = sum((time.compute + time.tensor for time in self.layer_times), NOTHING) * (1 / self.mesh.pipeline)
        idle = (self.mesh.pipeline - 1) * _idle_of(self.config.pipeline.schedule, work, self.config.pipeline.num_chunks)
        elements = sum(self.elements) / self.mesh.pipeline
        data = self.data_timer.sharing_s(elements, self.num_micro_batches * work.backward)
        return self.num_micro_batches * work.total + idle + data + self.data_timer.update_s(elements)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """One micro-batch on one stage, in seconds; and its trained elements on one rank."""

    cost: LayerCost
    tensor: float
    launch: float
    messages: float
    elements: int


def _idle_of(schedule: str, work: LayerCost, chunks: int) -> float:
    """Idle time for each pipeline rank but one, of equal ranks that take `work` for a micro-batch (docs: schedules)."""
    match schedule:
        case "interleaved" | "breadth_first":
            return work.total / chunks
        case "zb_h1":
            return work.forward + work.backward_input - work.backward_weight
        case "zb_v":
            return 0.0
    return work.total


NOTHING = LayerCost(forward=0.0, backward_input=0.0, backward_weight=0.0)


def pipeline_s(schedule: str, num_ranks: int, num_micro_batches: int, chunks: int, stages: Sequence[LayerCost],
               hop_s: float) -> float:
    """Makespan of a pipeline. Of many micro-batches only some are simulated: once the pipeline runs, each adds what its
    busiest rank needs, or the time between two gradients of the last stage if that is longer (messages come and go)."""
    few = simulated_micro_batches(num_ranks, num_micro_batches)
    program = compiled(schedule, num_ranks, few, chunks)
    ends = program.ends([*(value for cost in stages for value in stage_seconds(cost, 1.0)), 0.0], hop_s)
    if num_micro_batches == few:
        return max(ends)
    last = len(COSTS) * (len(stages) - 1)
    gradient = (last + COSTS.index(Kind.BACKWARD), last + COSTS.index(Kind.BACKWARD_INPUT))
    arrivals = [end for end, cost in zip(ends[NEVER + 1:], program.costs, strict=True) if cost in gradient]
    steady = (arrivals[-1] - arrivals[-1 - num_ranks]) / num_ranks
    return max(ends) + (num_micro_batches - few) * max(steady, *busy_of(stages, program.placement))


def busy_of(stages: Sequence[LayerCost], placement: Sequence[int]) -> list[float]:
    """Seconds of one micro-batch by pipeline rank. placement: stage -> rank."""
    busy = [0.0] * (max(placement) + 1)
    for cost, rank in zip(stages, placement, strict=True):
        busy[rank] += cost.total
    return busy


def simulated_micro_batches(num_ranks: int, num_micro_batches: int) -> int:
    """So many are enough to know time and memory of a pipeline with `num_micro_batches`."""
    return min(num_micro_batches, LONG * num_ranks)


def placement_of(schedule: str, num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage -> pipeline rank."""
    return compiled(schedule, num_ranks, 0, chunks).placement
