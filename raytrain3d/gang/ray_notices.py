"""Watchers on the nodes of a job that turn a cloud's notice into Ray's own: the node is drained, so that Ray places nothing
new on it, and the job's driver finds it among the draining nodes."""

import importlib
import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain3d.config import RecoveryConfig
from raytrain3d.gang.notices import ends_at, fetch_from
from raytrain3d.gang.ray_cluster import NAMESPACE

logger = logging.getLogger(__name__)
POLL_S = 5.0


class Watcher:
    """Asks the metadata service of its machine until there is a notice, and drains the node then. For an actor."""

    def __init__(self, config: RecoveryConfig) -> None:
        assert config.notices != "none"
        self._provider, self._fetch = config.notices, fetch_from(config.metadata_address)
        threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def _watch(self) -> None:
        while True:
            try:
                end = ends_at(self._provider, self._fetch)
            except (OSError, ValueError, KeyError) as error:
                logger.warning("metadata service: %r", error)
                end = None
            if end is not None:
                context = ray.get_runtime_context()
                drain(context.gcs_address, context.get_node_id(), end, f"notice of {self._provider}")
                return
            time.sleep(POLL_S)


def drain(address: str, node: str, end: float, reason: str) -> None:
    """The node goes away at `end`, in seconds since 1970. address: of the cluster."""
    raylet: Any = importlib.import_module("ray._raylet")  # neither of the two has types
    reasons: Any = importlib.import_module("ray.core.generated.autoscaler_pb2").DrainNodeReason
    preemption = reasons.Value("DRAIN_NODE_REASON_PREEMPTION")
    raylet.GcsClient(address=address).drain_node(node, preemption, reason, int(end * 1000))


class Watchers:
    """One on every node of a job, if `recovery.notices` says so."""

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._actors: dict[str, Any] = {}

    def cover(self, nodes: Iterable[str]) -> None:
        """Watch these nodes, too."""
        if self._config.notices == "none":
            return
        make: Any = ray.remote(num_cpus=0)(Watcher)
        for node in set(nodes) - self._actors.keys():
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            self._actors[node] = make.options(namespace=NAMESPACE, scheduling_strategy=here).remote(self._config)

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
