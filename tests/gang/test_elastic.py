"""Jobs whose number of replicas changes while they run: they lose gangs, take others in, and learn the same."""

import io
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos import plan_kills
from chaos_jobs import STEPS, Undisturbed, lines, make_job, outcome
from fake_jobs import wait_until
from rooms import PacedTrainer, RoomLauncher, Rooms

from raytrain3d.config import DataRange, JobConfig, MeshConfig
from raytrain3d.errors import ConfigError
from raytrain3d.gang import run as run_module
from raytrain3d.gang.run import run_job
from raytrain3d.load import dump, load
from raytrain3d.plan.plan import make_plan


def elastic(undisturbed: Undisturbed, name: str, *, fewest: int = 1, most: int = 2, **train: Any) -> JobConfig:
    config = make_job(undisturbed.directory, name, (most, 2, 1), **train)
    return replace(config, mesh=MeshConfig(data=DataRange(min=fewest, max=most), pipeline=2))


def test_a_range_is_read_and_written_and_overridden(undisturbed: Undisturbed) -> None:
    config = elastic(undisturbed, "written", most=4)
    file = undisturbed.directory / "written.yaml"
    file.write_text(dump(config))
    assert load(str(file)) == config
    assert load(str(file), ["mesh.data.max=8"]).mesh == MeshConfig(data=DataRange(min=1, max=8), pipeline=2)
    assert load(str(file), ["mesh.data=3"]).mesh.replicas == 3
    with pytest.raises(ConfigError, match=r"mesh\.data is \{'min': 3, 'max': 2\}: min must be"):
        load(str(file), ["mesh.data={min: 3, max: 2}"])
    with pytest.raises(ConfigError, match=r"train\.sharding is 'full': must be 'none' where mesh\.data is a range"):
        load(str(file), ["train.sharding=full"])


@pytest.mark.parametrize(("replicas", "shares"), [
    ((0, 1, 2, 3), (2, 1, 1, 1)), ((1, 3), (0, 3, 0, 2)), ((2,), (0, 0, 5, 0))])
def test_replicas_that_are_left_share_all_micro_batches(undisturbed: Undisturbed, replicas: tuple[int, ...],
                                                        shares: tuple[int, ...]) -> None:
    plan = make_plan(elastic(undisturbed, "shared", most=4, global_batch=5))
    there = plan.with_replicas(replicas)
    assert there.replicas == replicas and there.shares == shares
    assert there.ranks == tuple(rank for replica in replicas for rank in (2 * replica, 2 * replica + 1))
    assert there.with_replicas(range(4)) == plan
    assert type(plan).from_json(there.to_json()) == there


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """act() in a thread. Its error is raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    if errors:
        raise errors[0]


def wait_for_step(config: JobConfig, step: int) -> None:
    def is_done() -> bool:
        try:
            return any(line["step"] >= step for line in lines(config, "metrics.jsonl"))
        except (OSError, ValueError):
            return False

    wait_until(is_done, 90)


def wait_for_event(config: JobConfig, kind: str) -> None:
    wait_until(lambda: any(event["event"] == kind for event in lines(config, "events.jsonl")), 120)


def run(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    @contextmanager
    def in_rooms(*_: Any) -> Iterator[RoomLauncher]:
        yield RoomLauncher()

    monkeypatch.setattr(run_module, "open_launcher", in_rooms)
    output = io.StringIO()
    assert run_job(config, launcher="local", output=output, trainer=PacedTrainer) == 0
    return output.getvalue()


def check_same_learning(config: JobConfig, undisturbed: Undisturbed) -> None:
    """Every step is there once, with the batch and learning rate of the undisturbed run and its loss within 1e-5."""
    numbers, wanted = outcome(config)[0], undisturbed[2, 2, 1][0]
    assert [(step, tokens, rate) for step, _, _, tokens, rate in numbers] == [
        (step, tokens, rate) for step, _, _, tokens, rate in wanted]
    assert [loss for _, loss, *_ in numbers] == pytest.approx([loss for _, loss, *_ in wanted], rel=1e-5)


def kill(config: JobConfig, rank: int) -> None:
    log = (Path(config.run.directory) / config.run.name / "logs" / f"rank-{rank:04d}.log").read_text()
    os.kill(int(re.findall(r"process (\d+) joined", log)[-1]), signal.SIGKILL)


@pytest.mark.dist
@pytest.mark.usefixtures("nothing_left")
def test_a_job_starts_with_few_takes_a_gang_in_and_does_without_a_lost_one(undisturbed: Undisturbed,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """With snapshots, whose ring changes with the ranks."""
    calm = elastic(undisturbed, "elastic")
    config = replace(calm, recovery=replace(calm.recovery, snapshot_interval=4))
    rooms = Rooms(config)
    rooms.take(0)
    plan_kills(config, [])

    def act() -> None:
        rooms.pace(2)
        wait_for_step(config, 2)
        rooms.give(0)
        wait_for_event(config, "regrouped")
        rooms.take(1)
        kill(config, 3)
        wait_for_event(config, "recovered")
        rooms.pace(0)

    with meanwhile(act):
        text = run(config, monkeypatch)
    events = {event["event"]: event for event in lines(config, "events.jsonl")}
    assert "ranks 0, 1 filled from ranks 2, 3" in events["regrouped"]["text"], text
    assert "gang 1 given up: no room for it; 1 of 2 replicas take part" in text
    assert events["recovered"]["again"] <= 1
    check_same_learning(config, undisturbed)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.usefixtures("nothing_left")
def test_a_node_is_left_before_it_goes_away(undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch) -> None:
    config = elastic(undisturbed, "left")
    rooms = Rooms(config)
    plan_kills(config, [])

    def act() -> None:
        rooms.pace(0.2)
        wait_for_step(config, 3)
        rooms.take(1)
        rooms.give_notice(1)
        wait_for_event(config, "regrouped")
        rooms.pace(0)

    with meanwhile(act):
        text = run(config, monkeypatch)
    events = lines(config, "events.jsonl")
    kinds = [event["event"] for event in events]
    assert kinds.index("notice") < kinds.index("gang given up") and "failure" not in kinds, text
    assert "gang 1 given up: its node goes away" in text
    assert max(event.get("again", 0) for event in events) == 0
    check_same_learning(config, undisturbed)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.usefixtures("nothing_left")
def test_a_notice_that_cannot_be_evaded_leads_to_a_checkpoint(undisturbed: Undisturbed,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    calm = make_job(undisturbed.directory, "noticed", (2, 2, 1))
    config = replace(calm, checkpoint=replace(calm.checkpoint, interval=None))
    rooms = Rooms(config)
    plan_kills(config, [])

    def act() -> None:
        rooms.pace(0.2)
        wait_for_step(config, 3)
        rooms.give_notice(1)

    with meanwhile(act):
        run(config, monkeypatch)
    events = lines(config, "events.jsonl")
    (notice,) = [event for event in events if event["event"] == "notice"]
    saved = [event for event in events if event["event"] == "checkpoint"]
    assert len(saved) == 2 and saved[0]["step"] < STEPS and saved[0]["time"] - notice["time"] < 10
    assert outcome(config) == undisturbed[2, 2, 1]
