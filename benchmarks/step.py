"""A step of ours with its blocks compiled and without, in turns: what that gains, what it costs once, and where time goes.

Two replicas of a 28M model on two processes of one thread, so that gradients are reduced and steps are committed. Prints
the parts of a step (attention, feed-forward, norms, head, optimizer, communication, commit) and one line of JSON.

    python benchmarks/step.py [--quick]
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import Place, Span, figure, ratios, spawn, take_turns, wall_times
from language_model import FULL, QUICK, Workload
from parts import step_parts, table
from pipeline_mesh import COMPARED, NUM_MICRO_BATCHES, OurTraining, mesh_job

from raytrain3d.config import MeshConfig
from raytrain3d.plan.plan import make_plan

NUM_RANKS = 2
PART_REPEATS = 5
KINDS = {"eager": "none", "compiled": "inductor"}
"""Contestant -> `train.compile`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one rank saw, by contestant."""

    steps: dict[str, list[Span]]
    losses: dict[str, list[float]]
    first_s: dict[str, float]
    """Seconds of the first step, in which compiling falls."""
    parts: dict[str, dict[str, float]]


def train(place: Place, workload: Workload, rounds: int) -> Measured:
    config = mesh_job(workload, MeshConfig(data=NUM_RANKS))
    trainings, first_s = {}, {}
    for generation, (name, backend) in enumerate(KINDS.items()):
        compiled = replace(config, train=replace(config.train, compile=backend))  # type: ignore[arg-type]
        trainings[name] = OurTraining(place, compiled, make_plan(compiled), workload, generation)
        start = time.perf_counter()
        trainings[name].step()
        first_s[name] = time.perf_counter() - start
    steps = take_turns({name: each.step for name, each in trainings.items()}, rounds)
    parts = {name: step_parts(each.trainer, each.reports[2:], PART_REPEATS) for name, each in trainings.items()}
    return Measured(steps=steps, first_s=first_s, parts=parts,
                    losses={name: each.losses for name, each in trainings.items()})


def figures(ranks: list[Measured]) -> dict[str, Any]:
    """Tables on the way."""
    walls, rank = wall_times([each.steps for each in ranks]), ranks[0]
    pairs = list(zip(rank.losses["compiled"], rank.losses["eager"], strict=True))[:COMPARED]
    off = max(abs(own / other - 1) for own, other in pairs)
    cost = max(each.first_s["compiled"] for each in ranks) - statistics.median(walls["compiled"])
    print(f"{NUM_RANKS} replicas, {NUM_MICRO_BATCHES} micro-batches each; losses of the first {COMPARED} steps differ by "
          f"{off:.1e}{' (more than 1e-5: WRONG)' if off > 1e-5 else ''}")
    for name, seconds in walls.items():
        print(f"  {name:10s} {statistics.median(seconds) * 1e3:8.0f} ms a step")
    print(f"  compiling takes {cost:.1f} s, once\n\n{table(rank.parts)}\n")
    shares = {f"share_{name.replace(' ', '_')}": round(seconds / sum(rank.parts["eager"].values()), 4)
              for name, seconds in rank.parts["eager"].items()}
    return {**figure("compile_speedup", ratios(walls["eager"], walls["compiled"])), "compile_s": round(cost, 2),
            "loss_difference": off, "rounds": len(walls["eager"]), **shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, seconds; the figures then mean nothing")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    workload, rounds = (QUICK, 1) if arguments.quick else (FULL, arguments.rounds)
    torch.set_num_threads(1)
    print(json.dumps(figures(spawn(train, NUM_RANKS, workload, rounds))))


if __name__ == "__main__":
    main()
