"""Ranks killed at random points of a running job: it goes on, does at most one step again for each death, and ends bit-equal
to a run that nothing happened to. Nothing is left of it.

The normal run takes two seeds; `pytest -m slow tests/gang/test_chaos.py` all of them, at 2x2x1 and 2x2x2.
"""

import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from chaos import MOVE_POINTS, RECOVERY_POINTS, STEP_POINTS, Kill, kills_left, plan_kills, steps_begun
from chaos_jobs import SAVE, STEPS, Outcome, Undisturbed, assert_ranks_left_nothing, lines, make_job, outcome, run

from raytrain3d.config import JobConfig, MeshConfig, PipelineConfig
from raytrain3d.plan.mesh import Mesh

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("nothing_left")]

SEEDS = range(30)
QUICK = {1: (2, 2, 1), 23: (2, 2, 1)}
"""Seeds of the normal run: one with a second death during the recovery, one whose commit vector reaches some ranks only, so
that the others are rolled forward."""


def mesh_of(seed: int) -> tuple[int, int, int]:
    return QUICK.get(seed, (2, 2, 1 + seed % 2))


def draw_kills(seed: int) -> list[Kill]:
    """One death in a step, a save or a move, and in every third run another one during the recovery from it."""
    draw, mesh = random.Random(seed), Mesh(**dict(zip(("data", "pipeline", "tensor"), mesh_of(seed), strict=True)))
    point = draw.choice([*STEP_POINTS, MOVE_POINTS])
    rank = draw.randrange(mesh.size)
    if isinstance(point, tuple):
        first = Kill(rank=rank, point=draw.choice(point))
    elif point == "vector":  # the root passes it on to the other leader and its own gang, that one to its gang
        rank = draw.choice([0, mesh.gang(1)[0]])
        sends = mesh.ranks_per_gang - 1 + (rank == 0)
        first = Kill(rank=rank, point=point, step=draw.randrange(2, STEPS), count=draw.randrange(sends))
    elif point.startswith("sav"):
        first = Kill(rank=rank, point=point, step=draw.randrange(1, STEPS // SAVE) * SAVE)
    else:
        first = Kill(rank=rank, point=point, step=draw.randrange(2, STEPS), count=draw.randrange(2) if point in (
            "forward", "backward", "reduction") else 0)
    if seed % 3 != 1:
        return [first]
    (donor,) = set(mesh.group("data", first.rank)) - {first.rank}  # the last one that holds the state
    second = draw.choice([other for other in range(mesh.size) if other != donor])
    points = RECOVERY_POINTS if second == first.rank else [p for p in RECOVERY_POINTS if p != "fill"]
    return [first, Kill(rank=second, point=draw.choice(points))]


def again(config: JobConfig) -> Counter[int]:
    """Step -> how many times it was begun beyond the first, by the rank that began it most often."""
    found: Counter[int] = Counter()
    for begun in steps_begun(config).values():
        for step, times in Counter(begun).items():
            found[step] = max(found[step], times - 1)
    return +found


def check(config: JobConfig, kills: list[Kill], wanted: Outcome, *, most_again: int) -> list[dict[str, Any]]:
    """The job with these deaths ends as it should. Returns its recoveries."""
    plan_kills(config, kills)
    text = run(config)
    assert kills_left(config) == [], text
    events = lines(config, "events.jsonl")
    recovered = [event for event in events if event["event"] == "recovered"]
    assert [event["event"] for event in events].count("failure") == len(kills) and recovered, text
    assert sum(again(config).values()) <= most_again, text
    numbers, tensors = outcome(config)
    assert numbers == wanted[0], text
    assert tensors == wanted[1], text
    assert_ranks_left_nothing(config)
    return recovered


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed in QUICK else pytest.mark.slow) for seed in SEEDS])
def test_a_death_costs_one_step_at_most(seed: int, undisturbed: Undisturbed) -> None:
    kills, mesh = draw_kills(seed), mesh_of(seed)
    config = make_job(undisturbed.directory, f"seed-{seed}", mesh)
    recovered = check(config, kills, undisturbed[mesh], most_again=1)
    assert all("filled from" in event["text"] for event in recovered)


def test_both_replicas_of_a_shard_come_back_from_the_checkpoint(undisturbed: Undisturbed) -> None:
    mesh = (2, 2, 1)
    config = make_job(undisturbed.directory, "both", mesh)
    kills = [Kill(rank=rank, point="forward", step=15) for rank in (1, 3)]
    plan_kills(config, kills)
    text = run(config)
    assert kills_left(config) == []
    assert re.search("nobody else holds what ranks 1, 3 held, so all went back to the checkpoint of step (6|12)", text), text
    assert outcome(config) == undisturbed[mesh]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["optimizer", "gradients", "full"])
def test_shard_groups_fill_each_other(sharding: str, undisturbed: Undisturbed) -> None:
    """Replicas 0 and 1 share a state, and so do 2 and 3: what a rank of one group held is in the other one, too."""
    jobs = [replace(make_job(undisturbed.directory, f"{name}-{sharding}", (4, 2, 1), sharding=sharding, shard_group=2),
                    mesh=MeshConfig(data=4), pipeline=PipelineConfig()) for name in ("calm-groups", "groups")]
    plan_kills(jobs[0], [])
    run(jobs[0], move=False)
    plan_kills(jobs[1], [Kill(rank=1, point="backward", step=9), Kill(rank=2, point="agreed", step=21)])
    text = run(jobs[1], move=False)
    assert kills_left(jobs[1]) == []
    assert "rank 1 filled from rank 3" in text and "rank 2 filled from rank 0" in text
    assert outcome(jobs[1]) == outcome(jobs[0]), text
