"""What a cluster that is too small is told."""

from collections.abc import Sequence

import pytest
from jobs import small_job

from raytrain3d.gang.capacity import NodeCapacity, advice, shortage
from raytrain3d.plan.plan import make_plan


def node(name: str, cpus: float, free: float, gpus: float = 0) -> NodeCapacity:
    return NodeCapacity(name=name, cpus=cpus, free_cpus=free, gpus=gpus, free_gpus=gpus)


PLAN = make_plan(small_job(mesh={"data": 2, "pipeline": 2, "tensor": 2}))  # 4 bundles of 2 CPUs
GPU_PLAN = make_plan(small_job(mesh={"data": 2, "pipeline": 2, "tensor": 2}), device="gpu")


@pytest.mark.parametrize(("nodes", "words"), [
    ([node("a", 2, 2)], "lower placement.cpus_per_rank to at most 0.25"),
    ([node("a", 1, 1)] * 8, "lower placement.cpus_per_rank to at most 0.5"),
    ([node("a", 8, 1)], "large enough but in use"), ([], "add nodes")])
def test_the_key_that_would_help_on_cpus(nodes: Sequence[NodeCapacity], words: str) -> None:
    assert words in advice(PLAN, nodes)


def test_the_key_that_would_help_on_gpus() -> None:
    assert "set placement.device to cpu" in advice(GPU_PLAN, [node("a", 64, 64, gpus=4)])
    assert "lower mesh.tensor to at most 1" in advice(GPU_PLAN, [node("a", 64, 64, gpus=1)] * 8)


def test_what_is_asked_and_what_there_is() -> None:
    text = shortage(PLAN, 1, [node("10.0.0.1", 2, 0.5)])
    assert "2 gang(s) of 2 bundle(s) of {CPU: 2}" in text
    assert "1 placed" in text
    assert "10.0.0.1 has 0.5 of 2 CPUs free" in text


