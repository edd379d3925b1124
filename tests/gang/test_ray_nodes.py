"""A job on a Ray cluster of several nodes on this machine: a node is killed, another one comes, and one is drained."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos import plan_kills
from chaos_jobs import Undisturbed, lines, make_job, outcome
from fake_jobs import SUPPORT, wait_until
from metadata import served
from rooms import Rooms

from raytrain3d.config import DataRange, JobConfig, MeshConfig
from raytrain3d.load import dump

os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")  # read when Ray is imported
ray = pytest.importorskip("ray")
from raytrain3d.gang.ray_notices import drain  # noqa: E402 - imports Ray
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400),
              pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")]

DRIVER = """
import sys
from raytrain3d.gang.run import run_job
from raytrain3d.load import load
from rooms import PacedTrainer
sys.exit(run_job(load(sys.argv[1]), launcher="ray", address=sys.argv[2], trainer=PacedTrainer))
"""
SOON = {"RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "1000", "RAY_health_check_failure_threshold": "3"}
"""A lost node is noticed in about 3 s instead of 15 s."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without room for ranks and two nodes with room for one gang each."""
    from ray.cluster_utils import Cluster
    for name, value in SOON.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])]))
    with tempfile.TemporaryDirectory(prefix="rt3d-", ignore_cleanup_errors=True) as directory:
        made = Cluster(initialize_head=True, head_node_args={
            "num_cpus": 0, "temp_dir": directory, "gcs_server_port": free_port(), "include_dashboard": False,
            "object_store_memory": 80 * 2**20})
        for _ in range(2):
            add_node(made)
        yield made
        made.shutdown()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)


def kill(node: Any) -> None:
    """At once, with everything on it."""
    raylets = [psutil.Process(each.process.pid) for each in node.all_processes["raylet"]]
    for process in [child for raylet in raylets for child in raylet.children(recursive=True)] + raylets:
        process.send_signal(signal.SIGKILL)


def wait_for_event(config: JobConfig, kind: str, count: int = 1) -> dict[str, Any]:
    """The `count`-th one."""
    def found() -> list[dict[str, Any]]:
        try:
            return [event for event in lines(config, "events.jsonl") if event["event"] == kind]
        except (OSError, json.JSONDecodeError):
            return []

    wait_until(lambda: len(found()) >= count, 120, lambda: f"no {kind}: {lines(config, 'events.jsonl')}")
    return found()[count - 1]


def wait_for_step(config: JobConfig, step: int) -> None:
    def is_done() -> bool:
        try:
            return any(line["step"] >= step for line in lines(config, "metrics.jsonl"))
        except (OSError, json.JSONDecodeError):
            return False

    wait_until(is_done, 120)


@contextmanager
def driver(config: JobConfig, address: str) -> Iterator[Callable[[], int]]:
    """The job's driver in a process of its own. Yields a wait for its exit code."""
    file, output = Path(config.run.directory) / "job.yaml", Path(config.run.directory) / "output.txt"
    file.write_text(dump(config))
    with output.open("w") as out, subprocess.Popen([sys.executable, "-c", DRIVER, str(file), address], stdout=out,
                                                   stderr=subprocess.STDOUT) as process:
        try:
            yield lambda: process.wait(120)
        except BaseException:
            print(output.read_text())  # noqa: T201 - pytest shows it with the failure
            raise
        finally:
            process.kill()


def test_a_node_is_lost_another_one_comes_and_one_is_drained(cluster: Any, undisturbed: Undisturbed) -> None:
    calm = make_job(undisturbed.directory, "nodes", (2, 2, 1))
    config = replace(calm, mesh=MeshConfig(data=DataRange(min=1, max=2), pipeline=2),
                     placement=replace(calm.placement, cpus_per_rank=0.5))
    rooms = Rooms(config)
    plan_kills(config, [])
    rooms.pace(2)
    with driver(config, cluster.address) as wait_for_end:
        wait_for_step(config, 3)
        first, second = cluster.list_all_nodes()[1:]
        kill(first)
        lost = wait_for_event(config, "failure")["time"]
        assert wait_for_event(config, "recovered")["time"] - lost < 30
        add_node(cluster)
        wait_for_event(config, "regrouped")
        drain(cluster.address, second.node_id, time.time() + 60, "spot")
        wait_for_event(config, "regrouped", 2)
        rooms.pace(0)
        assert wait_for_end() == 0
    told = ("failure", "gang given up", "gang taken in", "notice", "regrouped", "recovered")
    assert [event["event"] for event in lines(config, "events.jsonl") if event["event"] in told] == [
        "failure", "gang given up", "recovered", "gang taken in", "regrouped", "notice", "gang given up", "regrouped"]
    numbers, wanted = outcome(config)[0], undisturbed[2, 2, 1][0]
    assert [loss for _, loss, *_ in numbers] == pytest.approx([loss for _, loss, *_ in wanted], rel=1e-5)


def test_a_cloud_notice_drains_the_node_and_a_checkpoint_is_saved(cluster: Any, undisturbed: Undisturbed) -> None:
    """Both nodes have the same metadata service, so both get the notice."""
    calm = make_job(undisturbed.directory, "notice", (2, 2, 1))
    notice = threading.Event()

    def answer(method: str, path: str, headers: Any) -> str:
        return "TRUE" if notice.is_set() else "FALSE"

    with served(answer) as address:
        config = replace(calm, placement=replace(calm.placement, cpus_per_rank=0.5),
                         checkpoint=replace(calm.checkpoint, interval=None),
                         recovery=replace(calm.recovery, notices="gcp", metadata_address=address))
        rooms = Rooms(config)
        plan_kills(config, [])
        rooms.pace(1)
        with driver(config, cluster.address) as wait_for_end:
            wait_for_step(config, 3)
            notice.set()
            noticed = wait_for_event(config, "notice")
            saved = wait_for_event(config, "checkpoint")
            rooms.pace(0)
            assert wait_for_end() == 0
    assert saved["time"] < noticed["time"] + noticed["seconds"] and 0 < noticed["seconds"] <= 30
    assert outcome(config) == undisturbed[2, 2, 1]
