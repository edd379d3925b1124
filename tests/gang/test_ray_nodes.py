"""A job on a Ray cluster of several nodes on this machine: a node is killed, another one comes, and one is drained."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
from chaos import plan_kills
from chaos_jobs import Undisturbed, lines, make_job, outcome
from fake_jobs import SUPPORT, wait_until
from rooms import PacedTrainer, Rooms

from raytrain3d.config import DataRange, JobConfig, MeshConfig
from raytrain3d.gang.run import run_job

os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")  # read when Ray is imported
ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400),
              pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")]

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


def test_a_node_is_lost_another_one_comes_and_one_is_drained(cluster: Any, undisturbed: Undisturbed) -> None:
    calm = make_job(undisturbed.directory, "nodes", (2, 2, 1))
    config = replace(calm, mesh=MeshConfig(data=DataRange(min=1, max=2), pipeline=2),
                     placement=replace(calm.placement, cpus_per_rank=0.5))
    rooms = Rooms(config)
    plan_kills(config, [])
    times: dict[str, float] = {}
    errors: list[BaseException] = []

    def act() -> None:
        rooms.pace(2)
        wait_for_step(config, 3)
        first, second = cluster.list_all_nodes()[1:]
        kill(first)
        times["lost"] = wait_for_event(config, "failure")["time"]
        times["goes on"] = wait_for_event(config, "recovered")["time"]
        add_node(cluster)
        wait_for_event(config, "gang taken in")
        wait_for_event(config, "regrouped")
        drained = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address, "--node-id",
             second.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot",
             "--deadline-remaining-seconds", "60"], capture_output=True, text=True)
        assert drained.returncode == 0, drained.stderr
        wait_for_event(config, "regrouped", 2)
        rooms.pace(0)

    def run_act() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            rooms.pace(0)

    thread = threading.Thread(target=run_act)
    thread.start()
    output = io.StringIO()
    code = run_job(config, launcher="ray", address=cluster.address, output=output, trainer=PacedTrainer)
    thread.join()
    assert not errors and code == 0, f"{errors}\n{output.getvalue()}"
    assert times["goes on"] - times["lost"] < 30
    events = [event for event in lines(config, "events.jsonl")
              if event["event"] in ("failure", "gang given up", "gang taken in", "notice", "regrouped", "recovered")]
    assert [event["event"] for event in events] == ["failure", "gang given up", "recovered", "gang taken in", "regrouped",
                                                    "notice", "gang given up", "regrouped"], output.getvalue()
    numbers, wanted = outcome(config)[0], undisturbed[2, 2, 1][0]
    assert [loss for _, loss, *_ in numbers] == pytest.approx([loss for _, loss, *_ in wanted], rel=1e-5)
