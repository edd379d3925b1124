"""What a death costs: a rank of a 2x2x1 job on plain processes is killed, with and without a spare process waiting.

Each round runs the job three times: with a spare, without, and ended by the death and started again from its checkpoint.
From the kill to the end of the next step. Beside it what recovery costs while nobody dies: the commit
vector against an all-reduce of one number, which a norm needs anyway, and snapshots against the same job without. Prints one
line of JSON.

    python benchmarks/recovery.py [--quick]
"""

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Place, figure, ratios, spawn
from mortal import VICTIM, MortalTrainer, PeriodicallyKilled

from raytrain3d.config import (CheckpointConfig, DataConfig, JobConfig, LearningRateConfig, MeshConfig, ModelConfig,
                               PlacementConfig, RebalanceConfig, RecoveryConfig, RunConfig, TrainConfig)
from raytrain3d.data.prepare import prepare
from raytrain3d.errors import RankFailed
from raytrain3d.gang.run import run_job
from raytrain3d.parallel.commit import CommitVector, sum_over_all
from raytrain3d.parallel.groups import Groups, Link, join_store
from raytrain3d.plan.mesh import Mesh

def job(directory: Path, name: str, **recovery: Any) -> JobConfig:
    """About 0.1 s a step on 2 cores."""
    return JobConfig(
        run=RunConfig(name=name, directory=str(directory / name)), data=DataConfig(path=str(directory / "data")),
        model=ModelConfig(vocabulary=257, hidden=128, blocks=4, heads=4, feed_forward=352),
        mesh=MeshConfig(data=2, pipeline=2), learning_rate=LearningRateConfig(peak=1e-3),
        train=TrainConfig(steps=40, global_batch=8, micro_batch=2, sequence=128, deterministic=True),
        checkpoint=CheckpointConfig(interval=10), placement=PlacementConfig(device="cpu"),
        recovery=RecoveryConfig(**recovery), rebalance=RebalanceConfig(mode="off"))


def ends(config: JobConfig, rank: int) -> list[float]:
    """When steps ended on a rank."""
    return [float(line) for line in (Path(config.run.directory) / f"ends-{rank}.txt").read_text().split()]


def killed_and_recovered(config: JobConfig) -> float:
    """Seconds from the kill to the end of the next step, on the rank that was killed: all ranks do it together."""
    place = Path(config.run.directory)
    place.mkdir()
    (place / "kill").touch()

    def run() -> None:
        assert run_job(config, launcher="local", output=io.StringIO(), trainer=MortalTrainer) == 0

    with suppress(RankFailed):
        run()
    if config.recovery.deaths == 0:
        run()
    killed = float((place / "killed").read_text())
    return min(end for end in ends(config, VICTIM) if end > killed) - killed


def step_seconds(config: JobConfig, steps: int) -> float:
    """Mean time between ends of steps of a job in which nobody dies, the first five left out."""
    Path(config.run.directory).mkdir()
    longer = replace(config, train=replace(config.train, steps=steps))
    assert run_job(longer, launcher="local", output=io.StringIO(), trainer=MortalTrainer) == 0
    times = ends(config, 0)[5:]
    return (times[-1] - times[0]) / (len(times) - 1)


def goodput(config: JobConfig, every_s: float, length_s: float) -> float:
    """Of a job in which a rank is killed every so often."""
    place = Path(config.run.directory)
    place.mkdir()
    long = replace(config, train=replace(config.train, steps=max(60, int(length_s / 0.1))))
    assert run_job(long, launcher="local", output=io.StringIO(), trainer=PeriodicallyKilled(every_s)) == 0
    lines = (place / config.run.name / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["goodput"])


def commit_seconds(place: Place, times: int) -> tuple[float, float]:
    """(sum of a commit vector, all-reduce of one number) between 2 ranks, medians."""
    mesh = Mesh(data=2)
    link = Link(join_store("127.0.0.1", place.port, 60), 1, 60)
    groups = Groups(mesh, (0,), place.rank, link, device="cpu")
    one = torch.zeros(1, dtype=torch.float64)

    def vector() -> None:
        sum_over_all(CommitVector(mesh, 34).values, groups)

    def timed(act: Callable[[], object]) -> float:
        start = time.perf_counter()
        act()
        return time.perf_counter() - start

    pairs = [(timed(vector), timed(lambda: groups.data.all_reduce(one).wait())) for _ in range(times)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round and a short goodput run, about a minute")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    steps = 40 if arguments.quick else 150  # of which snapshots take some percent: a short job does not show them
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        prepare(["{stdlib}/*.py"], str(place / "data"), "bytes", 0.05)
        found: dict[str, list[float]] = {key: [] for key in ("spare", "fresh", "restart", "plain", "snapshots")}
        for number in range(rounds):
            found["spare"].append(killed_and_recovered(job(place, f"spare-{number}", spares=1)))
            found["fresh"].append(killed_and_recovered(job(place, f"fresh-{number}")))
            found["restart"].append(killed_and_recovered(job(place, f"restart-{number}", deaths=0)))
            found["plain"].append(step_seconds(job(place, f"plain-{number}"), steps))
            snapshots = job(place, f"snapshots-{number}", snapshot_interval=10)
            found["snapshots"].append(step_seconds(snapshots, steps))
            print(f"round {number}  " + "  ".join(f"{key} {values[-1]:.3f} s" for key, values in found.items()), flush=True)
        every_s, length_s = (15.0, 20.0) if arguments.quick else (60.0, 240.0)
        share = goodput(job(place, "goodput", spares=1, deaths=100), every_s, length_s)
        vector_s, norm_s = spawn(commit_seconds, 2, 200)[0]
    print(json.dumps({
        **figure("recovery_s_spare", found["spare"]), **figure("recovery_s", found["fresh"]),
        **figure("restart_s", found["restart"]),
        **figure("snapshot_share", [ratio - 1 for ratio in ratios(found["snapshots"], found["plain"])]),
        "commit_share": round((vector_s - norm_s) / statistics.median(found["plain"]), 4), "goodput": round(share, 3),
        "rounds": rounds, "ranks": 4}))


if __name__ == "__main__":
    main()
