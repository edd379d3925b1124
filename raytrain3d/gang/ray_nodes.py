"""The nodes of the cluster: names and resources."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray

from raytrain3d.gang.capacity import NodeCapacity


def node_names() -> dict[str, str]:
    """Id -> address of every live node; with the beginning of the id where several nodes share an address."""
    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in _live_nodes()}
    shared = Counter(alive.values())
    return {node: address if shared[address] == 1 else f"{address}/{node[:6]}" for node, address in alive.items()}


def node_capacities() -> list[NodeCapacity]:
    """Resources of every live node."""
    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    names, nodes = node_names(), _live_nodes()
    labels = {node["NodeID"]: dict(node.get("Labels") or {}) for node in nodes}

    def capacity(node: str, total: Mapping[str, float]) -> NodeCapacity:
        left = free.get(node, {})
        return NodeCapacity(name=names[node], cpus=total.get("CPU", 0.0), free_cpus=left.get("CPU", 0.0),
                            gpus=total.get("GPU", 0.0), free_gpus=left.get("GPU", 0.0), labels=labels[node])

    return sorted((capacity(node["NodeID"], node["Resources"]) for node in nodes if node["NodeID"] in names),
                  key=lambda each: each.name)


def _live_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
