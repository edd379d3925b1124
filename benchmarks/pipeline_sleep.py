"""Stages that sleep: what a pipeline runtime adds to the ideal 1F1B step: ours, torch's and DeepSpeed's.

A forward sleeps 10 ms, a backward 20 ms. Overhead is measured over ideal step time, minus one; the ideal step is the
simulated one with exactly these costs, so the overshoot of the sleeps themselves counts as overhead (it is printed).
"""

import statistics
from dataclasses import dataclass
from typing import Any

import deepspeed_pipeline
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


def seconds(op: Op) -> float:
    return 0.010 if op.kind is Kind.FORWARD else 0.020


def peer_layer() -> SleepingLayer:
    return SleepingLayer(lambda part: sleep(0.010 if part is Kind.FORWARD else 0.020))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sleeps:
    """What one rank saw."""

    steps: dict[str, list[Span]]
    overshoot_s: float
    """Median over our ops of what a sleep took beyond what was asked."""


class TorchPipeline:
    """torch's 1F1B over the same layers."""

    def __init__(self, place: Place, num_micro_batches: int) -> None:
        stage = PipelineStage(peer_layer(), place.rank, place.num_ranks, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=lambda output, target: output.sum(),
                                      scale_grads=False)
        self._batch = torch.zeros(num_micro_batches * SHAPE[0], *SHAPE[1:])
        self._first, self._last = place.rank == 0, place.rank == place.num_ranks - 1

    def step(self) -> None:
        inputs: tuple[Tensor, ...] = (self._batch,) if self._first else ()
        self._schedule.step(*inputs, target=self._batch if self._last else None, return_outputs=False)


def sleep_on_rank(place: Place, programs: Programs, rounds: int) -> Sleeps:
    runtime = Runtime(place, programs.schedule.placement, SHAPE)
    ours, num_micro_batches = SleepingPipeline(runtime, programs, seconds), programs.schedule.num_micro_batches
    contestants = {"ours": ours.step, "torch": TorchPipeline(place, num_micro_batches).step}
    if deepspeed_pipeline.INSTALLED:
        contestants["deepspeed"] = deepspeed_pipeline.DeepSpeedPipeline(
            place, [peer_layer() for _ in range(place.num_ranks)], lambda output, target: output.sum(),
            [(torch.zeros(SHAPE), torch.zeros(SHAPE))] * num_micro_batches).step
    steps = take_turns(contestants, rounds)
    beyond = [slept - seconds(op) for step in ours.slept for op, slept in step.items()]
    return Sleeps(steps=steps, overshoot_s=statistics.median(beyond))


def run(*, quick: bool) -> dict[str, Any]:
    """Tables on the way; figures for the line of JSON."""
    found: dict[str, Any] = {}
    for name, (num_ranks, num_micro_batches) in CASES.items():
        found |= compare(name, num_ranks, num_micro_batches, 2 if quick else 15)
    return found


def compare(name: str, num_ranks: int, num_micro_batches: int, rounds: int) -> dict[str, Any]:
    """All contestants by turns on `num_ranks` ranks."""
    programs = programs_for("1f1b", num_ranks, num_micro_batches)
    ranks = spawn(sleep_on_rank, num_ranks, programs, rounds)
    ideal, overshoot = simulate(programs, seconds).makespan, statistics.median(rank.overshoot_s for rank in ranks)
    print(f"sleeping stages, 1F1B, {num_ranks} ranks, {num_micro_batches} micro-batches: ideal {ideal * 1e3:.0f} ms; "
          f"a sleep takes {overshoot * 1e6:.0f} us more than asked")
    found: dict[str, Any] = {f"sleep_overshoot_us_{name}": round(overshoot * 1e6, 1)}
    for who, walls in wall_times([rank.steps for rank in ranks]).items():
        over = [wall / ideal - 1 for wall in walls]
        print(f"  {who:10s} {statistics.median(walls) * 1e3:7.1f} ms {statistics.median(over):+8.2%}", flush=True)
        found |= figure(f"{'' if who == 'ours' else f'{who}_'}overhead_sleep_{name}", over)
    return found
