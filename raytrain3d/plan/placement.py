"""Ranks to bundles: one bundle per tensor group, so that Ray itself keeps a tensor group inside a node.

A gang asks for one bundle per stage. Where bundles land is known only once the placement group stands; then they are
sorted by node before ranks are given, so that stages next to each other share a node as often as they can.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from raytrain3d.config import PlacementConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.mesh import Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """What one tensor group asks of a node."""

    cpus: float
    gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """As Ray wants it: `{"CPU": 0.4}`, zeros left out."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", float(self.gpus))) if amount > 0}

    def __str__(self) -> str:
        return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in self.resources.items()) + "}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Where one rank runs."""

    rank: int
    bundle: int
    """Index in the gang's placement group."""
    node: str


def tensor_group_bundle(mesh: Mesh, *, device: str, cpus_per_rank: float) -> Bundle:
    """The bundle of one tensor group."""
    # Ray counts resources in steps of 0.0001; 3 * 0.1 must not ask for 0.30000000000000004.
    return Bundle(cpus=round(mesh.tensor * cpus_per_rank, 4), gpus=mesh.tensor if device == "gpu" else 0)


def gang_labels(placement: PlacementConfig, replica: int) -> dict[str, str]:
    """Label -> value (or choice of values) that every node of the replica's gang must have."""
    labels = dict(placement.label)
    if placement.domain is not None and placement.domains:
        labels[placement.domain] = placement.domains[replica % len(placement.domains)]
    return labels


def has_labels(node: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one of those asked for, as Ray decides it."""
    return all(_matches(node.get(name), choice) for name, choice in wanted.items())


def _matches(value: str | None, choice: str) -> bool:
    wanted = choice.removeprefix("!")
    found = re.fullmatch(r"in\((.*)\)", wanted)
    values = [part.strip() for part in found[1].split(",")] if found else [wanted]
    return (value in values) is not choice.startswith("!")


def place_ranks(mesh: Mesh, replica: int, nodes: Mapping[int, str]) -> tuple[RankPlace, ...]:
    """Ranks of a gang, in rank order. nodes: bundle index -> node (address or id).

    Depends on nothing but which bundles share a node and how nodes sort, so a gang started again on the same nodes gets
    the same ranks there.
    """
    if sorted(nodes) != list(range(mesh.pipeline)):
        raise PlanError(f"a gang of {mesh.pipeline} stages needs bundles 0 to {mesh.pipeline - 1}, placed are "
                        f"{sorted(nodes)}")
    order = sorted(nodes, key=lambda bundle: (_natural(nodes[bundle]), bundle))
    bundles = [bundle for bundle in order for _ in range(mesh.tensor)]
    return tuple(RankPlace(rank=rank, bundle=bundle, node=nodes[bundle])
                 for rank, bundle in zip(mesh.gang(replica), bundles, strict=True))


def _natural(node: str) -> list[tuple[int, str]]:
    """Sort key with numbers by value, so that 10.0.0.9 comes before 10.0.0.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", node)]
