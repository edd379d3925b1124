"""Saving as the driver sees it: one save at a time, failures that a run survives, and resuming past damage."""

import io
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fake_jobs import fake_job, wait_until, with_steps
from fake_trainer import FakeTrainer

from raytrain3d.checkpoint.manifest import Receipt
from raytrain3d.checkpoint.progress import SaveProgress, SaveStart
from raytrain3d.checkpoint.store import damage, step_directory, steps
from raytrain3d.config import CheckpointConfig, JobConfig
from raytrain3d.errors import CheckpointError
from raytrain3d.gang import saving
from raytrain3d.gang.run import run_job
from raytrain3d.gang.saving import Saver


@dataclass
class FakeFleet:
    """Two ranks whose progress the test decides: a list to be gone through, its last element staying."""

    script: list[tuple[int, int]] = field(default_factory=lambda: [(2, 0)])
    """(ranks that have written, tries of rank 1 that failed)"""
    began: list[tuple[int, bool]] = field(default_factory=list)
    called_off: int = 0
    hurried: int = 0

    def save(self, directory: str, step: int, *, behind: bool) -> list[SaveStart]:
        self.began.append((step, behind))
        return [SaveStart(pause_s=0.25 * (rank + 1), num_bytes=10) for rank in range(2)]

    def save_progress(self, *, training: bool) -> list[SaveProgress]:
        written, failures = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        step = self.began[-1][0]
        return [SaveProgress(step=step, seconds=2.0, failures=failures * rank, error="no room" if rank else None,
                             receipt=_receipt(rank, step) if rank < written else None) for rank in range(2)]

    def hurry_save(self) -> None:
        self.hurried += 1

    def call_off_save(self) -> None:
        self.called_off += 1


def _receipt(rank: int, step: int) -> Receipt:
    return Receipt(rank=rank, step=step, file=None, entries=())


@dataclass
class FakeJournal:
    events: list[tuple[str, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)

    def event(self, kind: str, step: int, text: str, **values: Any) -> None:
        self.events.append((kind, step))
        self.texts.append(text)
        self.values.append(values)


@dataclass
class Driver:
    """A saver between a fake fleet and a fake journal."""

    saver: Saver
    fleet: FakeFleet
    journal: FakeJournal
    commits: list[tuple[int, float | None]]
    refuse_commits: int = 0


@pytest.fixture
def make_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    def make(script: Sequence[tuple[int, int]] = ((2, 0),), **keys: Any) -> Driver:
        config = replace(fake_job(tmp_path), checkpoint=CheckpointConfig(**keys))
        fleet, journal = FakeFleet(script=list(script)), FakeJournal()
        driver = Driver(Saver(fleet, journal, config, str(tmp_path / "run"), None), fleet, journal, [])  # type: ignore[arg-type]

        def commit(directory: str, step: int, receipts: Sequence[Receipt], **more: Any) -> None:
            if driver.refuse_commits > 0:
                driver.refuse_commits -= 1
                raise CheckpointError("manifest.json: no room")
            assert [receipt.rank for receipt in receipts] == [0, 1]
            driver.commits.append((step, more["validation_loss"]))
        monkeypatch.setattr(saving, "commit", commit)
        return driver
    return make


def test_a_save_is_committed_when_every_rank_has_written(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver([(0, 0), (1, 0), (2, 0)])
    driver.saver.begin(10)
    assert driver.fleet.began == [(10, True)] and driver.saver.age_s is None
    for _ in range(2):
        driver.saver.poll(training=True)
        assert driver.saver.saved is None and driver.commits == []
    driver.saver.evaluated(10, 3.5)
    driver.saver.poll(training=True)
    assert driver.commits == [(10, 3.5)] and driver.saver.saved == 10
    assert driver.journal.events == [("checkpoint", 10)]
    values = driver.journal.values[0]
    assert values["pause_s"] == 0.5 and values["write_s"] == 2.0 and values["failures"] == 0
    assert driver.saver.age_s is not None and driver.saver.age_s >= values["age_s"] >= 0


def test_the_next_save_waits_or_is_skipped(make_driver: Callable[..., Driver]) -> None:
    slow = [(0, 0)] * 4 + [(2, 0)]
    waiting = make_driver(slow)
    waiting.saver.begin(10)
    waiting.saver.begin(20)
    assert waiting.fleet.began == [(10, True), (20, True)] and waiting.commits == [(10, None)]
    assert waiting.fleet.hurried == 1, "what is waited for need not spare the training"
    skipping = make_driver(slow, when_busy="skip")
    skipping.saver.begin(10)
    skipping.saver.begin(20)
    assert skipping.fleet.began == [(10, True)]
    assert skipping.journal.events == [("checkpoint skipped", 20)]
    assert "checkpoint of step 20 skipped: the one of step 10 is still being written after 0 s" in skipping.journal.texts
    skipping.saver.finish(30)
    assert skipping.fleet.began == [(10, True), (30, False)] and [step for step, _ in skipping.commits] == [10, 30]


def test_a_failing_save_is_told_once_a_try_and_never_waited_for(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver([(1, 1), (1, 1), (1, 2), (1, 2), (2, 2)])
    driver.saver.begin(10)
    driver.saver.begin(20)
    assert driver.journal.events == [("checkpoint failed", 10), ("checkpoint skipped", 20)]
    assert driver.journal.texts[0] == ("saving step 10 failed on rank 1 (try 1): no room. It is tried again, earlier "
                                       "checkpoints stay")
    assert "the one of step 10 has failed 1 times" in driver.journal.texts[1]
    for _ in range(4):
        driver.saver.poll(training=True)
    assert driver.journal.events[2:] == [("checkpoint failed", 10), ("checkpoint", 10)]
    assert driver.journal.values[-1]["failures"] == 2


def test_the_last_save_takes_the_place_of_one_that_fails(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver([(1, 1), (2, 0)])
    driver.saver.begin(10)
    driver.saver.finish(12)
    assert driver.fleet.called_off == 1 and driver.fleet.began == [(10, True), (12, False)]
    assert driver.saver.saved == 12
    driver.saver.finish(12)
    assert driver.fleet.began == [(10, True), (12, False)], "it is saved already"


def test_the_last_save_that_keeps_failing_is_an_error(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver([(2, 0)])
    driver.saver.begin(10)
    driver.saver.poll()
    driver.fleet.script = [(1, tries) for tries in range(1, 9)]
    with pytest.raises(CheckpointError, match=r"state of step 12 could not be saved in 5 tries.*newest checkpoint is "
                                              r".*/run/checkpoints/step-10;"):
        driver.saver.finish(12)
    assert [event for event, _ in driver.journal.events].count("checkpoint failed") == 5


def test_a_manifest_that_cannot_be_written_is_tried_again(make_driver: Callable[..., Driver],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "FIRST_WAIT_S", 0.01)
    driver = make_driver([(2, 0)])
    driver.refuse_commits = 2
    driver.saver.finish(5)
    assert driver.journal.events == [("checkpoint failed", 5)] * 2 + [("checkpoint", 5)]
    assert "failed on the driver (try 2): manifest.json: no room" in driver.journal.texts[1]


# Whole jobs

def run(config: JobConfig, launcher: str = "local", meanwhile: Callable[[io.StringIO], None] | None = None,
        **trainer: Any) -> tuple[int, str]:
    """(exit code, what was printed); `meanwhile` runs beside it in a thread."""
    output = io.StringIO()
    thread = threading.Thread(target=meanwhile or (lambda _: None), args=(output,))
    thread.start()
    try:
        return run_job(config, launcher=launcher, output=output, **trainer), output.getvalue()
    finally:
        thread.join()


def events(config: JobConfig) -> list[dict[str, Any]]:
    path = Path(config.run.directory) / config.run.name / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.dist
def test_a_store_that_fails_for_a_while_does_not_end_the_run(tmp_path: Path) -> None:
    config = fake_job(tmp_path, steps=180, checkpoint=80, hundredths=5)
    place = Path(config.run.directory) / "job" / "checkpoints"

    def break_and_repair(output: io.StringIO) -> None:
        wait_until(lambda: "step 1/" in output.getvalue(), 40)
        place.write_text("in the way")
        wait_until(lambda: "saving step 80 failed" in output.getvalue(), 40)
        place.unlink()

    code, text = run(config, meanwhile=break_and_repair, trainer=FakeTrainer)
    assert code == 0
    assert re.search(rf"saving step 80 failed on rank 0 \(try \d\): cannot list {place}/step-80: Not a directory", text)
    found = [event for event in events(config) if event["event"] == "checkpoint"]
    assert [event["step"] for event in found] == [80, 160, 180] and found[0]["failures"] >= 1
    assert steps(str(place.parent)) == [160, 180]


@pytest.mark.dist
def test_a_last_save_that_fails_is_an_error_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "LAST_TRIES", 2)
    config = fake_job(tmp_path, steps=60, checkpoint=20, hundredths=5)
    place = Path(config.run.directory) / "job" / "checkpoints"

    def break_it(output: io.StringIO) -> None:
        wait_until(lambda: "checkpoints/step-20" in output.getvalue(), 60)
        (place / "step-60").write_text("in the way")

    with pytest.raises(CheckpointError, match=r"step 60 could not be saved in 2 tries.*step-40; make room"):
        run(config, meanwhile=break_it, trainer=FakeTrainer)
    assert events(config)[-1]["event"] == "failed"
    (place / "step-60").unlink()
    assert steps(str(place.parent)) == [20, 40] and all(damage(str(place / f"step-{n}")) == [] for n in (20, 40))
    assert run(config, trainer=FakeTrainer)[0] == 0
    assert steps(str(place.parent)) == [40, 60]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    """With the real trainer, whose reading finds the damage."""
    config = fake_job(tmp_path, mesh=(1, 1, 1), steps=6, checkpoint=2)
    assert run(config, "inline")[0] == 0
    directory = str(Path(config.run.directory) / "job")
    assert steps(directory) == [4, 6]
    flip(Path(step_directory(directory, 6)) / "rank-0000.safetensors")
    code, text = run(with_steps(config, 8), "inline")
    assert code == 0
    assert (f"cannot resume from {directory}/checkpoints/step-6: {directory}/checkpoints/step-6/rank-0000.safetensors is "
            "damaged") in text
    assert f"resumed from {directory}/checkpoints/step-4" in text
    assert [event["step"] for event in events(config) if event["event"] == "damaged checkpoint"] == [6]
    assert steps(directory) == [6, 8] and damage(step_directory(directory, 6)) == [], "step 6 is saved anew"
    Path(step_directory(directory, 8), "manifest.json").write_text("{")
    Path(step_directory(directory, 6), "rank-0000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .*/job can be loaded"):
        run(with_steps(config, 9), "inline")
    assert steps(directory) == [6, 8], "nothing is deleted"


def test_leftovers_are_cleaned_at_the_start(tmp_path: Path) -> None:
    config = fake_job(tmp_path, mesh=(1, 1, 1), steps=2)
    left = Path(config.run.directory) / "job" / "checkpoints" / "step-1"
    left.mkdir(parents=True)
    (left / "rank-0000.safetensors").write_bytes(b"whole but not committed")
    (left / ".rank-0001.safetensors.partial").write_bytes(b"half")
    assert run(config, "inline", trainer=FakeTrainer)[0] == 0
    assert not left.exists()
