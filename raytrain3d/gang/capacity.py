"""What a job asks of a cluster against what there is, in words. Pure."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raytrain3d.plan.placement import Bundle, has_labels
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
    labels: Mapping[str, str] = field(default_factory=dict)

    def holds(self, bundle: Bundle) -> bool:
        """Whether an empty node could."""
        return self.cpus >= bundle.cpus and self.gpus >= bundle.gpus

    def __str__(self) -> str:
        gpus = f", {self.free_gpus:g} of {self.gpus:g} GPUs" if self.gpus else ""
        return f"{self.name} has {self.free_cpus:g} of {self.cpus:g} CPUs{gpus} free"


@dataclass(frozen=True, kw_only=True, slots=True)
class Autoscaling:
    """What an autoscaler is doing."""

    launching: Mapping[str, int]
    """Node type -> nodes that were asked of the provider."""
    booting: int
    """Nodes on their way into the cluster."""
    failed: Mapping[str, str]
    """Node type -> why the provider gave none. It is asked again."""
    infeasible: bool
    """It finds no place for gangs, not even with all the nodes that it may add."""

    @property
    def is_busy(self) -> bool:
        return bool(self.launching or self.booting or self.failed)

    def __str__(self) -> str:
        coming = [f"{count} x {name} launching" for name, count in self.launching.items()]
        coming += [f"{self.booting} booting"] if self.booting else []
        failed = [f"the provider has no {name}{f' ({why})' if why else ''}, it is asked again"
                  for name, why in self.failed.items()]
        return "; ".join(coming + failed)


class Outlook(enum.Enum):
    """How a wait for room goes on."""

    COMING = "nodes are coming"
    IN_USE = "others have to end first"
    NEVER = "it never fits"
    FIXED = "nobody adds nodes by himself"


def outlook(plan: Plan, placed: int, nodes: Sequence[NodeCapacity], autoscaling: Autoscaling | None) -> Outlook:
    """placed: gangs that have a place."""
    if autoscaling is None:
        return Outlook.FIXED
    if autoscaling.is_busy or not autoscaling.infeasible:
        return Outlook.COMING
    ours = placed * plan.mesh.pipeline
    cpus, gpus = (sum(node.cpus - node.free_cpus for node in nodes), sum(node.gpus - node.free_gpus for node in nodes))
    others = cpus > ours * plan.bundle.cpus + 1e-3 or gpus > ours * plan.bundle.gpus + 1e-3
    return Outlook.IN_USE if others else Outlook.NEVER


def shortage(plan: Plan, placed: int, nodes: Sequence[NodeCapacity], *, autoscaling: Autoscaling | None = None,
             labels: Mapping[str, str] | None = None) -> str:
    """What is asked, what the cluster has, and which key would help. placed: gangs that have a place. labels: those that
    nodes of the next gang must have."""
    mesh = plan.mesh
    shown = "; ".join(map(str, nodes[:SHOWN_NODES])) + (f"; and {len(nodes) - SHOWN_NODES} more nodes"
                                                        if len(nodes) > SHOWN_NODES else "")
    return (f"asked for {mesh.data} gang(s) of {mesh.pipeline} bundle(s) of {plan.bundle}, each bundle on one node"
            f"{_asked(labels)}; {placed} placed. The cluster: {shown or 'no nodes'}. "
            f"{_way_out(plan, placed, nodes, autoscaling, labels or {})}")


def _asked(labels: Mapping[str, str] | None) -> str:
    return f" labelled {', '.join(f'{name}={value}' for name, value in labels.items())}" if labels else ""


def _way_out(plan: Plan, placed: int, nodes: Sequence[NodeCapacity], autoscaling: Autoscaling | None,
             labels: Mapping[str, str]) -> str:
    fitting = [node for node in nodes if has_labels(node.labels, labels)]
    match outlook(plan, placed, nodes, autoscaling):
        case Outlook.COMING:
            return f"Nodes are coming: {autoscaling}" if str(autoscaling) else "The autoscaler has not answered yet"
        case Outlook.NEVER:
            return ("It never fits: the autoscaler may add no more nodes that would help. Raise max_workers of the cluster "
                    "or of its node types, ask for labels that a type has, or lower mesh.data, mesh.pipeline or mesh.tensor")
        case Outlook.IN_USE:
            return "It is in use, and the autoscaler may add no more: wait for other jobs to end, or raise its max_workers"
    if labels and not fitting:
        return f"No node has the labels of placement.label and placement.domains{_asked(labels)}: change them, or add nodes"
    return advice(plan, fitting)


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
