"""Seconds of collectives, from the links that their groups cross: ring and tree.

A ring of n ranks moves (n - 1) / n of the bytes over its slowest link, in n - 1 steps. Where a group has several ranks on
each node, as many rings use as many network ports at once; groups beside it use the others, so that a group's share of a
node's ports is its number of ranks there.
"""

from dataclasses import dataclass
from math import ceil, log2

from raytrain3d.plan.calibration import Calibration
from raytrain3d.plan.catalogue import Node
from raytrain3d.plan.mesh import Axis, Mesh

Order = tuple[Axis, Axis, Axis]
"""Axes from the fastest (neighbouring ranks) to the slowest."""
TENSOR_PIPELINE_DATA: Order = ("tensor", "pipeline", "data")
"""Ours: a gang stays together, replicas are far apart."""
TENSOR_DATA_PIPELINE: Order = ("tensor", "data", "pipeline")
"""Replicas stay together, stages are far apart (Megatron-LM, nanotron)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that communicate, as they lie on nodes."""

    size: int
    per_node: int
    """Ranks of the group on one node."""

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.per_node)

    @property
    def crosses(self) -> bool:
        """Whether it has ranks on several nodes."""
        return self.nodes > 1


def group_along(axis: Axis, mesh: Mesh, node: Node, order: Order = TENSOR_PIPELINE_DATA) -> Group:
    """The group of a rank along `axis`. Ranks fill nodes in rank order."""
    stride = stride_of(axis, mesh, order)
    size: int = getattr(mesh, axis)
    return Group(size=size, per_node=min(size, max(node.devices // stride, 1)))


def stride_of(axis: Axis, mesh: Mesh, order: Order) -> int:
    """Ranks from one member of a group along `axis` to the next."""
    stride = 1
    for faster in order[:order.index(axis)]:
        stride *= getattr(mesh, faster)
    return stride


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The links of a kind of node, as a calibration found them."""

    node: Node
    calibration: Calibration

    def bandwidth(self, group: Group) -> float:
        """Bytes a second and rank of a ring."""
        inside = self.node.inside_gb_s * self.calibration.inside * 1e9
        network = self.node.network_gb_s * self.calibration.network * 1e9
        return min(inside, group.per_node * network) if group.crosses else inside

    def step_s(self, group: Group) -> float:
        return self.calibration.network_step_s if group.crosses else self.calibration.inside_step_s

    def transfer_s(self, num_bytes: float, group: Group) -> float:
        """All-gather or reduce-scatter of `num_bytes` (the whole of it) without its latency."""
        return (group.size - 1) / group.size * num_bytes / self.bandwidth(group)

    def latency_s(self, group: Group) -> float:
        """Of an all-gather or reduce-scatter: the steps of its ring."""
        return (group.size - 1) * self.step_s(group)

    def gather_s(self, num_bytes: float, group: Group) -> float:
        """All-gather or reduce-scatter of `num_bytes`."""
        return self.transfer_s(num_bytes, group) + self.latency_s(group)

    def all_reduce_s(self, num_bytes: float, group: Group) -> float:
        """The faster of ring and tree: a tree has few steps, and moves all bytes up and down."""
        if group.size == 1:
            return 0.0
        ring = 2 * self.gather_s(num_bytes, group)
        tree = 2 * num_bytes / self.bandwidth(group) + 2 * ceil(log2(group.size)) * self.step_s(group)
        return min(ring, tree)

    def message_s(self, num_bytes: float, *, crosses: bool) -> float:
        """From a device to another: over its own network port, or inside the node."""
        gb_s = (self.node.network_gb_s * self.calibration.network if crosses
                else self.node.inside_gb_s * self.calibration.inside)
        return num_bytes / (gb_s * 1e9) + self.calibration.handover_s
