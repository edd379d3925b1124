"""What a user can reach on 2 ranks: every schedule of ours with our layers against every one of torch's with plain modules.

Same weights, batch and division into stages; a step of both ends with gradients. The best of each is found in the run, and
their ratio is reported without a bound, with a profile of where the rest of our time goes.
"""

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from common import Place, Span, figure, ratios, spawn, take_turns, wall_times
from contestants import OurPipeline
from language_model import FULL, QUICK, Model, Workload
from plain_llama import PlainStage
from profiles import Profile, profile, table
from runtime import Runtime
from torch import Tensor
from torch.distributed.pipelining import (PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B,
                                          ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)
from torch.nn.functional import cross_entropy

from raytrain3d.config import MeshConfig
from raytrain3d.parallel.layer_state import DTYPES
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.plan.program import programs_for
from raytrain3d.plan.schedule import SCHEDULES

NUM_RANKS, NUM_MICRO_BATCHES = 2, 8
TORCH = {"gpipe": (ScheduleGPipe, "gpipe"), "1f1b": (Schedule1F1B, "1f1b"),
         "interleaved": (ScheduleInterleaved1F1B, "interleaved"),
         "interleaved_zb": (ScheduleInterleavedZeroBubble, "interleaved"), "zb_v": (ScheduleZBVZeroBubble, "zb_v")}
"""torch's schedules, each with the one of ours that has its stages."""


def plan_of(workload: Workload, schedule: str) -> Plan:
    return make_plan(workload.job(num_micro_batches=NUM_MICRO_BATCHES, mesh=MeshConfig(pipeline=NUM_RANKS),
                                  schedule=schedule))


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


class TorchPipeline:
    """A schedule of torch's over plain modules."""

    def __init__(self, place: Place, schedule: Any, plan: Plan, workload: Workload, dtype: str) -> None:
        self._modules = {stage: PlainStage(workload.job(), plan.layers_of(stage), DTYPES[dtype])
                         for stage in plan.stages_of(place.rank)}
        stages = [PipelineStage(module, stage, len(plan.stages), torch.device("cpu"))
                  for stage, module in self._modules.items()]
        self._schedule = schedule(stages if plan.chunks > 1 else stages[0], NUM_MICRO_BATCHES, loss_fn=summed_loss,
                                  scale_grads=False)
        tokens, targets = workload.batch(NUM_MICRO_BATCHES)
        self._inputs = (tokens,) if any(stage.is_first for stage in stages) else ()
        self._targets = targets if any(stage.is_last for stage in stages) else None
        self._losses: list[Tensor] = []

    def step(self) -> None:
        for module in self._modules.values():
            module.zero_grad()
        self._losses = []
        self._schedule.step(*self._inputs, target=self._targets, losses=self._losses, return_outputs=False)

    def loss(self) -> float:
        return sum(loss.item() for loss in self._losses)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one rank saw."""

    steps: dict[str, list[Span]]
    losses: dict[str, float]
    profiles: dict[str, Profile]


def measure(place: Place, dtype: str, workload: Workload, rounds: int) -> Measured:
    plans = {schedule: plan_of(workload, schedule) for schedule in SCHEDULES}
    runtimes = Runtime.for_all(place, (plan.placement for plan in plans.values()), workload.message, DTYPES[dtype])
    ours = {f"ours {schedule}": our_pipeline(runtimes[plan.placement], plan, workload, dtype)
            for schedule, plan in plans.items()}
    theirs = {f"torch {name}": TorchPipeline(place, schedule, plans[same], workload, dtype)
              for name, (schedule, same) in TORCH.items()}
    both: dict[str, OurPipeline | TorchPipeline] = {**ours, **theirs}
    steps = take_turns({name: pipeline.step for name, pipeline in both.items()}, rounds)
    return Measured(steps=steps, losses={name: pipeline.loss() for name, pipeline in both.items()},
                    profiles={name: profile(steps[name], pipeline.runs[-rounds:]) for name, pipeline in ours.items()})


def our_pipeline(runtime: Runtime, plan: Plan, workload: Workload, dtype: str) -> OurPipeline:
    model = Model(workload.job(dtype), plan.layers_of_rank(runtime.rank))
    programs = programs_for(plan.schedule, NUM_RANKS, NUM_MICRO_BATCHES, plan.chunks)
    return OurPipeline(runtime, model, programs, tuple(range(*stage) for stage in plan.stages), workload)


def run(*, quick: bool) -> dict[str, Any]:
    """A table on the way; figures for the line of JSON."""
    found: dict[str, Any] = {}
    for dtype in ("fp32", "bf16"):
        ranks = spawn(measure, NUM_RANKS, dtype, *((QUICK, 1) if quick else (FULL, 5)))
        found |= report(ranks, dtype)
    return found


def report(ranks: list[Measured], dtype: str) -> dict[str, Any]:
    walls = wall_times([rank.steps for rank in ranks])
    medians = {name: statistics.median(seconds) for name, seconds in walls.items()}
    best = {who: min((name for name in medians if name.startswith(who)), key=medians.__getitem__)
            for who in ("ours", "torch")}
    print(f"every schedule, {dtype}: best are {best['ours']} and {best['torch']}")
    for name, seconds in medians.items():
        print(f"  {name:22s} {seconds * 1e3:8.0f} ms   loss {sum(rank.losses[name] for rank in ranks):.4f}")
    print(table({best["ours"]: [rank.profiles[best["ours"]] for rank in ranks]}), flush=True)
    suffix = "" if dtype == "fp32" else f"_{dtype}"
    return {f"best{suffix}": best, **figure(f"ratio_best_vs_torch_best{suffix}", ratios(walls[best["ours"]],
                                                                                        walls[best["torch"]]))}
