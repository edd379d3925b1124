"""Gangs on Ray: a placement group per replica with one bundle per tensor group, so that Ray keeps a tensor group on one
node; ranks are given to bundles sorted by node."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytrain3d.errors import CapacityError
from raytrain3d.gang.actor import RANK_ACTOR
from raytrain3d.gang.capacity import NodeCapacity, shortage
from raytrain3d.gang.handle import RankDied, settle
from raytrain3d.gang.ray_cluster import NAMESPACE
from raytrain3d.gang.stop import StopFlag
from raytrain3d.gang.worker import RankError, RankSettings, RankWorker
from raytrain3d.plan.placement import RankPlace, place_ranks
from raytrain3d.plan.plan import Plan

P = ParamSpec("P")
T = TypeVar("T")
KILL_LIMIT_S = 5.0
EXIT_DETAIL = "Worker exit detail:"
FIRST_LINE_S, LONGEST_INTERVAL_S = 3.0, 60.0
"""When waiting for capacity is first said, and how far apart later lines may come (each takes twice as long)."""


class RayRank:
    """A rank in a Ray actor."""

    def __init__(self, actor: Any, place: RankPlace) -> None:
        self.rank, self.node, self.place = place.rank, place.node, place
        self._actor = actor

    def call(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._future(self._actor.call.remote(method, args, kwargs))

    def ask(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._future(self._actor.ask.remote(method, args, kwargs))

    def kill(self) -> Future[Any]:
        """End the process. The future fails when it is gone."""
        ray.kill(self._actor)
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


class RayGang:
    """The actors of one replica in their placement group."""

    def __init__(self, group: PlacementGroup, settings: Sequence[RankSettings], nodes: Mapping[str, str]) -> None:
        self._group = group
        self._settings = {each.rank: each for each in settings}
        bundles = placement_group_table(group)["bundles_to_node_id"]
        first = settings[0]
        replica = first.plan.mesh.coordinate(first.rank).data
        places = place_ranks(first.plan.mesh, replica, {bundle: nodes[node] for bundle, node in bundles.items()})
        self.ranks = tuple(RayRank(_start(group, place, each), place)
                           for place, each in zip(places, settings, strict=True))

    def replace(self, rank: int, plan: Plan) -> None:
        settings = dataclasses.replace(self._settings[rank], plan=plan)
        self.ranks = tuple(self._new(old, settings) if old.rank == rank else old for old in self.ranks)

    def _new(self, old: RayRank, settings: RankSettings) -> RayRank:
        """In the same bundle, on whatever node that is by now."""
        wait([old.kill()], timeout=KILL_LIMIT_S)
        place = old.place
        node = placement_group_table(self._group)["bundles_to_node_id"].get(place.bundle)
        place = dataclasses.replace(place, node=node_names().get(node, place.node))
        return RayRank(_start(self._group, place, settings), place)

    def kill(self) -> None:
        wait([rank.kill() for rank in self.ranks], timeout=KILL_LIMIT_S)
        remove_placement_group(self._group)


def _start(group: PlacementGroup, place: RankPlace, settings: RankSettings) -> Any:
    plan, config = settings.plan, settings.config
    pipeline = plan.mesh.coordinate(place.rank).pipeline
    on_gpu = plan.device == "gpu"
    # The variable must be there before Ray starts the process; the others are set by the actor, which knows its node.
    environment = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}} if on_gpu else None
    return RANK_ACTOR.options(
        name=f"raytrain3d/{config.run.name}/rank-{place.rank:04d} pipeline {pipeline}", namespace=NAMESPACE,
        num_cpus=config.placement.cpus_per_rank, num_gpus=1 if on_gpu else 0, runtime_env=environment,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place.bundle),
    ).remote(settings)


@contextmanager
def ray_gangs(settings: Sequence[RankSettings], stop: StopFlag, say: Callable[[str], None]) -> Iterator[list[RayGang]]:
    """All gangs of a job, once the cluster has room for them. On leaving, no actor and no placement group is left.

    Raises CapacityError after placement.wait_s, StopRequested when asked to stop meanwhile.
    """
    plan, config = settings[0].plan, settings[0].config
    groups = [placement_group([plan.bundle.resources] * plan.mesh.pipeline, strategy="PACK",
                              name=f"raytrain3d/{config.run.name}/gang-{replica}") for replica in range(plan.mesh.data)]
    gangs: list[RayGang] = []
    try:
        _wait_for_capacity(groups, plan, config.placement.wait_s, stop, say)
        nodes = node_names()
        gangs += [RayGang(group, [settings[rank] for rank in plan.mesh.gang(replica)], nodes)
                  for replica, group in enumerate(groups)]
        yield gangs
    finally:
        for gang in gangs:
            gang.kill()
        for group in groups:
            remove_placement_group(group)


def _wait_for_capacity(groups: Sequence[PlacementGroup], plan: Plan, limit_s: float, stop: StopFlag,
                       say: Callable[[str], None]) -> None:
    start, next_line = time.monotonic(), FIRST_LINE_S
    while pending := [group for group in groups if not _is_placed(group)]:
        stop.check()
        waited = time.monotonic() - start
        if waited >= min(next_line, limit_s):
            text = shortage(plan, len(groups) - len(pending), node_capacities())
            if waited >= limit_s:
                raise CapacityError(f"after {limit_s:g} s the cluster has no room for the job: {text}")
            say(f"waiting for capacity ({waited:.0f} of {limit_s:g} s): {text}")
            next_line = min(2 * next_line, next_line + LONGEST_INTERVAL_S)
        time.sleep(min(0.05 + waited / 10, 1.0))


def _is_placed(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == "CREATED")


def node_names() -> dict[str, str]:
    """Id -> address of every live node; with the beginning of the id where several nodes share an address."""
    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in _live_nodes()}
    shared = Counter(alive.values())
    return {node: address if shared[address] == 1 else f"{address}/{node[:6]}" for node, address in alive.items()}


def node_capacities() -> list[NodeCapacity]:
    """Resources of every live node."""
    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    names = node_names()

    def capacity(node: str, total: Mapping[str, float]) -> NodeCapacity:
        left = free.get(node, {})
        return NodeCapacity(name=names[node], cpus=total.get("CPU", 0.0), free_cpus=left.get("CPU", 0.0),
                            gpus=total.get("GPU", 0.0), free_gpus=left.get("GPU", 0.0))

    return sorted((capacity(node["NodeID"], node["Resources"]) for node in _live_nodes() if node["NodeID"] in names),
                  key=lambda each: each.name)


def _live_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
