"""Jobs that are submitted to a cluster: followed, stopped, resumed, several at once. One head for the module, as `ray start`
makes it; real training on one or two ranks."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_jobs import wait_until
from ray_head import RAY, RayHead

from raytrain3d.checkpoint.store import steps

pytest.importorskip("ray")
pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
RAYTRAIN3D = (sys.executable, "-m", "raytrain3d")
SMALL = ("model.hidden=16", "model.feed_forward=32", "model.heads=2", "model.kv_heads=1", "model.blocks=2",
         "train.sequence=32", "train.global_batch=4", "evaluate.samples=4", "evaluate.interval=null",
         "checkpoint.interval=null", "learning_rate.warmup=1", "placement.cpus_per_rank=0.2")


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    head = RayHead()
    try:
        head.start()
        yield head
    finally:
        head.stop()
    assert not head.processes()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all nodes find runs and text. A name that is often forgotten."""
    place = tmp_path_factory.mktemp("shared") / "läufe und daten"
    place.mkdir()
    for number in range(8):
        (place / f"{number}.txt").write_text(f"text number {number} " * 200)
    return place


def overrides(place: Path, name: str, steps: int, *more: str) -> list[str]:
    return [f"run.name={name}", f"run.directory={place}", f"data.path={place}/tokens-{name}", f"data.text=['{place}/*.txt']",
            f"train.steps={steps}", *SMALL, *more]


def actors_and_groups(head: RayHead) -> list[str]:
    """What is alive in the cluster beside jobs' supervisors: gangs, mailboxes, placement groups."""
    code = ("import json, ray; ray.init(log_to_driver=False); from ray.util import placement_group_table as t; "
            "alive = [a['Name'] for a in ray._private.state.actors().values() if a['State'] != 'DEAD']; "
            "print(json.dumps([n for n in alive if n.startswith('raytrain3d')] + "
            "[g['name'] for g in t().values() if g['state'] != 'REMOVED']))")
    done = head.run(sys.executable, "-c", code, RAY_ADDRESS=head.address)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_drivers_own_code_comes_back(head: RayHead, place: Path, tmp_path: Path) -> None:
    """2: something to change first. A token that an earlier cluster left in the home directory does no harm."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    bad = overrides(place, "bad", 4, "network.interface=nonsense", "data.text=[]", "data.path=/nowhere")
    done = head.run(*RAYTRAIN3D, "submit", str(ROOT / "jobs/tiny.yaml"), "--wait", "--address", head.url, *bad, cwd=tmp_path,
                    HOME=str(tmp_path), RAY_AUTH_MODE="")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "data.path is '/nowhere'" in done.stdout


def test_jobs_beside_each_other_are_followed_stopped_and_resumed(head: RayHead, place: Path, tmp_path: Path) -> None:
    """One job by Ray's own command, whose working directory is this checkout, is stopped in the middle and resumed; another
    by `raytrain3d submit` trains to its end meanwhile."""
    output = tmp_path / "first.txt"
    command = [RAY, "job", "submit", "--address", head.url, "--submission-id", "first", "--working-dir", ".", "--",
               "python", "-m", "raytrain3d", "train", "jobs/quickstart.yaml"]
    two_ranks = ("mesh.data=1", "mesh.tensor=1")
    with head.popen(*command, *overrides(place, "first", 100_000, *two_ranks), output=output, cwd=ROOT) as first:
        wait_until(lambda: "step 1/" in output.read_text(), 90, output.read_text)

        second = head.run(*RAYTRAIN3D, "submit", str(ROOT / "jobs/tiny.yaml"), "--wait", "--address", head.url,
                          *overrides(place, "second", 4), cwd=tmp_path)
        assert second.returncode == 0, second.stdout + second.stderr
        assert "finished: 4 steps" in second.stdout and second.stdout.count("step 4/4") == 1

        status = head.run(*RAYTRAIN3D, "status", "first", "--address", head.address, cwd=tmp_path)
        assert re.search(r"state +running\nstep +\d+ of 100000\n", status.stdout), status.stdout + status.stderr
        assert first.poll() is None
        stopped = head.run(RAY, "job", "stop", "--address", head.url, "first")
        assert stopped.returncode == 0
        first.wait(60)
    saved = steps(str(place / "first"))
    assert len(saved) == 1 and f"SIGTERM: all ranks left after step {saved[0]}" in output.read_text()
    assert actors_and_groups(head) == []

    resumed = head.run(*RAYTRAIN3D, "submit", str(ROOT / "jobs/quickstart.yaml"), "--wait", "--address", head.url,
                       *overrides(place, "first", saved[0] + 3, *two_ranks), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"resumed from {place}/first/checkpoints/step-{saved[0]}" in resumed.stdout
    assert f"finished: {saved[0] + 3} steps" in resumed.stdout


def test_a_job_is_stopped_and_asked_through_the_dashboard(head: RayHead, place: Path, tmp_path: Path) -> None:
    job = overrides(place, "third", 100_000, "network.environment={HF_TOKEN: hf_geheim, NCCL_DEBUG: INFO}")
    submit = (*RAYTRAIN3D, "submit", str(ROOT / "jobs/tiny.yaml"), "--address", head.url, *job)
    done = head.run(*submit, cwd=tmp_path)
    assert done.returncode == 0 and f"raytrain3d stop third --address {head.url}" in done.stdout, done.stderr
    metrics = place / "third" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and bool(metrics.read_text()), 90)

    again = head.run(*submit, cwd=tmp_path)
    assert again.returncode == 2 and "run.name is 'third': job third-" in again.stderr
    status = head.run(*RAYTRAIN3D, "status", "third", "--address", head.url, cwd=tmp_path)
    assert "state     running" in status.stdout, status.stdout + status.stderr
    stopped = head.run(*RAYTRAIN3D, "stop", "third", "--address", head.url, cwd=tmp_path)
    assert stopped.returncode == 0 and ": stopped" in stopped.stdout, stopped.stdout + stopped.stderr
    assert len(steps(str(place / "third"))) == 1
    logs = head.run(*RAYTRAIN3D, "logs", "third", "--address", head.url, "--follow", cwd=tmp_path)
    assert logs.returncode == 143 and "SIGTERM: all ranks left after step" in logs.stdout

    settings = json.loads((place / "third" / "logs" / "driver.log").read_text())
    assert settings["config"]["network"]["environment"] == {"HF_TOKEN": "***", "NCCL_DEBUG": "INFO"}
    assert settings["environment"]["RAY_AUTH_MODE"] == "disabled"
    for file in ("logs/driver.log", "events.jsonl", "config.yaml", "plan.json"):
        assert "hf_geheim" not in (place / "third" / file).read_text()
