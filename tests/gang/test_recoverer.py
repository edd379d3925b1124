"""Jobs with fake trainers that go on after ranks were lost: who is replaced, what is recorded, when it is enough."""

import io
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_jobs import Driver, fake_job
from fake_trainer import FakeTrainer, set_fault

from raytrain3d.config import JobConfig
from raytrain3d.errors import RankFailed
from raytrain3d.gang.mailbox import ask_socket
from raytrain3d.gang.run import run_job

pytestmark = pytest.mark.dist


def lines(config: JobConfig, name: str) -> list[dict[str, Any]]:
    path = Path(config.run.directory) / config.run.name / name
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(config: JobConfig, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(config, "events.jsonl") if line["event"] == kind]


def run(config: JobConfig, rank: int, step: int | str, kind: str) -> str:
    """What a job prints in which `rank` fails like this."""
    Path(config.run.directory).mkdir()
    set_fault(config, rank, step, kind)
    output = io.StringIO()
    try:
        assert run_job(config, launcher="local", output=output, trainer=FakeTrainer) == 0
    finally:
        assert not [child for child in psutil.Process().children() if "raytrain3d.gang.child" in child.cmdline()]
    return output.getvalue()


def test_a_killed_rank_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    config = fake_job(tmp_path, mesh=(2, 2, 1), steps=10_000, deaths=1)
    with Driver(config, "local") as driver:
        driver.wait_for("step 1/")
        ranks = driver.ranks()
        ranks[3].kill()
        driver.wait_for("recovered in")
        assert set(ranks[:3]) < set(driver.ranks()) and len(driver.ranks()) == 4
        status = ask_socket(Path(config.run.directory) / "job", "stop")
        assert status is not None and status.state == "running"
        assert driver.process.wait(40) == 0
    (failure,), (recovered,) = events(config, "failure"), events(config, "recovered")
    assert failure["ranks"] == [3] and failure["cause"] == "deaths" and failure["generation"] == 0
    assert failure["text"].startswith("rank 3 (replica 1, stage 1, tensor 0) on node") and "SIGKILL" in failure["text"]
    assert recovered["generation"] == 1 and recovered["replaced"] == [3] and "rank 3 filled from rank 1" in recovered["text"]
    steps = [line["step"] for line in lines(config, "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)), "every step has its line, once"


@pytest.mark.parametrize(("rank", "words"), [
    pytest.param(1, "rank 1 filled from rank 3", marks=pytest.mark.slow), (0, "rank 0 filled from rank 2")])
def test_a_rank_that_raises_is_replaced(tmp_path: Path, rank: int, words: str) -> None:
    config = fake_job(tmp_path, mesh=(2, 2, 1), errors=1)
    text = run(config, rank, 5, "raise")
    assert f"rank {rank} (replica 0, stage {rank}, tensor 0)" in text
    assert "failed in step 5" in text and words in text
    assert [event["cause"] for event in events(config, "failure")] == ["errors"]
    assert [line["step"] for line in lines(config, "metrics.jsonl")] == list(range(1, 13))


def test_without_another_replica_all_go_back_to_the_checkpoint(tmp_path: Path) -> None:
    config = fake_job(tmp_path, mesh=(1, 2, 1), checkpoint=4, deaths=1)
    text = run(config, 1, 10, "exit")
    (recovered,) = events(config, "recovered")
    assert recovered["step"] in (4, 8), "of step 8 it may not have been whole"
    assert f"so all went back to the checkpoint of step {recovered['step']}; goes on after step" in text
    assert [line["step"] for line in lines(config, "metrics.jsonl")] == list(range(1, 13))
    assert [event["step"] for event in events(config, "checkpoint")] == [4, 8, 12]


def test_without_a_checkpoint_the_run_begins_anew(tmp_path: Path) -> None:
    text = run(fake_job(tmp_path, mesh=(1, 2, 1), deaths=1), 1, 7, "exit")
    assert "went back to fresh weights, since there is no checkpoint; goes on after step 0" in text


def test_a_run_ends_when_its_budget_is_spent(tmp_path: Path) -> None:
    config = fake_job(tmp_path, mesh=(2, 1, 1))
    with pytest.raises(RankFailed, match=r"rank 1 .*\n(.*\n)*recovery\.errors is 0: 1 failure of this kind") as caught:
        run(config, 1, 3, "raise")
    assert caught.value.rank == 1
    assert lines(config, "events.jsonl")[-1]["event"] == "failed"


def test_a_death_in_a_recovery_begins_it_anew(tmp_path: Path) -> None:
    """Rank 3 dies, and rank 1 when it is to fill the new one."""
    config = fake_job(tmp_path, mesh=(2, 2, 1), steps=10_000, deaths=2, checkpoint=10)
    with Driver(config, "local") as driver:
        driver.wait_for("checkpoint ")
        set_fault(config, 1, "recover", "exit")
        driver.ranks()[3].kill()
        driver.wait_for("recovered in")
        ask_socket(Path(config.run.directory) / "job", "stop")
        assert driver.process.wait(40) == 0
    assert [event["ranks"] for event in events(config, "failure")] == [[3], [1]]
    assert [event["generation"] for event in events(config, "recovered")] == [2]
