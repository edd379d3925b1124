"""Ranks that stop, fall asleep, lose a message or raise: each is named, ended and replaced, and the run ends bit-equal.

The normal run has one job with a fault of every kind; `pytest -m slow tests/gang/test_hangs.py` 20 seeded jobs for each.
"""

import random
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chaos import Kill, kills_left, plan_kills
from chaos_jobs import STEPS, Undisturbed, lines, make_job, outcome, run

from raytrain3d.config import JobConfig, MeshConfig, PipelineConfig
from raytrain3d.errors import RankFailed

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("nothing_left")]

MESH, LIMIT_S, RECOVERED_S = (2, 2, 1), 4.0, 20.0


def draw_fault(how: str, draw: random.Random, step: int) -> tuple[Kill, str | None]:
    """A fault, and the op that is to be named with it. Every replica has 2 micro-batches, each rank one stage."""
    rank = draw.randrange(4)
    if how == "skip":  # what is missed is the last message of a channel, as its messages carry no names
        return Kill(rank=rank, point="send", step=step, count=1, how=how), f"{rank % 2}S{'FB'[rank % 2]}1"
    point, count = draw.choice(["forward", "backward", "reduction", "commit", "agreed"]), draw.randrange(2)
    if point not in ("forward", "backward"):
        return Kill(rank=rank, point=point, step=step, how=how), None
    op = f"{rank % 2}{point[0].upper()}{count}"
    return Kill(rank=rank, point=point, step=step, count=count, how=how), op if how != "stop" else None


def steps_named(fault: Kill) -> list[int | None]:
    """Of a process that is stopped only what the others wait for is known, and after the commit they are a step further."""
    later = fault.step + 1 if fault.step is not None and (fault.how, fault.point) == ("stop", "agreed") else fault.step
    return [fault.step, later]


def check(config: JobConfig, faults: list[tuple[Kill, str | None]], undisturbed: Undisturbed) -> None:
    config = replace(config, recovery=replace(config.recovery, hang_limit_s=LIMIT_S, errors=len(faults)))
    plan_kills(config, [fault for fault, _ in faults])
    text = run(config, move=False)
    assert kills_left(config) == [], text
    events = lines(config, "events.jsonl")
    failures = [event for event in events if event["event"] == "failure"]
    assert len(failures) == len(faults), text
    for (fault, op), failure in zip(faults, failures, strict=True):
        assert failure["ranks"] == [fault.rank], text
        assert any(re.search(rf"in step {step}\b", failure["text"]) for step in steps_named(fault)), failure["text"]
        assert op is None or f"op {op}:" in failure["text"], failure["text"]
        if fault.how in ("sleep", "skip"):
            assert 'File "' in failure["details"], "the stack of the culprit"
    assert all(event["seconds"] < RECOVERED_S for event in events if event["event"] == "recovered")
    assert outcome(config) == undisturbed[MESH], text


def test_faults_of_every_kind_are_named_and_survived(undisturbed: Undisturbed) -> None:
    faults: list[tuple[Kill, str | None]] = [
        (Kill(rank=2, point="backward", step=5, count=1, how="sleep"), "0B1"),
        (Kill(rank=1, point="forward", step=12, count=0, how="stop"), None),
        (Kill(rank=3, point="send", step=20, count=1, how="skip"), "1SB1"),
        (Kill(rank=0, point="backward", step=29, count=0, how="raise"), "0B0")]
    check(make_job(undisturbed.directory, "faults", MESH), faults, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("how", ["stop", "sleep", "skip", "raise"])
def test_the_culprit_is_named_in_every_trial(how: str, seed: int, undisturbed: Undisturbed) -> None:
    draw = random.Random(f"{how} {seed}")
    fault: Any = draw_fault(how, draw, draw.randrange(2, STEPS))
    check(make_job(undisturbed.directory, f"{how}-{seed}", MESH), [fault], undisturbed)


@pytest.mark.slow
def test_the_first_of_four_receives_wakes_when_the_last_rank_is_killed(undisturbed: Undisturbed) -> None:
    """Each of ranks 0 to 3 waits for a gradient from the next one, and rank 4 dies before it makes any."""
    calm = make_job(undisturbed.directory, "four-receives", (1, 2, 1), global_batch=8)
    config = replace(calm, mesh=MeshConfig(pipeline=5), pipeline=PipelineConfig(layers=(2, 1, 1, 1, 1)),
                     recovery=replace(calm.recovery, deaths=0))
    plan_kills(config, [Kill(rank=4, point="forward", step=5)])
    with pytest.raises(RankFailed, match=r"rank 4 .* died in step 5"):
        run(config, move=False)
    killed = (Path(config.run.directory) / "kill-0.done").stat().st_mtime
    log = (Path(config.run.directory) / config.run.name / "logs" / "rank-0000.log").read_text().splitlines()
    woken = next(line for line in log if " ERROR " in line)
    seconds = datetime.strptime(woken.partition(" rank ")[0], "%Y-%m-%d %H:%M:%S,%f").timestamp() - killed
    assert 0 <= seconds < 1, woken
