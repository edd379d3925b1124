"""Jobs on Ray with fake trainers: one local cluster for the module, 2 CPUs, private."""

import io
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fake_jobs import SUPPORT, Driver, fake_job, wait_until
from fake_trainer import FakeTrainer

from raytrain3d.checkpoint.store import steps
from raytrain3d.config import JobConfig
from raytrain3d.errors import CapacityError, ConfigError, RankFailed
from raytrain3d.gang.mailbox import ask_run
from raytrain3d.gang.run import run_job

os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")  # read when Ray is imported
ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning",
                                                          "ignore::FutureWarning")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a cluster with 2 CPUs that this process is connected to."""
    path = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = path  # of its workers
    with tempfile.TemporaryDirectory(prefix="rt3d-", ignore_cleanup_errors=True) as directory:
        context = ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
                           object_store_memory=80 * 2**20, _temp_dir=directory)
        yield context.address_info["gcs_address"]
        ray.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(autouse=True)
def nothing_left(cluster: str) -> Iterator[None]:
    """After each test: no live actor, no placement group, all CPUs free."""
    yield
    wait_until(lambda: ray.available_resources().get("CPU") == 2, 10, lambda: str(ray.available_resources()))
    groups = ray.util.placement_group_table().values()
    assert [group["state"] for group in groups if group["state"] != "REMOVED"] == []
    assert actors() == {}


def actors() -> dict[str, int]:
    """Name -> process of every live actor."""
    return {actor["Name"]: actor["Pid"] for actor in ray._private.state.actors().values() if actor["State"] != "DEAD"}


def run(config: JobConfig) -> tuple[int, str]:
    """(exit code, what was printed)"""
    output = io.StringIO()
    return run_job(config, launcher="ray", output=output, trainer=FakeTrainer), output.getvalue()


@contextmanager
def after_first_step(config: JobConfig, act: Callable[[], object]) -> Iterator[None]:
    """Meanwhile, in a thread: act() once the job has finished a step."""
    metrics = Path(config.run.directory) / config.run.name / "metrics.jsonl"

    def wait_and_act() -> None:
        wait_until(lambda: metrics.exists() and bool(metrics.read_text()), 40)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    yield
    thread.join()


def test_eight_ranks_run_on_two_cpus(cluster: str, tmp_path: Path) -> None:
    seen: list[str] = []
    config = fake_job(tmp_path, steps=100, mesh=(2, 2, 2), checkpoint=50)
    with after_first_step(config, lambda: seen.extend(actors())):
        code, text = run(config)
    assert code == 0 and "finished: 100 steps" in text
    assert sorted(seen) == ["raytrain3d/job", *(f"raytrain3d/job/rank-{rank:04d} pipeline {rank // 2 % 2}"
                                                for rank in range(8))]
    assert steps(f"{config.run.directory}/job") == [50, 100]
    assert "rank 7 pipeline 1 INFO" in (tmp_path / "runs" / "job" / "logs" / "rank-0007.log").read_text()


def test_a_killed_rank_ends_the_job_with_its_name(cluster: str, tmp_path: Path) -> None:
    config = fake_job(tmp_path, steps=10_000, mesh=(1, 2, 2))
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(actors()["raytrain3d/job/rank-0003 pipeline 1"], signal.SIGKILL)

    with after_first_step(config, kill), pytest.raises(RankFailed) as caught:
        run(config)
    assert time.monotonic() - killed[0] < 8
    assert caught.value.rank == 3
    first = str(caught.value).splitlines()[0]
    assert first.startswith("rank 3 (replica 0, stage 1, tensor 1) on node ") and "died in step" in first
    assert "Worker unexpectedly exits" in first


def run_with_a_kill(config: JobConfig, victim: str, cluster: str, *,
                    waiting_for: str | None = None) -> tuple[str, dict[str, int], dict[str, int]]:
    """(what was printed, actors before, actors after) of a job whose actor `victim` is killed, once there is an actor
    `waiting_for`, and that is stopped when it has recovered."""
    before: dict[str, int] = {}
    after: dict[str, int] = {}

    def kill() -> None:
        wait_until(lambda: waiting_for is None or waiting_for in actors(), 40)
        before.update(actors())
        os.kill(before[victim], signal.SIGKILL)
        events = Path(config.run.directory) / "job" / "events.jsonl"
        wait_until(lambda: '"recovered"' in events.read_text(), 60, events.read_text)
        after.update(actors())
        ask_run("job", "stop", directory="nowhere", address=cluster)

    with after_first_step(config, kill):
        code, text = run(config)
    assert code == 0, text
    return text, before, after


@pytest.mark.parametrize("rank", [2, 3])
def test_a_killed_actor_is_replaced_in_its_bundle(rank: int, cluster: str, tmp_path: Path) -> None:
    """Rank 2 leads its gang."""
    config = fake_job(tmp_path, steps=10_000, mesh=(2, 2, 1), deaths=1)
    victim = f"raytrain3d/job/rank-{rank:04d} pipeline {rank % 2}"
    text, before, after = run_with_a_kill(config, victim, cluster)
    assert f"rank {rank} filled from rank {rank - 2}; goes on after step" in text
    assert {name for name in before if before[name] != after[name]} == {victim}


def test_a_spare_takes_the_place_of_a_killed_actor(cluster: str, tmp_path: Path) -> None:
    config = fake_job(tmp_path, steps=10_000, mesh=(2, 1, 1), deaths=1, spares=1)
    text, before, after = run_with_a_kill(config, "raytrain3d/job/rank-0001 pipeline 0", cluster,
                                          waiting_for="raytrain3d/job/spare-1")
    assert "rank 1 filled from rank 0; goes on after step" in text
    assert "raytrain3d/job/rank-0001 pipeline 0" not in after
    log = (tmp_path / "runs" / "job" / "logs" / "rank-0001.log").read_text()
    assert re.findall(r"process (\d+) joined generation 1", log) == [str(before["raytrain3d/job/spare-1"])]


def test_sigterm_saves_and_leaves_nothing(cluster: str, tmp_path: Path) -> None:
    config = fake_job(tmp_path, steps=10_000)
    with after_first_step(config, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        code, text = run(config)
    assert code == 143
    saved = steps(f"{config.run.directory}/job")
    assert len(saved) == 1 and f"SIGTERM: all ranks left after step {saved[0]}" in text


def test_a_name_in_use_is_refused_and_the_mailbox_stops_its_run(cluster: str, tmp_path: Path) -> None:
    config = fake_job(tmp_path, steps=10_000, name="twice")
    elsewhere = replace(config, run=replace(config.run, directory=str(tmp_path / "elsewhere")))

    def interfere() -> None:
        with pytest.raises(ConfigError, match=r"run\.name is 'twice': .*actor 'raytrain3d/twice' of this Ray cluster"):
            run(elsewhere)
        status = ask_run("twice", "stop", directory="nowhere", address=cluster)
        assert (status.state, status.num_steps) == ("running", 10_000)

    with after_first_step(config, interfere):
        code, text = run(config)
    assert code == 0 and "raytrain3d stop: all ranks left after step" in text
    with pytest.raises(ConfigError, match="no run 'twice' is under way"):
        ask_run("twice", "status", directory="nowhere", address=cluster)


def test_a_cluster_that_is_too_small_is_explained_after_the_wait(cluster: str, tmp_path: Path) -> None:
    config = fake_job(tmp_path, mesh=(1, 2, 2), cpus_per_rank=1, wait_s=4)
    output = io.StringIO()
    start = time.monotonic()
    with pytest.raises(CapacityError) as caught:
        run_job(config, launcher="ray", output=output, trainer=FakeTrainer)
    assert 4 <= time.monotonic() - start < 10
    for words in ("after 4 s", "1 gang(s) of 2 bundle(s) of {CPU: 2}", "of 2 CPUs free",
                  "lower placement.cpus_per_rank to at most 0.5"):
        assert words in str(caught.value)
    assert "waiting for capacity (3 of 4 s)" in output.getvalue()


def test_a_stop_while_waiting_for_capacity(cluster: str, tmp_path: Path) -> None:
    config = fake_job(tmp_path, cpus_per_rank=4)
    timer = threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    code, text = run(config)
    assert code == 143 and "stopped before any rank started" in text


def test_an_actor_that_cannot_be_made_says_why(cluster: str, tmp_path: Path) -> None:
    config = fake_job(tmp_path)
    Path(config.run.directory, "job").mkdir(parents=True)
    Path(config.run.directory, "job", "logs").write_text("a file")
    with pytest.raises(RankFailed, match=r"died while starting: it could not be made: (FileExists|NotADirectory)Error"):
        run(config)


def test_actors_end_with_a_killed_driver(cluster: str, tmp_path: Path) -> None:
    config = fake_job(tmp_path, steps=10_000)
    with Driver(config, "ray", cluster) as driver:
        driver.wait_for("step 1/")
        assert len(actors()) == 3
        driver.process.kill()
        wait_until(lambda: not actors(), 15, lambda: str(actors()))


def test_a_ray_of_our_own_starts_and_goes(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where a cluster left running by `ray start` would be noted
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = fake_job(tmp_path, steps=200)
    with Driver(config, "ray") as driver:
        driver.wait_for("step 1/", 150)
        own = psutil.Process(driver.process.pid).children(recursive=True)
        directories = set(re.findall(r"/(rt3d-\w+)", " ".join(word for child in own for word in child.cmdline())))
        assert driver.process.wait(60) == 0
        assert "started one on this machine with 1 CPUs" in driver.output
    assert len(directories) == 1 and not Path(tempfile.gettempdir(), *directories).exists()
    wait_until(lambda: not any(child.is_running() for child in own), 10, lambda: str(own))
