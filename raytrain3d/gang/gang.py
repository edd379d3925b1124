"""Gangs on Ray: a placement group per replica with one bundle per tensor group, so that Ray keeps a tensor group on one
node; ranks are given to bundles sorted by node."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from raytrain3d.gang.handle import Leader
from raytrain3d.gang.placing import is_placed, request_gang, wait_for_capacity
from raytrain3d.gang.ray_nodes import node_names
from raytrain3d.gang.ray_notices import Watchers
from raytrain3d.gang.ray_rank import RayRank, RaySpares, start_rank
from raytrain3d.gang.stop import StopFlag
from raytrain3d.gang.worker import LeaseEnd, LeaseRequest, RankSettings
from raytrain3d.plan.placement import place_ranks
from raytrain3d.plan.plan import Plan
from raytrain3d.train.report import StepReport

KILL_LIMIT_S = 5.0
MORE_ROOM_S = 2.0
"""Wait for room for more replicas than the fewest with which a job starts."""


class RayGang:
    """The actors of one replica in their placement group."""

    def __init__(self, group: PlacementGroup, settings: Sequence[RankSettings], spares: RaySpares) -> None:
        self._group, self._spares = group, spares
        self._settings = {each.rank: each for each in settings}
        self._leader = Leader(tuple(self._settings), self._train, self._gather)
        names = node_names()
        first = settings[0]
        replica = first.plan.mesh.coordinate(first.rank).data
        bundles = placement_group_table(group)["bundles_to_node_id"]
        places = place_ranks(first.plan.mesh, replica, {bundle: names[node] for bundle, node in bundles.items()})
        self.ranks = tuple(RayRank(start_rank(each, group, place.bundle), place, self._leader)
                           for place, each in zip(places, settings, strict=True))
        self._appoint_leader()

    @property
    def node_ids(self) -> set[str]:
        """Of the nodes that it is on."""
        return set(placement_group_table(self._group)["bundles_to_node_id"].values())

    def replace(self, rank: int, plan: Plan) -> None:
        settings = dataclasses.replace(self._settings[rank], plan=plan)
        self.ranks = tuple(self._new(old, settings) if old.rank == rank else old for old in self.ranks)
        self._appoint_leader()

    def _train(self, lease: LeaseRequest) -> Future[LeaseEnd]:
        return self.ranks[0].train_gang(lease)

    def _gather(self, after: int) -> Future[list[StepReport]]:
        return self.ranks[0].gather(after)

    def _appoint_leader(self) -> None:
        """The first rank passes on leases and reads the others' reports, beside its training."""
        self.ranks[0].actor.lead.remote([rank.actor for rank in self.ranks])

    def _new(self, old: RayRank, settings: RankSettings) -> RayRank:
        """In the same bundle, on whatever node that is by now: a spare there, or a new actor."""
        wait([old.kill()], timeout=KILL_LIMIT_S)
        node = placement_group_table(self._group)["bundles_to_node_id"].get(old.place.bundle)
        place = dataclasses.replace(old.place, node=node_names().get(node, old.place.node))
        spare = self._spares.take(node) if place.node == old.node else None
        if spare is None:
            return RayRank(start_rank(settings, self._group, place.bundle), place, self._leader)
        spare.become.remote(settings, old.device_index)
        return RayRank(spare, place, self._leader)

    def kill(self) -> None:
        wait([rank.kill() for rank in self.ranks], timeout=KILL_LIMIT_S)


class RayGangs:
    """All gangs of a job: a placement group for every replica, with a gang in those that have a place."""

    def __init__(self, settings: Sequence[RankSettings]) -> None:
        self._settings = settings
        self._plan, config = settings[0].plan, settings[0].config
        self._fewest = config.mesh.fewest_replicas
        self._spares, self._watchers = RaySpares(settings[0]), Watchers(config.recovery)
        self._groups = {replica: self._ask_for_place(replica) for replica in range(self._plan.mesh.data)}
        self._starting: dict[int, RayGang] = {}
        self.present: dict[int, RayGang] = {}

    def start_all(self, stop: StopFlag, say: Callable[[str], None]) -> None:
        """When there is room. Raises what `wait_for_capacity` does."""
        groups = list(self._groups.values())
        wait_for_capacity(groups, self._fewest, self._plan, self._settings[0].config.placement, stop, say)
        if self._fewest < len(groups):
            _wait_until(lambda: all(map(is_placed, groups)), MORE_ROOM_S)
        for replica in self.places():
            self.start(replica, self._plan)
            self.admit(replica)

    def lacks_place(self, replica: int) -> bool:
        return not is_placed(self._groups[replica])

    def drop(self, replica: int) -> None:
        gang = self._starting.pop(replica, None) or self.present.pop(replica, None)
        if gang is not None:
            gang.kill()
        remove_placement_group(self._groups[replica])
        self._groups[replica] = self._ask_for_place(replica)

    def places(self) -> list[int]:
        return [replica for replica, group in self._groups.items()
                if replica not in self.present and replica not in self._starting and is_placed(group)]

    def start(self, replica: int, plan: Plan) -> RayGang:
        settings = [dataclasses.replace(self._settings[rank], plan=plan) for rank in plan.mesh.gang(replica)]
        gang = self._starting[replica] = RayGang(self._groups[replica], settings, self._spares)
        return gang

    def admit(self, replica: int) -> None:
        self.present[replica] = gang = self._starting.pop(replica)
        self._spares.cover(gang.node_ids)
        self._watchers.cover(gang.node_ids)

    def leaving(self) -> dict[int, float]:
        draining: dict[str, int] = ray._private.state.state.get_draining_nodes()
        now_ms = time.time() * 1000
        ends = {node: (deadline_ms - now_ms) / 1000 if deadline_ms else 0.0 for node, deadline_ms in draining.items()}
        return {replica: min(ends[node] for node in gang.node_ids & ends.keys())
                for replica, gang in self.present.items() if draining and gang.node_ids & ends.keys()}

    def close(self) -> None:
        """No actor and no placement group is left."""
        self._spares.close()
        self._watchers.close()
        for gang in [*self.present.values(), *self._starting.values()]:
            gang.kill()
        for group in self._groups.values():
            remove_placement_group(group)

    def _ask_for_place(self, replica: int) -> PlacementGroup:
        return request_gang(self._plan, self._settings[0].config, replica)


@contextmanager
def ray_gangs(settings: Sequence[RankSettings], stop: StopFlag, say: Callable[[str], None]) -> Iterator[RayGangs]:
    """The gangs of a job, once the cluster has room for them, or for as many as the mesh asks for. On leaving, no actor and
    no placement group is left."""
    gangs = RayGangs(settings)
    try:
        gangs.start_all(stop, say)
        yield gangs
    finally:
        gangs.close()


def _wait_until(true: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not true() and time.monotonic() < end:
        time.sleep(0.1)
