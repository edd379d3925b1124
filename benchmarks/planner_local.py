"""How well the planner foretells time and memory of runs on this machine, calibrated by `raytrain3d profile` alone.

The profile times a short model. Then come six layouts of a longer one on at most two ranks that compute, and six on 4 to 8
ranks whose layers sleep (a machine has few cores), for which layers that sleep were profiled. Time is the median step,
memory the most that a process of the fullest rank had.

    python benchmarks/planner_local.py [--quick]
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stand_ins import SleepingTrainer

from raytrain3d.config import (
    DataConfig,
    JobConfig,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    PlacementConfig,
    RunConfig,
    TrainConfig,
)
from raytrain3d.gang.launchers import LocalLauncher
from raytrain3d.gang.profiling import profile_job
from raytrain3d.gang.trial import make_trial_trainer, run_trial
from raytrain3d.plan.catalogue import NODES
from raytrain3d.plan.profile import Profile
from raytrain3d.plan.search import Choice, Evaluator
from raytrain3d.plan.step_time import Cluster

SLEEPING_DEVICES = 8
"""Ranks that may sleep side by side."""
Trainer = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout that was predicted, then measured."""

    name: str
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def job(model: ModelConfig, sequence: int, micro_batches: int) -> JobConfig:
    return JobConfig(run=RunConfig(name="local"), data=DataConfig(path="none"), model=model,
                     placement=PlacementConfig(device="cpu"),
                     train=TrainConfig(steps=1, global_batch=micro_batches, sequence=sequence))


COMPUTING = job(ModelConfig(vocabulary=8192, hidden=384, blocks=8, heads=6, feed_forward=1024), 128, 12)
SLEEPING = job(ModelConfig(vocabulary=257, hidden=16, blocks=14, heads=2, feed_forward=32), 16, 16)


def layout(base: JobConfig, data: int, pipeline: int, tensor: int, schedule: Any = "1f1b", chunks: int | None = None,
           **train: Any) -> JobConfig:
    return replace(base, mesh=MeshConfig(data=data, pipeline=pipeline, tensor=tensor),
                   pipeline=PipelineConfig(schedule=schedule, chunks=chunks), train=replace(base.train, **train))


def computing_layouts() -> dict[str, JobConfig]:
    of = partial(layout, COMPUTING)
    return {"one rank": of(1, 1, 1), "data 2": of(2, 1, 1), "data 2, optimizer sharded": of(2, 1, 1, sharding="optimizer"),
            "pipeline 2": of(1, 2, 1), "pipeline 2, zb_v": of(1, 2, 1, "zb_v"),
            "pipeline 2, recompute full": of(1, 2, 1, recompute="full")}


def sleeping_layouts() -> dict[str, JobConfig]:
    of = partial(layout, SLEEPING)
    return {"pipeline 4": of(1, 4, 1), "pipeline 4, gpipe": of(1, 4, 1, "gpipe"),
            "pipeline 4, interleaved x 2": of(1, 4, 1, "interleaved", 2), "data 2 x pipeline 2": of(2, 2, 1),
            "data 2 x pipeline 4": of(2, 4, 1), "pipeline 8": of(1, 8, 1)}


def evaluator(profile: Profile, devices: int) -> Evaluator:
    node = replace(NODES["cpu"], devices=devices)
    return Evaluator(cluster=Cluster(node=node, calibration=profile.calibration), allocation=profile.allocation)


def compare(name: str, config: JobConfig, own: Evaluator, trainer: Trainer, num_steps: int) -> Case:
    """Predict, then measure the layout with the planner's split."""
    choice = own.evaluate(config)
    trial = run_trial(choice.config, LocalLauncher(), num_steps=num_steps, say=lambda text: None, trainer=trainer)
    fullest = max(range(config.mesh.pipeline), key=lambda rank: trial.memory_bytes[rank])
    case = Case(name=name, predicted_s=choice.step.total, measured_s=trial.step_s,
                predicted_bytes=choice.memory[fullest].needed, measured_bytes=trial.memory_bytes[fullest])
    print(f"  {name:30s} {case.predicted_s:8.3f} s {case.measured_s:8.3f} s {case.time_error:+7.1%}  "
          f"{case.predicted_bytes / 2**20:7.0f} MiB {case.measured_bytes / 2**20:7.0f} MiB {case.memory_error:+7.1%}"
          f"  {tensors_share(choice, fullest):.0%} tensors", flush=True)
    return case


def tensors_share(choice: Choice, rank: int) -> float:
    """Of the predicted memory; the rest is what a process holds without any."""
    return choice.memory[rank].tensors.total / choice.memory[rank].needed


def part(title: str, layouts: dict[str, JobConfig], trainer: Trainer, devices: int, num_steps: int) -> list[Case]:
    """A profile, then all layouts."""
    first = next(iter(layouts.values()))
    profile = profile_job(first, replace(NODES["cpu"], devices=2), launcher="local", address=None,
                          say=lambda text: None, trainer=trainer)
    print(f"\n{title}\n{profile.text()}")
    print(f"  {'':30s} {'predicted':>10s} {'measured':>10s} {'error':>7s}  "
          f"{'predicted':>11s} {'measured':>11s} {'error':>7s}")
    own = evaluator(profile, devices)
    return [compare(name, config, own, trainer, num_steps) for name, config in layouts.items()]


def figures(cases: Sequence[Case]) -> dict[str, float]:
    times, memory = ([abs(getattr(case, kind)) for case in cases] for kind in ("time_error", "memory_error"))
    return {"local_mape": statistics.mean(times), "local_max": max(times), "local_memory_mape": statistics.mean(memory),
            "local_memory_max": max(memory)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer layouts and steps")
    quick = parser.parse_args().quick
    count, num_steps = (1, 2) if quick else (6, 8)
    computing = part("ranks that compute", dict(list(computing_layouts().items())[:count]), make_trial_trainer, 2, num_steps)
    sleeping = part("ranks that sleep", dict(list(sleeping_layouts().items())[:count]), partial(SleepingTrainer, noise=0.0),
                    SLEEPING_DEVICES, num_steps)
    found = figures([*computing, *sleeping]) | {f"computing_{key}": value for key, value in figures(computing).items()}
    found |= {f"sleeping_{key}": value for key, value in figures(sleeping).items()}
    print(json.dumps({key: round(value, 4) for key, value in found.items()}))


if __name__ == "__main__":
    main()
