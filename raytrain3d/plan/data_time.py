"""Seconds of what follows the pipeline: gradients summed over replicas, weights gathered, the update."""

from dataclasses import dataclass

from raytrain3d.config import JobConfig
from raytrain3d.plan.collectives import Group, Links
from raytrain3d.plan.state_memory import ELEMENT_BYTES, EXACT_BYTES, REDUCE_BYTES

UPDATE_READS = 4
"""AdamW reads gradient, master weight and both moments, and writes all but the gradient, in the exact type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTimer:
    """For one rank of a job."""

    config: JobConfig
    links: Links
    replicas: Group
    """The ranks with the same layers, one in each replica."""
    calls: int
    """Collectives for one pass over a rank's layers."""
    num_micro_batches: int
    crowd: float
    """How much longer it computes because of other ranks on its node."""

    def sharing_s(self, elements: float, backward_s: float) -> float:
        """Reduction of gradients and gathering of weights that no backward hides, one call for each layer. elements: trained
        ones of the rank; backward_s: the backward of a micro-batch."""
        group, train, calibration, calls = self.replicas, self.config.train, self.links.calibration, self.calls
        if group.size == 1:
            return 0.0
        gradients, weights = elements * REDUCE_BYTES[self.config.reduce_dtype], elements * ELEMENT_BYTES[train.dtype]
        shard, across = self._shard_groups
        latency = calls * self.links.latency_s(shard)
        gather = self.links.transfer_s(weights, shard) + latency
        reduce = self.links.transfer_s(gradients, shard) + latency
        between = calls * self.links.all_reduce_s(gradients / shard.size / calls, across)
        match train.sharding:
            case "none":
                whole = calls * self.links.all_reduce_s(gradients / calls, group)
                return _shown(whole, calibration.exposed_all_reduce, backward_s)
            case "optimizer":
                return _shown(reduce + between, calibration.exposed_reduction, backward_s) + gather
        count = self.num_micro_batches
        more = (count - 1) * _shown(reduce, calibration.exposed_reduction, backward_s)
        gathers = 2 * count if train.sharding == "full" and train.keep_gathered == "op" else 1
        return (_shown(reduce, calibration.exposed_reduction, backward_s) + more + between
                + _shown(gather, calibration.exposed_reduction, backward_s) * gathers)

    @property
    def _shard_groups(self) -> tuple[Group, Group]:
        """Of the replicas: a shard group, and the ranks with one part of the state in all shard groups."""
        size, group = self.config.shard_group, self.replicas
        return (Group(size=size, per_node=min(size, group.per_node)),
                Group(size=group.size // size, per_node=max(1, group.per_node // size)))

    def update_s(self, elements: float) -> float:
        """AdamW on a rank with so many trained elements, and what a step has beside."""
        train, calibration, node = self.config.train, self.links.calibration, self.links.node
        own = elements / self.config.shard_group
        exact, element = EXACT_BYTES[train.dtype], ELEMENT_BYTES[train.dtype]
        moved = own * ((2 * UPDATE_READS - 1) * exact + element)
        if train.offload_optimizer:  # gradients go to the host, weights come back
            ways = own * (exact + element) / (node.host_gb_s * 1e9 * calibration.inside)
            return moved / (node.host_memory_gb_s * 1e9 * calibration.memory) + ways + calibration.step_s
        return moved / (node.memory_gb_s * 1e9 * calibration.memory) * self.crowd + calibration.step_s


def _shown(seconds: float, share: float, window: float) -> float:
    """What shows of a communication of which `1 - share` can hide behind a computation of `window` seconds."""
    return seconds - min((1 - share) * seconds, window)
