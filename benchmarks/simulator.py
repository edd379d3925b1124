"""How well `plan.simulate` tells the time of a step.

1. Published runs (`--runs`: a CSV of 1F1B runs with the microseconds of every stage and the measured step): `replay_mape`
   and `replay_max`, mean and largest relative error.
2. Our own runtime over stages that sleep, on 4 ranks, every schedule, with even, uneven and random costs; the simulator is
   given the ops as long as the run's own timeline has them and the measured time of a message, so what the runtime takes
   between ops is part of the error. `replay_sleep_max`: largest relative error of a case, each the median of its steps.

    python benchmarks/simulator.py --runs RUNS.csv [--quick]
"""

import argparse
import csv
import json
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common import Place, Span, spawn, take_turns, wall_times
from runtime import Runtime
from sleeping import SHAPE, SleepingPipeline

from raytrain3d.plan.cost import LayerCost, op_cost
from raytrain3d.plan.program import Programs, programs_for
from raytrain3d.plan.schedule import SCHEDULES, Kind, Op
from raytrain3d.plan.simulate import simulate

NUM_RANKS = 4
CHUNKS = {"interleaved": 2, "breadth_first": 2, "zb_v": 2}
"""Stages of each rank, where there is more than one."""


def replay(path: str) -> dict[str, float]:
    """Every run of the CSV: predicted, measured, error."""
    print(f"{'run':44s} {'predicted':>10s} {'measured':>10s} {'error':>8s}")
    errors = []
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            predicted, measured = predicted_s(row), float(row["measured_step_ms"]) / 1e3
            errors.append(predicted / measured - 1)
            print(f"{row['run']:44s} {predicted:8.3f} s {measured:8.3f} s {errors[-1]:+8.2%}")
    absolute = [abs(error) for error in errors]
    return {"replay_mape": round(statistics.mean(absolute), 5), "replay_max": round(max(absolute), 5)}


def predicted_s(row: Mapping[str, str]) -> float:
    """Simulated step of a run, with messages taken as free."""
    forward, backward = ([int(value) / 1e6 for value in row[key].split()] for key in ("forward_us", "backward_us"))
    stages = tuple(LayerCost(forward=f, backward_input=b, backward_weight=0.0)
                   for f, b in zip(forward, backward, strict=True))
    programs = programs_for("1f1b", int(row["pipeline"]), int(row["micro_batches"]))
    return simulate(programs, lambda op: op_cost(op, stages)).makespan


def even(op: Op) -> float:
    """20 ms for a forward, an input gradient, a weight gradient; 40 ms for a full backward."""
    return 0.040 if op.kind is Kind.BACKWARD else 0.020


def uneven(op: Op) -> float:
    """Stages of 12 to 36 ms."""
    return even(op) * (0.6, 1.8, 1.0, 1.4)[op.stage % 4]


def scattered(op: Op) -> float:
    """Every op its own time, half to one and a half of the even one."""
    return even(op) * random.Random(str(op)).uniform(0.5, 1.5)


COSTS: dict[str, Callable[[Op], float]] = {"even": even, "uneven": uneven, "random": scattered}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sleeps:
    """What one rank saw."""

    hop_s: float | None
    steps: dict[str, list[Span]]
    """Case -> its steps."""
    ran: dict[str, list[dict[Op, float]]]
    """Case -> seconds by op, by step."""


def sleep_on_rank(place: Place, num_micro_batches: int, rounds: int) -> Sleeps:
    programs = {schedule: programs_of(schedule, num_micro_batches) for schedule in SCHEDULES}
    runtimes = Runtime.for_all(place, (one.schedule.placement for one in programs.values()), SHAPE)
    pipelines = {f"{schedule} {cost}": SleepingPipeline(runtimes[one.schedule.placement], one, COSTS[cost])
                 for schedule, one in programs.items() for cost in COSTS}
    hop_s = next(iter(runtimes.values())).hop_s()
    steps = take_turns({case: pipeline.step for case, pipeline in pipelines.items()}, rounds)
    return Sleeps(hop_s=hop_s, steps=steps, ran={case: pipeline.ran[-rounds:] for case, pipeline in pipelines.items()})


def programs_of(schedule: str, num_micro_batches: int) -> Programs:
    return programs_for(schedule, NUM_RANKS, num_micro_batches, CHUNKS.get(schedule, 1))


def replay_sleeps(num_micro_batches: int, rounds: int) -> dict[str, Any]:
    """Every schedule and cost on sleeping stages, against the simulator."""
    ranks = spawn(sleep_on_rank, NUM_RANKS, num_micro_batches, rounds)
    hop_s = next(rank.hop_s for rank in ranks if rank.hop_s is not None)
    walls, errors = wall_times([rank.steps for rank in ranks]), {}
    print(f"\nsleeping stages, {NUM_RANKS} ranks, {num_micro_batches} micro-batches, a message takes {hop_s * 1e6:.0f} us")
    print(f"{'schedule':24s} {'predicted':>10s} {'measured':>10s} {'error':>8s}")
    for case, measured in walls.items():
        predicted = [simulated_s(case, num_micro_batches, [rank.ran[case][i] for rank in ranks], hop_s)
                     for i in range(rounds)]
        errors[case] = statistics.median(p / m - 1 for p, m in zip(predicted, measured, strict=True))
        print(f"{case:24s} {statistics.median(predicted):8.4f} s {statistics.median(measured):8.4f} s {errors[case]:+8.2%}")
    return {"replay_sleep_max": round(max(map(abs, errors.values())), 5), "hop_us": round(hop_s * 1e6, 1),
            "cases": len(errors)}


def simulated_s(case: str, num_micro_batches: int, ran: list[dict[Op, float]], hop_s: float) -> float:
    seconds = {op: value for rank in ran for op, value in rank.items()}
    return simulate(programs_of(case.split()[0], num_micro_batches), seconds.__getitem__, hop_s=hop_s).makespan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", required=True, help="CSV of measured runs")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter steps, under a minute")
    arguments = parser.parse_args()
    num_micro_batches, rounds = (4, 1) if arguments.quick else (12, 7)
    print(json.dumps(replay(arguments.runs) | replay_sleeps(num_micro_batches, rounds)))


if __name__ == "__main__":
    main()
