"""Rebalancing a running job: how near it comes to the best static split, how fast it follows changes, what a move costs.

The whole driver runs, on plain processes; layers sleep instead of computing, so that more ranks than cores fit a machine
and the best split is known: by exhaustive search with the simulator. Real compute comes last. Prints a table of each part
and one line of JSON.

    python benchmarks/rebalance.py [--quick] [--only PART ...]
"""

import argparse
import io
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from common import Place, spawn
from stand_ins import BACKWARD_S, FORWARD_S, HEAD_BLOCKS, RealTrainer, SleepingTrainer

from raytrain3d.config import (CheckpointConfig, DataConfig, DebugConfig, JobConfig, MeshConfig, ModelConfig, PipelineConfig,
                               PlacementConfig, RebalanceConfig, RunConfig, SlowdownConfig, TrainConfig)
from raytrain3d.data.prepare import prepare
from raytrain3d.gang.run import run_job
from raytrain3d.plan.balance import best_stages
from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.workload import Simulator, Workload
from raytrain3d.train.trainer import Trainer

REAL_HEAD_BLOCKS = 3
"""How many blocks the head is to be worth where layers compute."""
SETTLED = 0.4
"""Share of a run's steps, the last ones, that count as settled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run wrote down."""

    seconds: list[float]
    """By step."""
    events: list[dict[str, Any]]
    stages: Stages

    def settled(self, first: int = 1, last: int | None = None) -> float:
        """Median seconds of the last steps of an interval."""
        steps = self.seconds[first - 1 : last]
        return statistics.median(steps[-max(4, round(SETTLED * len(steps))):])

    def moves(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "rebalance"]


def job(directory: Path, name: str, *, mesh: tuple[int, int] = (1, 4), blocks: int = 16, micro_batches: int = 16,
        steps: int, mode: Any = "on", layers: tuple[int, ...] | None = None, interval: int = 8,
        slowdown: tuple[SlowdownConfig, ...] = ()) -> JobConfig:
    return JobConfig(
        run=RunConfig(name=name, directory=str(directory)), data=DataConfig(path=str(directory / "data")),
        model=ModelConfig(vocabulary=257, hidden=16, blocks=blocks, heads=2, feed_forward=32),
        mesh=MeshConfig(data=mesh[0], pipeline=mesh[1]), pipeline=PipelineConfig(schedule="1f1b", layers=layers),
        train=TrainConfig(steps=steps, global_batch=micro_batches * mesh[0], sequence=16, lease=steps),
        rebalance=RebalanceConfig(mode=mode, interval=interval), checkpoint=CheckpointConfig(keep=1),
        debug=DebugConfig(slowdown=slowdown), placement=PlacementConfig(device="cpu"))


def prepare_data(directory: Path) -> None:
    """A job wants data to open; nothing is read from it."""
    prepare([f"{Path(__file__).parent}/*.py"], str(directory / "data"), "bytes", 0.2)


def run(config: JobConfig, noise: float = 0.0, trainer: Callable[..., Trainer] | None = None,
        launcher: str = "local") -> Outcome:
    run_job(config, launcher=launcher, output=io.StringIO(), trainer=trainer or partial(SleepingTrainer, noise=noise))
    directory = Path(config.run.directory) / config.run.name
    metrics, events = ([json.loads(line) for line in (directory / name).read_text().splitlines()]
                       for name in ("metrics.jsonl", "events.jsonl"))
    plan = Plan.from_json((directory / "plan.json").read_text())
    return Outcome(seconds=[line["seconds"] for line in metrics], events=events, stages=plan.stages)


def best_split(blocks: int, ranks: int, micro_batches: int, slowdowns: tuple[float, ...] | None = None) -> Stages:
    """By exhaustive search with the simulator. Splits with a stage that alone is busy for longer than a whole step of the
    best one so far are not looked at."""
    def cost(weight: float) -> LayerCost:
        return LayerCost(forward=FORWARD_S * weight, backward_input=BACKWARD_S * weight, backward_weight=0.0)

    speeds, weights = slowdowns or (1.0,) * ranks, [0.0, *[1.0] * blocks, float(HEAD_BLOCKS)]
    workload = Workload(schedule="1f1b", num_ranks=ranks, shares=(micro_batches,), slowdowns=(speeds,),
                        costs=tuple(map(cost, weights)))
    simulator, best = Simulator(workload), best_stages(workload)
    least = simulator.time(best)
    work = [0.0, *itertools.accumulate((FORWARD_S + BACKWARD_S) * micro_batches * weight for weight in weights)]

    def search(stages: Stages) -> None:
        nonlocal best, least
        stage, first = len(stages), stages[-1][1] if stages else 0
        last = stage == ranks - 1
        for end in [blocks + 2] if last else range(first + 1, blocks + 2 - (ranks - stage - 2)):
            if (work[end] - work[first]) * speeds[stage] > least:
                break
            split = (*stages, (first, end))
            if not last:
                search(split)
            elif (seconds := simulator.time(split, least)) < least:
                best, least = split, seconds

    search(())
    return best


def counts(stages: Stages) -> tuple[int, ...]:
    return tuple(end - first for first, end in stages)


def show(title: str, rows: Iterable[tuple[str, object]]) -> None:
    print(f"\n{title}")
    for name, value in rows:
        print(f"  {name:<44} {value if not isinstance(value, float) else format(value, '.4g')}")


def heavy_head(directory: Path, ranks: int, blocks: int, micro_batches: int, steps: int) -> dict[str, float]:
    """From as many blocks on every stage, with the head on the last one."""
    uniform = (blocks // ranks + 1, *[blocks // ranks] * (ranks - 2), blocks // ranks + 1)
    best = best_split(blocks, ranks, micro_batches)
    make = partial(job, directory, mesh=(1, ranks), blocks=blocks, micro_batches=micro_batches)
    moved = run(make(f"moved-{ranks}", steps=steps, layers=uniform))
    start = run(make(f"uniform-{ranks}", steps=max(8, steps // 4), layers=uniform, mode="off"))
    static = run(make(f"static-{ranks}", steps=max(8, steps // 4), layers=counts(best), mode="off"))
    of_best, gain = static.settled() / moved.settled(), start.settled() / moved.settled()
    show(f"PP{ranks}, {blocks} blocks, head worth {HEAD_BLOCKS}, {micro_batches} micro-batches", [
        ("layers at first", uniform), ("layers in the end", counts(moved.stages)), ("best static split", counts(best)),
        ("moves", len(moved.moves())), ("seconds a step, uniform", start.settled()),
        ("seconds a step, moved", moved.settled()), ("seconds a step, best static", static.settled()),
        ("of the best static throughput", of_best), ("gain over uniform", gain)])
    suffix = "" if ranks == 4 else f"_pp{ranks}"
    return {f"of_best_static{suffix}": of_best, f"gain_vs_uniform{suffix}": gain, f"moves{suffix}": len(moved.moves())}


def slow_rank(directory: Path, scale: int) -> dict[str, float]:
    """Rank 1 is slowed 1.5 times at step 50 and freed at step 150, both divided by `scale`."""
    first, last, steps = 50 // scale, 150 // scale - 1, 200 // scale
    slow = SlowdownConfig(rank=1, factor=1.5, first=first, last=last)
    normal, slowed = best_split(16, 4, 16), best_split(16, 4, 16, (1.0, 1.5, 1.0, 1.0))
    make = partial(job, directory)
    followed = run(make("followed", steps=steps, layers=counts(normal), slowdown=(slow,)))
    static_slow = run(make("static-slow", steps=10, layers=counts(slowed), mode="off",
                           slowdown=(replace(slow, first=1, last=None),)))
    static_free = run(make("static-free", steps=10, layers=counts(normal), mode="off"))
    moves = [move["step"] for move in followed.moves()]
    answers = [next((step - change for step in moves if step >= change), steps) for change in (first, last + 1)]
    values = {"of_best_static_slow": static_slow.settled() / followed.settled(first + 20, last),
              "of_best_static_freed": static_free.settled() / followed.settled(last + 21, steps),
              "steps_to_split_slow": answers[0], "steps_to_split_freed": answers[1]}
    show("a rank slowed 1.5 times and freed again", [
        ("best split while slow", counts(slowed)), ("best split else", counts(normal)), ("moves after steps", moves),
        *values.items()])
    return values


def noise(directory: Path, steps: int) -> dict[str, float]:
    """15 % random noise on a balanced job."""
    best = best_split(16, 4, 4)
    outcome = run(job(directory, "noise", steps=steps, micro_batches=4, layers=counts(best)), noise=0.15)
    show(f"{steps} steps with 15 % noise", [("moves", len(outcome.moves()))])
    return {"moves_under_noise": len(outcome.moves())}


def shares(directory: Path, steps: int) -> dict[str, float]:
    """One of two replicas slowed 1.5 times, with layers split as well as can be."""
    slow = tuple(SlowdownConfig(rank=rank, factor=1.5) for rank in (2, 3))
    make = partial(job, directory, mesh=(2, 2), blocks=8, micro_batches=10, slowdown=slow,
                   layers=counts(best_split(8, 2, 10)))
    moved = run(make("shares", steps=steps))
    equal = run(make("equal-shares", steps=max(8, steps // 3), mode="off"))
    gain = equal.settled() / moved.settled()
    last = moved.moves()[-1]["shares"] if moved.moves() else "equal"
    show("one of two replicas slowed 1.5 times", [("micro-batches in the end", last), ("gain over equal shares", gain)])
    return {"gain_shares": gain}


def real_job(directory: Path, name: str, vocabulary: int, steps: int, layers: tuple[int, ...],
             mode: Any = "on") -> JobConfig:
    """2 stages, 8 blocks of hidden 256, a head whose work grows with the vocabulary."""
    config = job(directory, name, mesh=(1, 2), blocks=8, micro_batches=8, steps=steps, layers=layers, mode=mode)
    model = ModelConfig(vocabulary=vocabulary, hidden=256, blocks=8, heads=8, feed_forward=704)
    return replace(config, model=model, train=replace(config.train, sequence=128))


def vocabulary_for_head(directory: Path) -> int:
    """One with which the head is worth `REAL_HEAD_BLOCKS` blocks on this machine."""
    tried = 8192
    run(real_job(directory, "tried", tried, 8, (5, 5), mode="off"), trainer=RealTrainer)
    return round(tried * REAL_HEAD_BLOCKS / head_in_blocks(directory, "tried") / 256) * 256


def real_compute(directory: Path, steps: int, pairs: int) -> dict[str, float]:
    """Real layers from as many blocks on both stages. Runs with and without moves take turns."""
    gains, pauses, restarts, head = [], [], [], []
    rate, vocabulary = link_rate(), vocabulary_for_head(directory)
    for i in range(pairs):
        moved = run(real_job(directory, f"real-moved-{i}", vocabulary, steps, (5, 5)), trainer=RealTrainer)
        still = run(real_job(directory, f"real-still-{i}", vocabulary, steps // 2, (5, 5), mode="off"), trainer=RealTrainer)
        gains.append(still.settled() / moved.settled())
        if not moved.moves():
            print(f"pair {i} without a move:", *(event["text"] for event in moved.events), sep="\n  ", flush=True)
        for move in moved.moves()[:1]:
            pauses.append((move["seconds"] - move["bytes"] / rate) / still.settled())
            restarts.append(restart_s(directory, i, vocabulary) / move["seconds"])
        head.append(head_in_blocks(directory, f"real-still-{i}"))
    values = {"gain_real_pp2": statistics.median(gains), "head_blocks_measured": statistics.median(head),
              "vocabulary": vocabulary}
    if pauses:
        values |= {"pause_steps": statistics.median(pauses), "restart_pause_ratio": statistics.median(restarts)}
    show(f"real compute, PP2, 8 blocks, {pairs} pairs", [
        ("gains", [round(gain, 3) for gain in gains]), ("link rate, MB/s", rate / 1e6),
        ("pauses in steps, bytes aside", [round(pause, 2) for pause in pauses]), *values.items()])
    return values


def head_in_blocks(directory: Path, name: str) -> float:
    """What the head takes over what a block takes: median of the later half of the steps."""
    lines = (directory / name / "metrics.jsonl").read_text().splitlines()
    return statistics.median(_head_in_blocks(json.loads(line)) for line in lines[len(lines) // 2 :])


def _head_in_blocks(step: dict[str, Any]) -> float:
    total = {int(layer): seconds + step["layer_backward_s"][layer] for layer, seconds in step["layer_forward_s"].items()}
    return total[9] / statistics.median(total[layer] for layer in range(1, 9))


def restart_s(directory: Path, number: int, vocabulary: int) -> float:
    """Seconds without training when a job is stopped with a checkpoint and started again with another split."""
    name = f"restart-{number}"
    run(real_job(directory, name, vocabulary, 4, (5, 5), mode="off"), trainer=RealTrainer)
    stopped = step_times(directory, name)[-1]
    outcome = run(real_job(directory, name, vocabulary, 8, (7, 3), mode="off"), trainer=RealTrainer)
    return step_times(directory, name)[4] - outcome.seconds[4] - stopped


def step_times(directory: Path, name: str) -> list[float]:
    """When each step was recorded, in seconds since 1970."""
    return [json.loads(line)["time"] for line in (directory / name / "metrics.jsonl").read_text().splitlines()]


def link_rate() -> float:
    """Bytes a second from one process to another."""
    return max(spawn(_send_bytes, 2))


def _send_bytes(place: Place) -> float:
    tensor, repeats = torch.zeros(4 << 20), 5
    for number in range(1 + repeats):
        if number == 1:
            start = time.perf_counter()
        torch.distributed.send(tensor, 1) if place.rank == 0 else torch.distributed.recv(tensor, 0)
    torch.distributed.barrier()
    return tensor.nbytes * repeats / (time.perf_counter() - start)


PARTS: dict[str, Callable[[Path, bool], dict[str, float]]] = {
    "pp4": lambda directory, quick: heavy_head(directory, 4, 16, 16, 24 if quick else 60),
    "pp8": lambda directory, quick: heavy_head(directory, 8, 32, 32, 24 if quick else 60),
    "slow": lambda directory, quick: slow_rank(directory, 2 if quick else 1),
    "noise": lambda directory, quick: noise(directory, 60 if quick else 300),
    "shares": lambda directory, quick: shares(directory, 24 if quick else 60),
    "real": lambda directory, quick: real_compute(directory, 40, 1 if quick else 15),
}
QUICK = ("pp4", "shares")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="parts pp4 and shares, or those of --only, with fewer steps")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts alone")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    values: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="rebalance-") as directory:
        prepare_data(Path(directory))
        for part in arguments.only or (QUICK if arguments.quick else PARTS):
            values |= PARTS[part](Path(directory), arguments.quick)
    print(json.dumps({key: round(value, 4) for key, value in values.items()}))


if __name__ == "__main__":
    main()
