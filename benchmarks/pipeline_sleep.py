"""Stages that sleep: what a pipeline runtime adds to the ideal 1F1B step, ours and torch's.

A forward sleeps 10 ms, a backward 20 ms. Overhead is measured over ideal step time, minus one; the ideal step is the
simulated one with exactly these costs, so the overshoot of the sleeps themselves counts as overhead (it is printed).
"""

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from common import Place, Span, figure, spawn, take_turns, wall_times
from runtime import Runtime
from sleeping import SHAPE, SleepingLayer, SleepingPipeline, sleep
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from raytrain3d.plan.program import Programs, programs_for
from raytrain3d.plan.schedule import Kind, Op
from raytrain3d.plan.simulate import simulate

CASES = {"pp4": (4, 16), "pp8": (8, 32)}
"""Name -> ranks, micro-batches."""
PARTS = {Kind.FORWARD: 0.010, Kind.BACKWARD_INPUT: 0.020, Kind.BACKWARD_WEIGHT: 0.0}
"""Seconds that torch's stages sleep, the whole backward at once as in ours."""


def seconds(op: Op) -> float:
    return 0.010 if op.kind is Kind.FORWARD else 0.020


@dataclass(frozen=True, kw_only=True, slots=True)
class Sleeps:
    """What one rank saw."""

    steps: dict[str, list[Span]]
    overshoot_s: float
    """Median over our ops of what a sleep took beyond what was asked."""


class TorchPipeline:
    """torch's 1F1B over the same layers."""

    def __init__(self, place: Place, num_micro_batches: int) -> None:
        stage = PipelineStage(SleepingLayer(lambda part: sleep(PARTS[part])), place.rank, place.num_ranks,
                              torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=lambda output, target: output.sum(),
                                      scale_grads=False)
        self._batch = torch.zeros(num_micro_batches * SHAPE[0], *SHAPE[1:])
        self._first, self._last = place.rank == 0, place.rank == place.num_ranks - 1

    def step(self) -> None:
        inputs: tuple[Tensor, ...] = (self._batch,) if self._first else ()
        self._schedule.step(*inputs, target=self._batch if self._last else None, return_outputs=False)


def sleep_on_rank(place: Place, programs: Programs, rounds: int) -> Sleeps:
    runtime = Runtime(place, programs.schedule.placement, SHAPE)
    ours = SleepingPipeline(runtime, programs, seconds)
    theirs = TorchPipeline(place, programs.schedule.num_micro_batches)
    steps = take_turns({"ours": ours.step, "torch": theirs.step}, rounds)
    beyond = [slept - seconds(op) for step in ours.slept for op, slept in step.items()]
    return Sleeps(steps=steps, overshoot_s=statistics.median(beyond))


def run(*, quick: bool) -> dict[str, Any]:
    """A table on the way; figures for the line of JSON."""
    print("sleeping stages, 1F1B, forward 10 ms, backward 20 ms")
    print(f"{'':6s} {'ideal':>9s} {'ours':>9s} {'over':>7s} {'torch':>9s} {'over':>7s} {'overshoot of a sleep':>21s}")
    found: dict[str, Any] = {}
    for name, (num_ranks, num_micro_batches) in CASES.items():
        found |= compare(name, num_ranks, num_micro_batches, 3 if quick else 15)
    return found


def compare(name: str, num_ranks: int, num_micro_batches: int, rounds: int) -> dict[str, Any]:
    """Ours and torch's by turns on `num_ranks` ranks."""
    programs = programs_for("1f1b", num_ranks, num_micro_batches)
    ranks = spawn(sleep_on_rank, num_ranks, programs, rounds)
    ideal, walls = simulate(programs, seconds).makespan, wall_times([rank.steps for rank in ranks])
    over = {who: [wall / ideal - 1 for wall in steps] for who, steps in walls.items()}
    overshoot = statistics.median(rank.overshoot_s for rank in ranks)
    ours, theirs = (f"{statistics.median(walls[who]) * 1e3:6.1f} ms {statistics.median(over[who]):7.2%}"
                    for who in ("ours", "torch"))
    print(f"{name:6s} {ideal * 1e3:6.1f} ms {ours} {theirs} {overshoot * 1e6:18.0f} us")
    return {**figure(f"overhead_sleep_{name}", over["ours"]), **figure(f"torch_overhead_sleep_{name}", over["torch"]),
            f"sleep_overshoot_us_{name}": round(overshoot * 1e6, 1)}
