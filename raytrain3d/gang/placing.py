"""Asking Ray for gangs, and waiting until they have a place: what is pending, why, and whether it ever ends."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply  # type: ignore[attr-defined]
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from raytrain3d.config import JobConfig, PlacementConfig
from raytrain3d.errors import CapacityError
from raytrain3d.gang.capacity import Autoscaling, Outlook, outlook, shortage
from raytrain3d.gang.ray_nodes import node_capacities
from raytrain3d.gang.stop import StopFlag
from raytrain3d.plan.placement import gang_labels
from raytrain3d.plan.plan import Plan

FIRST_LINE_S, LONGEST_INTERVAL_S = 3.0, 60.0
"""When waiting for capacity is first said, and how far apart later lines may come (each takes twice as long)."""
NEVER_S = 20.0
"""How long an autoscaler must have done nothing about gangs that do not fit, before they never will."""
STATUS_LIMIT_S = 10


def request_gang(plan: Plan, config: JobConfig, replica: int) -> PlacementGroup:
    """The placement group of a replica: a bundle for each tensor group, so that Ray keeps one on one node, on nodes with the
    labels that are asked for."""
    placement, labels = config.placement, gang_labels(config.placement, replica)
    one_domain = placement.domain is not None and not placement.domains
    group: PlacementGroup = placement_group(
        [plan.bundle.resources] * plan.mesh.pipeline, name=f"raytrain3d/{config.run.name}/gang-{replica}",
        strategy=None if one_domain else "PACK", topology_strategy={placement.domain: "STRICT_PACK"} if one_domain else None,
        bundle_label_selector=[labels] * plan.mesh.pipeline if labels else None)
    return group


def wait_for_capacity(groups: Sequence[PlacementGroup], fewest: int, plan: Plan, placement: PlacementConfig,
                      stop: StopFlag, say: Callable[[str], None]) -> None:
    """Until so many of the groups, which are in order of their replicas, have their place.

    Raises CapacityError after placement.wait_s, or sooner when an autoscaler can never offer them; StopRequested when asked
    to stop meanwhile.
    """
    start = time.monotonic()
    next_line, limit_s, hopeless_since = FIRST_LINE_S, placement.wait_s, None
    while len(groups) - len(pending := [replica for replica, group in enumerate(groups) if not is_placed(group)]) < fewest:
        stop.check()
        waited = time.monotonic() - start
        if waited >= min(FIRST_LINE_S, limit_s):
            nodes, autoscaling, labels = node_capacities(), read_autoscaling(), gang_labels(placement, pending[0])
            placed = len(groups) - len(pending)
            view = outlook(plan, placed, nodes, autoscaling)
            hopeless_since = (hopeless_since or waited) if view is Outlook.NEVER else None
            text = shortage(plan, placed, nodes, autoscaling=autoscaling, labels=labels)
            if hopeless_since is not None and waited - hopeless_since >= NEVER_S:
                raise CapacityError(f"the cluster can never hold the job: {text}")
            if waited >= limit_s:
                raise CapacityError(f"after {limit_s:g} s the cluster has no room for the job: {text}")
            if waited >= next_line:
                say(f"waiting for capacity ({waited:.0f} of {limit_s:g} s): {text}")
                next_line = min(2 * next_line, next_line + LONGEST_INTERVAL_S)
        time.sleep(min(0.05 + waited / 10, 1.0))


def is_placed(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == "CREATED")


def read_autoscaling() -> Autoscaling | None:
    """What the cluster's autoscaler (version 2) is doing; None where there is none that says so."""
    reply = GetClusterStatusReply()
    reply.ParseFromString(GcsClient(ray.get_runtime_context().gcs_address).get_cluster_status(timeout_s=STATUS_LIMIT_S))
    state = reply.autoscaling_state
    if not reply.HasField("autoscaling_state") or not state.autoscaler_state_version:
        return None
    launching: Counter[str] = Counter()
    for request in state.pending_instance_requests:
        launching[request.ray_node_type_name] += request.count
    failed = {each.ray_node_type_name: each.reason for each in state.failed_instance_requests}
    return Autoscaling(launching=dict(launching), booting=len(state.pending_instances), failed=failed,
                       infeasible=bool(state.infeasible_gang_resource_requests))
