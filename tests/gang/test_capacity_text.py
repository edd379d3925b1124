"""What a cluster that is too small is told."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from jobs import small_job

from raytrain3d.gang.capacity import Autoscaling, NodeCapacity, Outlook, advice, outlook, shortage
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




def autoscaling(**values: Any) -> Autoscaling:
    return Autoscaling(**{"launching": {}, "booting": 0, "failed": {}, "infeasible": False} | values)


FULL, EMPTY = [node("a", 4, 0)], [node("a", 4, 4)]


@pytest.mark.parametrize(("placed", "nodes", "state", "want", "words"), [
    (0, EMPTY, autoscaling(), Outlook.COMING, "has not answered yet"),
    (0, EMPTY, autoscaling(launching={"big": 2}, booting=1), Outlook.COMING, "2 x big launching; 1 booting"),
    (0, EMPTY, autoscaling(failed={"spot": "no capacity"}, infeasible=True), Outlook.COMING, "no spot (no capacity)"),
    (0, FULL, autoscaling(infeasible=True), Outlook.IN_USE, "wait for other jobs to end"),
    (1, FULL, autoscaling(infeasible=True), Outlook.NEVER, "It never fits"),  # what is in use is the job's own gang
    (0, EMPTY, autoscaling(infeasible=True), Outlook.NEVER, "Raise max_workers"),
    (0, EMPTY, None, Outlook.FIXED, "lower placement.cpus_per_rank")])
def test_never_is_told_from_coming(placed: int, nodes: Sequence[NodeCapacity], state: Autoscaling | None, want: Outlook,
                                   words: str) -> None:
    assert outlook(PLAN, placed, nodes, state) is want
    assert words in shortage(PLAN, placed, nodes, autoscaling=state)


def test_labels_that_no_node_has_are_named() -> None:
    text = shortage(PLAN, 0, [replace(node("a", 64, 64), labels={"rack": "r1"})], labels={"rack": "in(r2,r3)"})
    assert "each bundle on one node labelled rack=in(r2,r3)" in text
    assert "No node has the labels" in text
