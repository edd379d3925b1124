"""The cost model: collectives, layers, steps, constants, search."""

from collections.abc import Callable
from dataclasses import replace
from math import log2
from pathlib import Path

import pytest

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, RunConfig, TrainConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.calibration import Calibration
from raytrain3d.plan.candidates import Space, candidates, whole_space
from raytrain3d.plan.catalogue import NODES, read_nodes
from raytrain3d.plan.collectives import TENSOR_DATA_PIPELINE, Group, Links, group_along
from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.device_memory import Allocation
from raytrain3d.plan.fit import fit, solve
from raytrain3d.plan.found_table import found_table
from raytrain3d.plan.makespan import compiled, stage_seconds
from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.profile import Profile
from raytrain3d.plan.search import Evaluator, Search, fewest_ranks, search_layouts
from raytrain3d.plan.step_time import Cluster, pipeline_s

Job = Callable[..., JobConfig]
A100 = NODES["a100"]
CLUSTER = Cluster(node=A100, calibration=Calibration())
LLAMA_8B = ModelConfig(vocabulary=128256, hidden=4096, blocks=32, heads=32, kv_heads=8, feed_forward=14336)


def llama(**changes: int) -> JobConfig:
    return JobConfig(run=RunConfig(name="test"), data=DataConfig(path="unused"), model=LLAMA_8B, mesh=MeshConfig(**changes),
                     train=TrainConfig(steps=1, global_batch=64, sequence=4096, dtype="bf16"))


def test_group_lies_on_nodes_as_ranks_fill_them() -> None:
    mesh = Mesh(data=4, pipeline=4, tensor=4)
    assert group_along("tensor", mesh, A100) == Group(size=4, per_node=4)
    assert group_along("pipeline", mesh, A100) == Group(size=4, per_node=2)
    assert group_along("data", mesh, A100) == Group(size=4, per_node=1)
    assert group_along("data", mesh, A100, TENSOR_DATA_PIPELINE) == Group(size=4, per_node=2)
    assert group_along("tensor", Mesh(tensor=16), A100) == Group(size=16, per_node=8)


def test_ring_and_tree() -> None:
    links = Links(node=A100, calibration=Calibration(inside=1.0, network=1.0, inside_step_s=1e-6, network_step_s=1e-5))
    inside, across = Group(size=8, per_node=8), Group(size=64, per_node=1)
    assert links.gather_s(8e9, inside) == pytest.approx(7 / 8 * 8 / 300 + 7e-6)
    assert links.gather_s(8e9, across) == pytest.approx(63 / 64 * 8 / 25 + 63e-5)
    assert links.all_reduce_s(8e9, inside) == pytest.approx(2 * links.gather_s(8e9, inside))
    assert links.all_reduce_s(8e3, across) == pytest.approx(2 * 8e3 / 25e9 + 2 * log2(64) * 1e-5), "few bytes take the tree"
    assert links.all_reduce_s(8e9, Group(size=1, per_node=1)) == 0


def test_group_of_several_ranks_on_a_node_uses_their_ports() -> None:
    links = Links(node=A100, calibration=Calibration(inside=1.0, network=1.0))
    assert links.bandwidth(Group(size=16, per_node=4)) == pytest.approx(100e9)
    assert links.bandwidth(Group(size=128, per_node=8)) == pytest.approx(200e9)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2), ("gpipe", 1)])
@pytest.mark.parametrize("hop_s", [0.0, 0.2])
def test_long_pipelines_are_told_from_short_ones(schedule: str, chunks: int, hop_s: float) -> None:
    stages = [LayerCost(forward=1 + 0.1 * (i % 3), backward_input=1.1, backward_weight=0.9) for i in range(4 * chunks)]
    seconds = [*(value for cost in stages for value in stage_seconds(cost, 1.0)), 0.0]
    exact = compiled(schedule, 4, 40, chunks).makespan(seconds, hop_s)
    assert pipeline_s(schedule, 4, 40, chunks, stages, hop_s) == pytest.approx(exact, rel=0.03)


def test_step_of_equal_stages_is_work_and_idle_time() -> None:
    """No links, no launches: (m + p - 1) / (m p) of the work in the pipeline."""
    free = Calibration(launch_s=0, handover_s=0, network_step_s=0, inside_step_s=0, step_s=0)
    evaluator = Evaluator(cluster=Cluster(node=replace(A100, inside_gb_s=1e9, network_gb_s=1e9), calibration=free),
                          allocation=Allocation())
    one, four = (evaluator.evaluate(llama(pipeline=p)).step for p in (1, 4))
    assert one.idle == pytest.approx(0, abs=1e-9)
    assert four.pipeline >= one.pipeline / 4 * (64 + 3) / 64
    assert four.pipeline == pytest.approx(one.pipeline / 4 * (64 + 3) / 64, rel=0.08)


def test_tensor_group_across_nodes_is_slower_than_inside() -> None:
    evaluator = Evaluator(cluster=CLUSTER, allocation=Allocation())
    inside, across = (evaluator.evaluate(llama(tensor=t, data=16 // t)).step for t in (8, 16))
    assert across.tensor > 1.5 * inside.tensor


def test_levels_of_memory_and_time_go_the_right_way() -> None:
    evaluator = Evaluator(cluster=CLUSTER, allocation=Allocation())
    job = llama(tensor=4, data=2)
    plain, again = (evaluator.evaluate(replace(job, train=replace(job.train, recompute=kind))) for kind in ("none", "full"))
    sharded = evaluator.evaluate(replace(job, train=replace(job.train, sharding="optimizer")))
    divided = evaluator.evaluate(replace(job, train=replace(job.train, sequence_parallel=True)))
    assert plain.step.total < again.step.total < 1.5 * plain.step.total
    assert again.needed < plain.needed
    assert sharded.needed < plain.needed
    assert divided.needed < plain.needed


def test_candidates_keep_the_rules() -> None:
    found = list(candidates(llama(), 64, A100, whole_space()))
    assert found
    for job in found:
        mesh = job.mesh
        assert mesh.data * mesh.pipeline * mesh.tensor == 64
        assert mesh.tensor <= 8
        assert job.train.num_micro_batches % mesh.data == 0


def test_search_finds_what_trying_everything_finds() -> None:
    space = Space(shardings=("none", "optimizer"), recomputes=("none", "full"), micro_batches=(1, 2),
                  schedules=(("1f1b", 1), ("zb_v", 2)))
    evaluator = Evaluator(cluster=CLUSTER, allocation=Allocation())
    best = Search(llama(), 16, evaluator, space).fastest()
    tried = [evaluator.evaluate(job) for job in candidates(llama(), 16, A100, space)]
    fitting = [choice.step.total for choice in tried if choice.fits()]
    assert best is not None
    assert len(fitting) < len(tried)
    assert best.step.total <= min(fitting) * 1.003
    assert best.fits()
    assert sum(best.config.pipeline.layers or ()) == LLAMA_8B.blocks + 2


def test_what_memory_costs() -> None:
    """Beside the best that fits stands the best there would be with all the memory in the world."""
    space = Space(shardings=("optimizer",), recomputes=("none", "full"), micro_batches=(1, 2), schedules=(("1f1b", 1),))
    tight = Evaluator(cluster=replace(CLUSTER, node=replace(A100, memory_gib=40)), allocation=Allocation())
    for evaluator, limited in ((tight, True), (Evaluator(cluster=replace(CLUSTER, node=replace(A100, memory_gib=999)),
                                                         allocation=Allocation()), False)):
        found = Search(llama(), 16, evaluator, space).run()
        assert found is not None
        assert (found.roomy.step.total < found.best.step.total * 0.997) == limited
        assert found.roomy.fits() != limited
        assert ("with more of it a step would be" in found_table(found, None)) == limited


def test_the_best_few_are_in_order_and_differ() -> None:
    space = Space(shardings=("none", "optimizer"), recomputes=("none", "full"), micro_batches=(1, 2),
                  schedules=(("1f1b", 1), ("zb_v", 2)))
    evaluator = Evaluator(cluster=CLUSTER, allocation=Allocation())
    ranked = Search(llama(), 16, evaluator, space).ranked(5)
    times = [choice.step.total for choice in ranked]
    assert len(ranked) == 5 and times == sorted(times)
    assert all(choice.fits() for choice in ranked)
    kinds = {(choice.config.mesh, choice.config.pipeline.schedule, choice.config.train.micro_batch) for choice in ranked}
    assert len(kinds) == 5
    tried = [evaluator.evaluate(job) for job in candidates(llama(), 16, A100, space)]
    best: dict[object, float] = {}
    for choice in tried:
        if choice.fits():
            key = choice.config.mesh, choice.config.pipeline.schedule, choice.config.train.micro_batch
            best[key] = min(best.get(key, 1e9), choice.step.total)
    assert times == pytest.approx(sorted(best.values())[:5])


def test_fewest_ranks_are_the_fewest() -> None:
    """Whole nodes, once there are several devices."""
    evaluator = Evaluator(cluster=CLUSTER, allocation=Allocation())
    found = fewest_ranks(llama(), 1, evaluator)
    assert found is not None and found.fits()
    for fewer in range(1, found.num_ranks):
        assert Search(llama(), fewer, evaluator, whole_space()).fastest() is None, fewer


def test_nothing_fits() -> None:
    evaluator = Evaluator(cluster=CLUSTER, allocation=Allocation())
    assert Search(llama(), 1, evaluator, whole_space()).run() is None
    with pytest.raises(PlanError, match=r"no layout of this job fits 1 device of a100 .*; the smallest change that fits: "
                       r".* devices are enough: data \d x"):
        search_layouts(llama(), 1, evaluator)


def test_fit_finds_constants_among_wild_values() -> None:
    points = [(x, 3 * x + 0.5) for x in range(1, 30)]
    measured = [y * (10 if i == 7 else 1) for i, (_, y) in enumerate(points)]
    found = fit([1.0, 1.0], lambda v: [v[0] * x + v[1] for x, _ in points], measured)
    assert found == pytest.approx([3, 0.5], abs=0.15)


def test_linear_equations() -> None:
    assert solve([[0.0, 2.0], [1.0, 1.0]], [4.0, 5.0]) == pytest.approx([3.0, 2.0])


def test_calibration_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    profile = Profile(calibration=Calibration(matmul=0.5), allocation=Allocation(base_gb=1.0), about="here")
    profile.save(str(file))
    assert Profile.read(str(file)) == profile
    assert "matmul               0.5" in profile.text()
    for text, error in (('{"calibration": {"matmull": 1}}', "calibration, has unknown keys matmull: valid are attention"),
                        ('{"matmul": 1}', "has unknown keys matmul: valid are about, allocation, calibration"),
                        ('{"allocation": {"state": "much"}}', "allocation: could not convert"), ("[]", "is no JSON object"),
                        ('{"calibration": {"matmul": -1}}', "matmul is -1.0: must be at least 0"), ("{", "is no JSON:")):
        file.write_text(text)
        with pytest.raises(PlanError, match=error):
            Profile.read(str(file))
    with pytest.raises(PlanError, match="cannot be read"):
        Profile.read(str(tmp_path / "none.json"))


def test_nodes_of_a_file_join_the_catalogue(tmp_path: Path) -> None:
    file = tmp_path / "nodes.json"
    file.write_text('[{"name": "mine"}]')
    with pytest.raises(PlanError, match="missing"):
        read_nodes(str(file))
