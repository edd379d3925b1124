"""What a layout takes of a device: the plan's memory of each rank, what a runtime adds to it, and whether it fits.

`memory.py` counts tensors that must be there. A runtime holds more: blocks that its allocator cannot use, temporaries of
running operations, copies of the logits, weights gathered after an update, its own context. Where the host launches
faster than the device computes, buffers of collectives on other streams are not free yet when the next are asked for;
that part is elastic, it takes what is left and never more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from raytrain3d.config import JobConfig
from raytrain3d.plan.activations import activation_memory
from raytrain3d.plan.catalogue import Node
from raytrain3d.plan.memory import rank_memory
from raytrain3d.plan.params import ModelSpec
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.program import Programs
from raytrain3d.plan.schedule import Kind, Op
from raytrain3d.plan.state_memory import ELEMENT_BYTES, Memory, optimizer_on_host, state_memory

GATHERED = 2
"""Inputs of a block that tensor ranks gather with sequence parallelism: attention's and the feed-forward part's."""
FIRST = 0.6
"""Least activations of a first stage, over those of an even one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Factors from tensors to memory. Defaults are stated margins; `benchmarks/planner.py` fits them to measured runs."""

    state: float = 1.03
    """Of weights, gradients and optimizer state."""
    activations: float = 1.1
    """Of activations: fragmentation, temporaries of backward."""
    logits: float = 2.5
    """Of fp32 logits: their 16-bit form and their gradient are there as well."""
    gathered_weights: float = 0.4
    """Of the weights, with a sharded optimizer: buckets that gradients and weights pass through."""
    run_ahead: float = 1.0
    """Of the inputs that tensor collectives gathered for micro-batches in flight."""
    base_gb: float = 2.0
    """Context of the device, communicators, workspaces: 10^9 bytes."""
    usable: float = 0.95
    """Share of a device's memory that a process can get."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes of one rank."""

    tensors: Memory
    needed: float
    """Tensors and what the runtime adds; less does not run."""
    run_ahead: float
    """Beyond that, what a runtime that launches ahead would take if it could."""

    def used(self, limit: float) -> float:
        """Peak on a device where `limit` bytes can be had."""
        return self.needed + min(self.run_ahead, max(limit - self.needed, 0.0))


def device_memory(config: JobConfig, spec: ModelSpec, stages: Stages, programs: Programs, rank: int, *,
                  allocation: Allocation, launching_s: float = 0.0, computing_s: float = 1.0) -> DeviceMemory:
    """Memory of a pipeline rank. launching_s, computing_s: of the host and of the device, for the same work."""
    layers = {stage: range(*stages[stage]) for stage in range(len(stages)) if programs.schedule.rank_of(stage) == rank}
    tensors = rank_memory(config, spec, layers, programs.ops[rank])
    state = tensors.total - tensors.activations - tensors.logits
    gathered = tensors.weights if config.train.sharding != "none" and config.mesh.replicas > 1 else 0
    needed = (allocation.state * state + allocation.activations * tensors.activations + allocation.logits * tensors.logits
              + allocation.gathered_weights * gathered + allocation.base_gb * 1e9)
    return DeviceMemory(tensors=tensors, needed=needed,
                        run_ahead=allocation.run_ahead * _ahead(launching_s, computing_s)
                        * _gathered_bytes(config, spec, layers, _in_flight(programs, rank)))


def least_bytes(config: JobConfig, spec: ModelSpec, elements: int, allocation: Allocation) -> float:
    """At most what the fullest rank needs, without its program. elements: of all states on one tensor rank.

    The fullest rank has at least an even part of the state; the first one keeps activations of p micro-batches of a stage
    that is hardly smaller than FIRST of an even one.
    """
    ranks, train = config.mesh.pipeline, config.train
    state = state_memory(elements // ranks, dtype=train.dtype, sharding=train.sharding, data=config.mesh.replicas)
    on_device = (optimizer_on_host(state) if train.offload_optimizer else state).total
    in_flight = min(ranks, -(-train.num_micro_batches // config.mesh.replicas))
    layers = {0: range(len(spec.layers) - 1)}
    one = activation_memory(config, spec, layers, (Op(Kind.FORWARD, 0, 0), Op(Kind.BACKWARD, 0, 0))).activations
    return (allocation.base_gb * 1e9 + allocation.state * on_device
            + allocation.activations * FIRST * one * in_flight / ranks)


def usable_bytes(node: Node, allocation: Allocation) -> float:
    """What a process can get of a device."""
    return allocation.usable * node.memory_bytes


def _ahead(launching_s: float, computing_s: float) -> float:
    """How far launches run ahead of the device, 0 to 1: not at all when the device waits for them."""
    lead = (computing_s / launching_s) ** 2 if launching_s else 1e9
    return lead / (1 + lead)


def _in_flight(programs: Programs, rank: int) -> int:
    schedule = programs.schedule
    return min(schedule.num_ranks - rank, schedule.num_micro_batches)


def _gathered_bytes(config: JobConfig, spec: ModelSpec, layers: Mapping[int, range], in_flight: int) -> float:
    if config.mesh.tensor == 1 or config.train.recompute == "full":
        return 0.0
    blocks = sum(spec.layers[i].kind == "block" for held in layers.values() for i in held)
    tokens = config.train.micro_batch * config.train.sequence
    return GATHERED * tokens * config.model.hidden * ELEMENT_BYTES[config.train.dtype] * blocks * in_flight
