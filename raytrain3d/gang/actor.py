"""The Ray actor of one rank. It only carries requests to its `RankWorker`."""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain3d.gang.network import rank_environment
from raytrain3d.gang.ray_cluster import node_address
from raytrain3d.gang.worker import LeaseEnd, LeaseRequest, RankError, RankSettings, RankWorker, warm_up
from raytrain3d.train.report import StepReport, merge_reports

GATHER_S = 2.0
"""Longest wait for reports of the gang's other ranks."""
BECOME_LIMIT_S = 60.0
"""Longest wait of an ask for a spare that is about to become a rank."""
Request = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
"""What a rank is to do: a method of `RankWorker` and its arguments. One argument: Ray takes longer to pack three."""


class RankActor:
    """Calls run one after another in one thread; asks in the thread of the group `control`. That of the group `lead` waits
    for the gang of which this rank is the first. A spare loads all that a rank needs and waits for `become`."""

    def __init__(self, settings: RankSettings, *, spare: bool = False) -> None:
        self._address = node_address()
        # Before torch is imported, which reads some of it then.
        os.environ.update(rank_environment(settings.config, self._address))
        self._is_rank = threading.Event()
        self._gang: list[Any] = []
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
        self._tensor = settings.plan.mesh.tensor
        self._is_rank.set()

    def device_index(self) -> int | None:
        """Of the rank's GPU among those that the process sees."""
        return self._device_index

    def call(self, request: Request) -> Any:
        method, args, kwargs = request
        return self._worker.run(method, *args, **kwargs)

    @ray.method(concurrency_group="control")
    def ask(self, request: Request) -> Any:
        method, args, kwargs = request
        self._is_rank.wait(BECOME_LIMIT_S)
        return method(self._worker, *args, **kwargs)

    @ray.method(concurrency_group="lead")
    def lead(self, gang: list[Any]) -> None:
        """gang: the actors of its ranks, this one the first, which it asks from now on."""
        self._gang = gang

    @ray.method(concurrency_group="lead")
    def train_gang(self, lease: LeaseRequest) -> LeaseEnd | RankError:
        """A lease on the whole gang: ends with its last rank, or with the first error of one. That a rank is lost is raised.
        """
        request: Request = (RankWorker.train, (lease,), {})
        waiting = [actor.call.remote(request) for actor in self._gang]
        ends: set[LeaseEnd] = set()
        while waiting:
            (answer,), waiting = ray.wait(waiting)
            end = ray.get(answer)
            if isinstance(end, RankError):
                return end
            ends.add(end)
        if len(ends) > 1:
            raise AssertionError(f"ranks left the lease of steps {lease.first} to {lease.last} differently: {ends}")
        return ends.pop()

    @ray.method(concurrency_group="control")
    def gather(self, after: int) -> list[StepReport]:
        """Of the whole gang, beyond step `after`. Nothing when a rank does not answer: the driver finds that out."""
        self._is_rank.wait(BECOME_LIMIT_S)
        request: Request = (RankWorker.reports, (after,), {})
        asked = [other.ask.remote(request) for other in self._gang[1:]]
        reports = self._worker.reports(after)
        try:
            for theirs in ray.get(asked, timeout=GATHER_S):
                reports += theirs
        except RayError:
            return []
        return merge_reports(reports, len(self._gang), self._tensor)


_remote: Any = ray.remote
RANK_ACTOR: Any = _remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1, "lead": 1})(RankActor)
"""Makes a RankActor. `Any`: Ray's types do not know concurrency groups."""


def _device_index() -> int:
    """Place of this actor's GPU among those the process sees, which are all of the node's: a mask per actor would break
    NCCL's peer paths."""
    gpu = str(ray.get_gpu_ids()[0])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(gpu) if visible else int(gpu)
