import random
from itertools import pairwise

import pytest

from raytrain3d.config import PlacementConfig
from raytrain3d.errors import ConfigError, PlanError
from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.placement import gang_labels, has_labels, place_ranks, tensor_group_bundle


def test_bundle_holds_a_tensor_group() -> None:
    mesh = Mesh(data=2, pipeline=2, tensor=3)
    assert tensor_group_bundle(mesh, device="cpu", cpus_per_rank=0.1).resources == {"CPU": 0.3}
    gpus = tensor_group_bundle(mesh, device="gpu", cpus_per_rank=2.0)
    assert gpus.resources == {"CPU": 6.0, "GPU": 3.0}
    assert str(gpus) == "{CPU: 6, GPU: 3}"


def test_bundles_are_sorted_by_node_before_ranks_are_given() -> None:
    mesh = Mesh(data=2, pipeline=4, tensor=2)
    places = place_ranks(mesh, 1, {0: "10.0.0.10", 1: "10.0.0.9", 2: "10.0.0.10", 3: "10.0.0.9"})
    assert [place.rank for place in places] == list(range(8, 16))
    assert [place.bundle for place in places] == [1, 1, 3, 3, 0, 0, 2, 2]
    assert [place.node for place in places] == ["10.0.0.9"] * 4 + ["10.0.0.10"] * 4


@pytest.mark.parametrize("seed", range(20))
def test_tensor_groups_stay_on_a_node_and_stages_are_packed(seed: int) -> None:
    draw = random.Random(seed)
    mesh = Mesh(data=3, pipeline=draw.randint(1, 8), tensor=draw.choice((1, 2, 8)))
    nodes = {bundle: draw.choice(("a7", "a10", "b", "192.168.0.2")) for bundle in range(mesh.pipeline)}
    replica = draw.randrange(3)
    node_of = {place.rank: place.node for place in place_ranks(mesh, replica, nodes)}
    assert list(node_of) == list(mesh.gang(replica))
    assert all(len({node_of[rank] for rank in mesh.group("tensor", first)}) == 1 for first in node_of)
    along = [node_of[rank] for rank in mesh.group("pipeline", mesh.gang(replica)[0])]
    assert sum(a != b for a, b in pairwise(along)) == len(set(along)) - 1


@pytest.mark.parametrize("nodes", [{}, {0: "a"}, {0: "a", 2: "a"}, {0: "a", 1: "a", 2: "a"}])
def test_every_stage_needs_its_bundle(nodes: dict[int, str]) -> None:
    with pytest.raises(PlanError, match="needs bundles 0 to 1"):
        place_ranks(Mesh(pipeline=2), 0, nodes)


def test_replicas_are_spread_over_domains_in_turn() -> None:
    placement = PlacementConfig(label={"market": "spot"}, domain="rack", domains=("r1", "r2"))
    assert [gang_labels(placement, replica)["rack"] for replica in range(3)] == ["r1", "r2", "r1"]
    assert gang_labels(placement, 0)["market"] == "spot"
    assert gang_labels(PlacementConfig(domain="rack"), 0) == {}


@pytest.mark.parametrize(("choice", "fits"), [("r1", True), ("r2", False), ("!r1", False), ("!r2", True),
                                              ("in(r2, r1)", True), ("in(r2,r3)", False), ("!in(r2,r3)", True),
                                              ("!in(r1,r3)", False)])
def test_labels_are_matched_as_ray_does(choice: str, fits: bool) -> None:
    assert has_labels({"rack": "r1", "market": "spot"}, {"rack": choice}) is fits
    assert has_labels({}, {}) and not has_labels({}, {"rack": "r1"})


@pytest.mark.parametrize("keys", [{"domains": ("r1",)}, {"domain": "rack", "domains": ("r1",), "label": {"rack": "r2"}},
                                  {"label": {"rack": ""}}])
def test_labels_that_contradict_each_other(keys: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^placement\.(domains|label)"):
        PlacementConfig(**keys)  # type: ignore[arg-type]
