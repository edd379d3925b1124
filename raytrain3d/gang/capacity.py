"""What a job asks of a cluster against what there is, in words. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain3d.plan.placement import Bundle
from raytrain3d.plan.plan import Plan

SHOWN_NODES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCapacity:
    """One node's resources."""

    name: str
    cpus: float
    free_cpus: float
    gpus: float
    free_gpus: float

    def holds(self, bundle: Bundle) -> bool:
        """Whether an empty node could."""
        return self.cpus >= bundle.cpus and self.gpus >= bundle.gpus

    def __str__(self) -> str:
        gpus = f", {self.free_gpus:g} of {self.gpus:g} GPUs" if self.gpus else ""
        return f"{self.name} has {self.free_cpus:g} of {self.cpus:g} CPUs{gpus} free"


def shortage(plan: Plan, placed: int, nodes: Sequence[NodeCapacity]) -> str:
    """What is asked, what the cluster has, and which key would help. placed: gangs that have a place."""
    mesh = plan.mesh
    shown = "; ".join(map(str, nodes[:SHOWN_NODES])) + (f"; and {len(nodes) - SHOWN_NODES} more nodes"
                                                        if len(nodes) > SHOWN_NODES else "")
    return (f"asked for {mesh.data} gang(s) of {mesh.pipeline} bundle(s) of {plan.bundle}, each bundle on one node; "
            f"{placed} placed. The cluster: {shown or 'no nodes'}. {advice(plan, nodes)}")


def advice(plan: Plan, nodes: Sequence[NodeCapacity]) -> str:
    """The key to change, with a value that would fit."""
    mesh, bundle = plan.mesh, plan.bundle
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    if bundle.gpus and gpus < mesh.size:
        return (f"{mesh.size} ranks need {mesh.size} GPUs: lower mesh.data, mesh.pipeline or mesh.tensor, set "
                "placement.device to cpu, or add nodes")
    if bundle.gpus and not any(node.gpus >= bundle.gpus for node in nodes):
        return f"No node has {bundle.gpus} GPUs: lower mesh.tensor to at most {max(node.gpus for node in nodes):g}"
    if not any(node.holds(bundle) for node in nodes) or cpus < mesh.data * mesh.pipeline * bundle.cpus:
        per_rank = _largest_share(plan, nodes)
        lower = f"lower placement.cpus_per_rank to at most {per_rank:g}, " if per_rank > 0 else ""
        return f"It is too small: {lower}lower mesh.data, mesh.pipeline or mesh.tensor, or add nodes"
    return "It is large enough but in use: wait for other jobs to end, raise placement.wait_s, or add nodes"


def _largest_share(plan: Plan, nodes: Sequence[NodeCapacity]) -> float:
    """Most CPUs a rank could have, in steps of 0.01 below one and whole above, so that all bundles fit empty nodes."""
    bundles, tensor = plan.mesh.data * plan.mesh.pipeline, plan.mesh.tensor
    choices = [*range(64, 0, -1), *(n / 100 for n in range(99, 0, -1))]
    return next((share for share in choices
                 if sum(int(node.cpus / (share * tensor) + 1e-9) for node in nodes) >= bundles), 0.0)
