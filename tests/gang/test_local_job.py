"""Jobs on local processes with fake trainers: ends, stops, deaths, refusals."""

import io
import json
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from fake_jobs import Driver, fake_job, wait_until, with_steps
from fake_trainer import FakeTrainer, set_fault

from raytrain3d.checkpoint.store import steps
from raytrain3d.cli import main
from raytrain3d.config import JobConfig
from raytrain3d.errors import CheckpointError, ConfigError, DataError, RankFailed
from raytrain3d.gang import run as gang_run
from raytrain3d.gang.controller import lease_end
from raytrain3d.gang.mailbox import ask_socket
from raytrain3d.gang.run import check_job, run_job
from raytrain3d.load import dump

pytestmark = pytest.mark.dist


def run(config: JobConfig, launcher: str = "local") -> tuple[int, str]:
    """(exit code, what was printed)"""
    output = io.StringIO()
    try:
        return run_job(config, launcher=launcher, output=output, trainer=FakeTrainer), output.getvalue()
    finally:
        assert_no_ranks()


def assert_no_ranks() -> None:
    """No rank process of this one is left."""
    assert not [child for child in psutil.Process().children() if "raytrain3d.gang.child" in child.cmdline()]


def lines(config: JobConfig, name: str) -> list[dict[str, object]]:
    path = Path(config.run.directory) / config.run.name / name
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_leases_end_at_decision_points(tmp_path: Path) -> None:
    config = fake_job(tmp_path, steps=100, evaluate=30, checkpoint=20)
    ends, step = [], 0
    while step < 100:
        step = lease_end(step, config)
        ends.append(step)
    assert ends == [20, 30, 40, 60, 80, 90, 100]
    assert lease_end(0, fake_job(tmp_path, steps=100)) == 50


def test_a_job_runs_to_its_end(tmp_path: Path) -> None:
    config = fake_job(tmp_path, mesh=(2, 2, 1), evaluate=6, checkpoint=4)
    code, text = run(config)
    assert code == 0
    assert [line["step"] for line in lines(config, "metrics.jsonl")] == list(range(1, 13))
    assert len(lines(config, "metrics.jsonl")[0]["pipeline_ranks"]) == 2  # type: ignore[arg-type]
    events = [(e["event"], e["step"]) for e in lines(config, "events.jsonl")]
    assert [event for event in events if event[0] != "validation"] == [
        ("started", 0), ("checkpoint", 4), ("checkpoint", 8), ("checkpoint", 12)]
    assert [event for event in events if event[0] == "validation"] == [("validation", 6), ("validation", 12)]
    directory = Path(config.run.directory) / "job"
    assert steps(str(directory)) == [8, 12]
    assert {path.name for path in directory.iterdir()} == {"config.yaml", "plan.json", "metrics.jsonl", "events.jsonl",
                                                          "logs", "checkpoints"}
    assert "rank 3 pipeline 1 INFO" in (directory / "logs" / "rank-0003.log").read_text()
    for words in ("mesh ", "step 12/12", "validation loss  2.0000", "bigram entropy", "/checkpoints/step-12", "logs/"):
        assert words in text


def test_a_job_resumes_by_itself_and_says_so(tmp_path: Path) -> None:
    config = fake_job(tmp_path, steps=6)
    run(config)
    code, text = run(with_steps(config, 9))
    assert code == 0
    assert f"resumed from {config.run.directory}/job/checkpoints/step-6" in text
    assert [line["step"] for line in lines(config, "metrics.jsonl")] == list(range(1, 10))
    code, text = run(with_steps(config, 9))
    assert code == 0 and "all 9 steps are done" in text and "validation loss  2.0000" in text
    with pytest.raises(ConfigError, match=r"train\.steps is 3, .* checkpoint of step 9: set train\.steps"):
        run(with_steps(config, 3))
    fixed = replace(config, checkpoint=replace(config.checkpoint, resume=False))
    with pytest.raises(ConfigError, match=r"checkpoint\.resume is False"):
        run(fixed)


def test_steps_are_seen_while_leases_are_short_and_nothing_is_due(tmp_path: Path) -> None:
    config = fake_job(tmp_path, steps=200)
    config = replace(config, train=replace(config.train, lease=2))  # 0.04 s
    _, text = run(config)
    seen = [int(line.split("/")[0].removeprefix("step ")) for line in text.splitlines() if line.startswith("step ")]
    assert len(seen) >= 4 and sum(20 < step < 180 for step in seen) >= 2


def test_one_rank_runs_inline(tmp_path: Path) -> None:
    config = fake_job(tmp_path, mesh=(1, 1, 1), steps=3)
    assert run(config, "inline")[0] == 0
    assert [line["step"] for line in lines(config, "metrics.jsonl")] == [1, 2, 3]
    with pytest.raises(ConfigError, match="inline runs one rank, the mesh has 2"):
        run(fake_job(tmp_path, name="two", steps=3), "inline")


def test_check_starts_the_gangs_and_ends(tmp_path: Path) -> None:
    output = io.StringIO()
    config = fake_job(tmp_path)
    assert check_job(config, launcher="local", output=output, trainer=FakeTrainer) == 0
    assert "MB/s written" in output.getvalue() and "all well" in output.getvalue()
    assert list((Path(config.run.directory) / "job").iterdir()) == []


@pytest.mark.parametrize(("step", "kind", "words"), [
    ("links", "raise", "failed while measuring links: MemoryError: no room for activations"),
    ("links", "exit", "died while measuring links: its process was ended by SIGKILL"),
    (0, "exit", "died while joining: its process was ended by SIGKILL")])
def test_check_names_a_rank_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str], step: int | str, kind: str,
                                       words: str) -> None:
    config = fake_job(tmp_path)
    file = tmp_path / "job.yaml"
    file.write_text(dump(config))
    Path(config.run.directory).mkdir()
    set_fault(config, 1, step, kind)
    monkeypatch.setattr(gang_run, "check_job", partial(check_job, trainer=FakeTrainer))
    assert main(["check", str(file), "--launcher", "local"]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: rank 1 (replica 0, stage 1, tensor 0) on node ")
    assert words in printed.err.splitlines()[0]
    assert "FleetFailed" not in printed.err and "all well" not in printed.out
    assert_no_ranks()


def test_a_signal_ends_a_check(tmp_path: Path) -> None:
    config = fake_job(tmp_path)
    Path(config.run.directory).mkdir()
    set_fault(config, 1, "links", "hang")
    output = io.StringIO()
    timer = threading.Timer(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    assert check_job(config, launcher="local", output=output, trainer=FakeTrainer) == 143
    timer.join()
    assert "SIGTERM: stopped before all was checked" in output.getvalue()
    assert_no_ranks()


@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)])
def test_a_signal_ends_all_ranks_after_the_same_step_and_saves(tmp_path: Path, number: int, code: int) -> None:
    config = fake_job(tmp_path, steps=10_000)
    with Driver(config, "local") as driver:
        driver.wait_for("step 1/")
        ranks = driver.ranks()
        driver.process.send_signal(number)
        assert driver.process.wait(40) == code
        assert not any(rank.is_running() for rank in ranks)
        saved = steps(str(Path(config.run.directory) / "job"))
        assert len(saved) == 1 and lines(config, "metrics.jsonl")[-1]["step"] == saved[0]
        assert f"all ranks left after step {saved[0]}" in driver.output


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    config = fake_job(tmp_path, steps=10_000, hundredths=2000)
    with Driver(config, "local") as driver:
        driver.wait_for("2 ranks on")
        time.sleep(0.5)
        ranks = driver.ranks()
        driver.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        driver.process.send_signal(signal.SIGINT)
        assert driver.process.wait(5) == 130
        assert len(ranks) == 2 and not any(rank.is_running() for rank in ranks)


def test_the_mailbox_stops_a_job_and_keeps_its_name(tmp_path: Path) -> None:
    config = fake_job(tmp_path, steps=10_000)
    directory = Path(config.run.directory) / "job"
    with Driver(config, "local") as driver:
        driver.wait_for("step 1/")
        with pytest.raises(ConfigError, match=r"run\.name is 'job': a run of that name is under way"):
            run(config)
        status = ask_socket(directory, "stop")
        assert status is not None and status.state == "running" and status.num_steps == 10_000
        assert driver.process.wait(40) == 0
        assert "raytrain3d stop: all ranks left after step" in driver.output


def test_a_killed_rank_ends_the_job_with_its_name(tmp_path: Path) -> None:
    config = fake_job(tmp_path, mesh=(2, 2, 1), steps=10_000)
    with Driver(config, "local") as driver:
        driver.wait_for("step 1/")
        ranks = driver.ranks()
        ranks[3].kill()
        start = time.monotonic()
        assert driver.process.wait(15) == 1
        assert time.monotonic() - start < 6
        assert not any(rank.is_running() for rank in ranks)
        assert "rank 3 (replica 1, stage 1, tensor 0) on node" in driver.output
        assert "its process was ended by SIGKILL" in driver.output


def test_ranks_end_with_their_driver(tmp_path: Path) -> None:
    with Driver(fake_job(tmp_path, steps=10_000), "local") as driver:
        driver.wait_for("step 1/")
        ranks = driver.ranks()
        driver.process.kill()
        wait_until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks), 5)
        assert len(ranks) == 2


@pytest.mark.parametrize(("kind", "step", "words"), [
    ("raise", 3, "failed in step 3, op 1F0: MemoryError: no room for activations"),
    ("exit", 3, "died in step 3: its process was ended by SIGKILL"),
    ("connection", 3, "lost its connections in step 3"),
    ("raise", 0, "failed while joining: MemoryError")])
def test_the_culprit_is_named(tmp_path: Path, kind: str, step: int, words: str) -> None:
    config = fake_job(tmp_path, mesh=(1, 3, 1), steps=6)
    Path(config.run.directory).mkdir()
    set_fault(config, 1, step, kind)
    with pytest.raises(RankFailed) as caught:
        run(config)
    if kind != "connection":  # among ranks that only lost connections none stands out
        assert caught.value.rank == 1
        assert "rank 1 (replica 0, stage 1, tensor 0) on node" in str(caught.value)
    assert words in str(caught.value)
    assert lines(config, "events.jsonl")[-1]["event"] == "failed"
    known = [line["step"] for line in lines(config, "metrics.jsonl")]
    assert known == list(range(1, step)) or kind == "exit"  # a killed rank takes its last reports with it


def test_corrupt_data_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    config = fake_job(tmp_path)
    shard = next(Path(config.data.path).rglob("*train*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="corrupt"):
        run(config)
    assert not Path(config.run.directory).exists()


def test_the_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    config = fake_job(tmp_path, steps=2)
    run(config)
    other = replace(config, model=replace(config.model, hidden=16))
    with pytest.raises(CheckpointError, match=r"belongs to another run: model\.hidden is 8 there and 16"):
        run(other)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    config = fake_job(tmp_path)
    Path(config.run.directory).write_text("a file")
    with pytest.raises(CheckpointError, match=r"/job is not usable: .*run\.directory.*driver's node"):
        run(config)


def test_a_relative_directory_is_refused_in_a_working_directory_of_ray(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    working = tmp_path / "_ray_pkg_0123"
    working.mkdir()
    monkeypatch.chdir(working)
    config = fake_job(tmp_path)
    with pytest.raises(ConfigError, match=r"run\.directory is 'runs': .* working directory of Ray"):
        run(replace(config, run=replace(config.run, directory="runs")))
