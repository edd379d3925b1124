"""The Ray actor of one rank. It only carries requests to its `RankWorker`."""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray

from raytrain3d.gang.network import rank_environment
from raytrain3d.gang.ray_cluster import node_address
from raytrain3d.gang.worker import RankSettings, RankWorker, warm_up

BECOME_LIMIT_S = 60.0
"""Longest wait of an ask for a spare that is about to become a rank."""


class RankActor:
    """Calls run one after another in one thread; asks in the thread of the group `control`. A spare loads all that a rank
    needs and waits for `become`."""

    def __init__(self, settings: RankSettings, *, spare: bool = False) -> None:
        self._address = node_address()
        # Before torch is imported, which reads some of it then.
        os.environ.update(rank_environment(settings.config, self._address))
        self._is_rank = threading.Event()
        if spare:
            warm_up()
        else:
            self.become(settings, _device_index() if settings.plan.device == "gpu" else None)

    def become(self, settings: RankSettings, device_index: int | None) -> None:
        """Be this rank, on that GPU."""
        self._device_index = device_index
        settings = replace(settings, address=self._address, device_index=device_index)
        settings.open_log()
        self._worker = RankWorker(settings)
        self._is_rank.set()

    def device_index(self) -> int | None:
        """Of the rank's GPU among those that the process sees."""
        return self._device_index

    def call(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._worker.run(method, *args, **kwargs)

    @ray.method(concurrency_group="control")
    def ask(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._is_rank.wait(BECOME_LIMIT_S)
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
