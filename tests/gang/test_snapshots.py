"""State that no other replica holds (one replica, or sharded optimizer state) comes back from the snapshots that ranks keep
of each other: bit-equal, with about as many steps done again as lie between snapshots.

The normal run takes one job; `pytest -m slow tests/gang/test_snapshots.py` 15 seeded ones of both kinds.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
from chaos import Kill, kills_left, plan_kills, steps_begun
from chaos_jobs import STEPS, Undisturbed, assert_ranks_left_nothing, lines, make_job, outcome, run

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("nothing_left")]

INTERVAL = 5
POINTS = ("forward", "backward", "reduction", "commit", "agreed", "updated", "done", "snapshot")
KINDS = {"one replica": ((1, 2, 1), "none"), "sharded": ((2, 2, 1), "optimizer")}


def check(kind: str, name: str, kills: list[Kill], undisturbed: Undisturbed) -> None:
    mesh, sharding = KINDS[kind]
    calm = make_job(undisturbed.directory, name, mesh)
    train: Any = replace(calm.train, sharding=sharding)
    config = replace(calm, train=train, checkpoint=replace(calm.checkpoint, interval=None),
                     recovery=replace(calm.recovery, snapshot_interval=INTERVAL))
    plan_kills(config, kills)
    text = run(config)
    assert kills_left(config) == [], text
    recovered = [event for event in lines(config, "events.jsonl") if event["event"] == "recovered"]
    assert len(recovered) == len(kills)
    assert all("went back to the snapshot of step" in event["text"] for event in recovered), text
    again = max(len(begun) for begun in steps_begun(config).values()) - STEPS
    assert again <= len(kills) * 2 * INTERVAL, "the newest snapshot, or the one before if that was under way"
    assert outcome(config) == undisturbed[mesh], text
    assert_ranks_left_nothing(config)


@pytest.mark.parametrize("kind", [pytest.param("one replica", marks=pytest.mark.slow), "sharded"])
def test_a_death_goes_back_to_the_snapshot(kind: str, undisturbed: Undisturbed) -> None:
    size = 2 if kind == "one replica" else 4
    check(kind, f"snapshot-{size}", [Kill(rank=size - 1, point="backward", step=13), Kill(rank=0, point="updated", step=28)],
          undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(15))
def test_a_death_anywhere_goes_back_to_the_snapshot(seed: int, undisturbed: Undisturbed) -> None:
    draw, kind = random.Random(seed), list(KINDS)[seed % 2]
    point = draw.choice(POINTS)
    step = draw.randrange(3, STEPS // INTERVAL) * INTERVAL if point == "snapshot" else draw.randrange(12, STEPS)
    check(kind, f"snapshots-{seed}", [Kill(rank=draw.randrange(2), point=point, step=step)], undisturbed)
