"""Gangs on a cluster whose autoscaler adds nodes for them and takes them away; fake nodes, fake trainers."""

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fake_autoscaling import FakeAutoscaling
from fake_jobs import SUPPORT, Driver, fake_job, wait_until

from raytrain3d.config import JobConfig

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
TYPES = {"plain": {"resources": {"CPU": 2}, "labels": {"market": "on-demand"}, "max_workers": 4},
         "spot": {"resources": {"CPU": 2}, "labels": {"market": "spot", "rack": "r1"}, "max_workers": 2}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeAutoscaling]:
    cluster = FakeAutoscaling(TYPES, max_workers=3)
    cluster.environment["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])])
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.stop()
    assert not cluster.processes()


def raylets(cluster: FakeAutoscaling) -> list[psutil.Process]:
    """Of the nodes that were added."""
    found = [process for process in cluster.processes() if process.name() == "raylet"]
    return [process for process in found if "--head" not in process.cmdline()]


def last_step(config: JobConfig) -> int:
    lines = Path(config.run.directory, config.run.name, "metrics.jsonl").read_text().splitlines()
    step: int = json.loads(lines[-1])["step"]
    return step


def labelled(config: JobConfig, **keys: object) -> JobConfig:
    return replace(config, placement=replace(config.placement, **keys))


def driver(cluster: FakeAutoscaling, config: JobConfig) -> Driver:
    return Driver(config, "ray", cluster.address)


def test_nodes_come_are_lost_and_replaced_and_go(cluster: FakeAutoscaling, tmp_path: Path) -> None:
    """A job for two gangs of two CPUs starts with no worker. A node is lost in the middle: another one comes."""
    assert raylets(cluster) == []
    config = labelled(fake_job(tmp_path, steps=100_000, mesh=(2, 2, 1), cpus_per_rank=1, deaths=3, wait_s=120),
                      label={"market": "spot"})
    with driver(cluster, config) as job:
        job.wait_for("step 1/", 120)
        assert re.search(r"waiting for capacity .*market=spot; 0 placed.*(launching|booting|not answered)", job.output)
        nodes = raylets(cluster)
        assert len(nodes) == 2
        nodes[0].kill()
        job.wait_for("goes on after step", 150)
        wait_until(lambda: len(raylets(cluster)) == 2, 60, lambda: str(raylets(cluster)))
        step = int(re.findall(r"goes on after step (\d+)", job.output)[-1])
        wait_until(lambda: last_step(config) > step + 50, 60)
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(60) == 143
    wait_until(lambda: raylets(cluster) == [], 90, lambda: str(raylets(cluster)))


def test_a_limit_that_is_too_small_ends_the_wait_with_the_explanation(cluster: FakeAutoscaling, tmp_path: Path) -> None:
    config = labelled(fake_job(tmp_path, mesh=(1, 4, 1), cpus_per_rank=2, wait_s=300), domain="rack", domains=("r1",))
    with driver(cluster, config) as job:
        assert job.process.wait(120) != 0
    assert "the cluster can never hold the job: asked for 1 gang(s) of 4 bundle(s) of {CPU: 2}" in job.output
    assert "It never fits" in job.output and "Raise max_workers" in job.output
