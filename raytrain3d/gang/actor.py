"""The Ray actor of one rank. It only carries requests to its `RankWorker`."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray

from raytrain3d.gang.network import rank_environment
from raytrain3d.gang.ray_cluster import node_address
from raytrain3d.gang.worker import RankSettings, RankWorker


class RankActor:
    """Calls run one after another in one thread; asks in the thread of the group `control`."""

    def __init__(self, settings: RankSettings) -> None:
        address = node_address()
        # Before torch is imported, which reads some of it then.
        os.environ.update(rank_environment(settings.config, address))
        index = _device_index() if settings.plan.device == "gpu" else None
        settings = replace(settings, address=address, device_index=index)
        settings.open_log()
        self._worker = RankWorker(settings)

    def call(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._worker.run(method, *args, **kwargs)

    @ray.method(concurrency_group="control")
    def ask(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return method(self._worker, *args, **kwargs)


_remote: Any = ray.remote
RANK_ACTOR: Any = _remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})(RankActor)
"""Makes a RankActor. `Any`: Ray's types do not know concurrency groups."""


def _device_index() -> int:
    """Place of this actor's GPU among those the process sees, which are all of the node's: a mask per actor would break
    NCCL's peer paths."""
    gpu = str(ray.get_gpu_ids()[0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(gpu) if visible else int(gpu)
