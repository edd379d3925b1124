"""Ranks in Ray actors, and spare actors that may become ranks."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raytrain3d.gang.actor import RANK_ACTOR
from raytrain3d.gang.handle import Leader, RankDied, settle
from raytrain3d.gang.ray_cluster import NAMESPACE
from raytrain3d.gang.worker import LeaseEnd, LeaseRequest, RankError, RankSettings, RankWorker
from raytrain3d.plan.placement import RankPlace
from raytrain3d.train.report import StepReport

P = ParamSpec("P")
T = TypeVar("T")
EXIT_DETAIL = "Worker exit detail:"
REFILL_S = 10.0
"""From the use of a spare until another one is started."""


class RayRank:
    """A rank in a Ray actor."""

    def __init__(self, actor: Any, place: RankPlace, leader: Leader) -> None:
        self.rank, self.node, self.place, self.leader = place.rank, place.node, place, leader
        self.actor = actor
        self._device_index: Future[int | None] = self._future(actor.device_index.remote())

    def call(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._future(self.actor.call.remote((method, args, kwargs)))

    def ask(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._future(self.actor.ask.remote((method, args, kwargs)))

    @property
    def device_index(self) -> int | None:
        """Of its GPU; absent on CPU, and while it has not told it."""
        return self._device_index.result() if self._device_index.done() and not self._device_index.exception() else None

    def train_gang(self, lease: LeaseRequest) -> Future[LeaseEnd]:
        """The gang that this rank leads; see Leader."""
        return self._future(self.actor.train_gang.remote(lease))

    def gather(self, after: int) -> Future[list[StepReport]]:
        """Reports of the gang that this rank leads; see Leader."""
        return self._future(self.actor.gather.remote(after))

    def kill(self) -> Future[Any]:
        """End the process. The future fails when it is gone."""
        ray.kill(self.actor)
        return self.ask(RankWorker.facts)

    def _future(self, reference: Any) -> Future[Any]:
        answer: Future[Any] = Future()

        def done(carried: Future[Any]) -> None:
            error = carried.exception()
            if error is None:
                settle(answer, carried.result())
            elif isinstance(error, RayTaskError):
                settle(answer, RankError(rank=self.rank, kind=type(error.cause).__name__, message=str(error.cause),
                                         traceback=str(error), step=None, op=None))
            elif answer.set_running_or_notify_cancel():
                answer.set_exception(RankDied(death_cause(error)))

        reference.future().add_done_callback(done)
        return answer


def death_cause(error: BaseException) -> str:
    """The telling part of Ray's many lines about a dead actor."""
    text = str(error) if isinstance(error, RayError) else f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [repr(error)]
    preempted = "its node was preempted; " if getattr(error, "preempted", False) else ""
    if "creation task" in text:
        return f"it could not be made: {lines[-1]}"
    _, found, detail = text.partition(EXIT_DETAIL)
    if found:
        detail = detail.splitlines()[0].partition("Some common causes")[0].partition("There are some potential")[0]
        return f"{preempted}its process is gone ({detail.strip()} If nobody ended it, the node may be out of memory)"
    return preempted + next((line for line in lines if "died" in line or "dead" in line), lines[0])


def start_rank(settings: RankSettings, group: PlacementGroup, bundle: int) -> Any:
    """The actor of a rank, in a bundle of its gang's placement group."""
    plan, config = settings.plan, settings.config
    pipeline = plan.mesh.coordinate(settings.rank).pipeline
    return RANK_ACTOR.options(
        name=f"raytrain3d/{config.run.name}/rank-{settings.rank:04d} pipeline {pipeline}", namespace=NAMESPACE,
        num_cpus=config.placement.cpus_per_rank, num_gpus=1 if plan.device == "gpu" else 0,
        runtime_env=_environment(settings),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    ).remote(settings)


def _environment(settings: RankSettings) -> dict[str, Any] | None:
    """The variable must be there before Ray starts the process; others are set by the actor, which knows its node."""
    variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    return {"env_vars": variables} if settings.plan.device == "gpu" else None


class RaySpares:
    """Actors that wait, with torch loaded, on every node of a job. They ask for nothing: one that becomes a rank takes the
    place of a lost rank in its bundle, on its GPU. settings: of any rank."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings, self._number = settings, settings.config.recovery.spares
        self._waiting: defaultdict[str, list[Any]] = defaultdict(list)
        self._refills: list[threading.Timer] = []
        self._lock, self._closed, self._count = threading.Lock(), False, 0

    def cover(self, nodes: Iterable[str]) -> None:
        """Start what is missing on these nodes."""
        with self._lock:
            for node in nodes:
                while not self._closed and len(self._waiting[node]) < self._number:
                    self._waiting[node].append(self._start(node))

    def take(self, node: str | None) -> Any | None:
        """One on this node, if there is one; another one is started a little later, when the recovery is over."""
        with self._lock:
            if node is None or not self._waiting[node]:
                return None
            refill = threading.Timer(REFILL_S, self.cover, [[node]])
            refill.daemon = True
            refill.start()
            self._refills.append(refill)
            return self._waiting[node].pop(0)

    def close(self) -> None:
        for refill in self._refills:
            refill.cancel()
        with self._lock:
            self._closed = True
            for spare in [spare for spares in self._waiting.values() for spare in spares]:
                ray.kill(spare)
            self._waiting.clear()

    def _start(self, node: str) -> Any:
        self._count += 1
        return RANK_ACTOR.options(
            name=f"raytrain3d/{self._settings.config.run.name}/spare-{self._count}", namespace=NAMESPACE, num_cpus=0,
            runtime_env=_environment(self._settings),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(self._settings, spare=True)
