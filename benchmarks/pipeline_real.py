"""Real compute on 2 ranks of one thread each: our 1F1B and ZB-H1 against torch's Schedule1F1B over the same layers.

All contestants use the same modules, weights and gradient buffers in the same two processes; losses and gradients are
compared before anything is timed. torch runs twice a round: ours is taken over the mean of the two, and the two against
each other show the noise. The ideal of 1F1B is its simulated step from the op times of that very step.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed_pipeline
import torch
from common import Place, Span, figure, means, ratios, spawn, take_turns, two_over_one, wall_times
from contestants import OurPipeline, TorchPipeline, summed_loss
from language_model import FULL, QUICK, Model, Workload
from plain_llama import PlainStage
from profiles import Profile, profile, table
from runtime import Runtime
from torch import Tensor

from raytrain3d.parallel.layer_state import DTYPES
from raytrain3d.parallel.pipeline import PipelineRun
from raytrain3d.plan.program import RECEIVES, Programs, programs_for
from raytrain3d.plan.schedule import Op
from raytrain3d.plan.simulate import simulate

NUM_RANKS = 2
OURS = {"1f1b m8": ("1f1b", 8), "zb_h1 m8": ("zb_h1", 8), "zb_h1 m4": ("zb_h1", 4)}
"""Contestant -> schedule, micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one rank saw in one type."""

    steps: dict[str, list[Span]]
    op_seconds: list[dict[Op, float]]
    """Compute ops of 1F1B, by step."""
    profiles: dict[str, Profile]
    two_over_one: float
    off: float
    """Largest relative difference of a loss or a layer's gradient between ours and torch."""


def run(*, quick: bool) -> dict[str, Any]:
    """Tables on the way; figures for the line of JSON."""
    found: dict[str, Any] = {}
    for dtype in ("fp32", "bf16"):
        ranks = spawn(measure, NUM_RANKS, dtype, *((QUICK, 1) if quick else (FULL, 15)))
        found |= summary(ranks, "" if dtype == "fp32" else f"_{dtype}")
        print_tables(dtype, ranks)
    return found


def measure(place: Place, dtype: str, workload: Workload, rounds: int) -> Measured:
    split = workload.split_evenly(NUM_RANKS)
    model = Model(workload.job(dtype), split[place.rank])
    runtime = Runtime(place, tuple(range(NUM_RANKS)), workload.message, DTYPES[dtype])
    peers = {m: TorchPipeline(place, model, m, workload) for m in (8, 4)}
    ours = {name: OurPipeline(runtime, model, programs_of(name), split, workload) for name in OURS}
    expected = {m: gradients_of(model, pipeline) for m, pipeline in peers.items()}
    off = max(difference(gradients_of(model, ours[name]), expected[m]) for name, (_, m) in OURS.items())
    contestants = {"torch m8": peers[8].step, **{name: pipeline.step for name, pipeline in ours.items()},
                   "torch m4": peers[4].step, "torch m8 again": peers[8].step}
    if deepspeed_pipeline.INSTALLED and dtype == "fp32":
        contestants["deepspeed m8"] = deepspeed(place, workload).step
    steps = take_turns(contestants, rounds)
    runs = {name: pipeline.runs[-rounds:] for name, pipeline in ours.items()}
    return Measured(steps=steps, off=off, two_over_one=two_over_one(place),
                    op_seconds=[op_seconds(one) for one in runs["1f1b m8"]],
                    profiles={name: profile(steps[name], runs[name]) for name in ours})


def deepspeed(place: Place, workload: Workload) -> deepspeed_pipeline.DeepSpeedPipeline:
    """Over plain modules, since it drops gradient buffers that our linear layers need."""
    config = workload.job()
    layers = PlainStage(config, range(config.model.blocks + 2)).layers.values()
    micro_batches = [part.split(workload.micro_batch) for part in workload.batch(8)]
    return deepspeed_pipeline.DeepSpeedPipeline(place, list(layers), summed_loss, list(zip(*micro_batches, strict=True)))


def programs_of(name: str) -> Programs:
    schedule, num_micro_batches = OURS[name]
    return programs_for(schedule, NUM_RANKS, num_micro_batches)


def gradients_of(model: Model, pipeline: OurPipeline | TorchPipeline) -> list[Tensor]:
    """Loss and gradient of every layer on this rank after a step."""
    pipeline.step()
    return [torch.tensor(float(pipeline.loss())), *model.gradients().values()]


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest relative one, as norms."""
    return max(((own - other).norm() / other.norm().clamp(min=1e-30)).item()
               for own, other in zip(found, expected, strict=True))


def op_seconds(one: PipelineRun) -> dict[Op, float]:
    return {op: end - start for op, start, end in one.spans() if op.kind not in RECEIVES}


def ideal_s(ops_by_rank: Sequence[Mapping[Op, float]]) -> float:
    """Simulated step of 1F1B from the measured ops, with messages taken as free."""
    seconds = {op: value for ops in ops_by_rank for op, value in ops.items()}
    return simulate(programs_of("1f1b m8"), seconds.__getitem__).makespan


def summary(ranks: Sequence[Measured], suffix: str) -> dict[str, Any]:
    walls = wall_times([rank.steps for rank in ranks])
    peers = means(walls["torch m8"], walls["torch m8 again"])
    ideals = [ideal_s(step) for step in zip(*(rank.op_seconds for rank in ranks), strict=True)]
    return {
        **figure(f"ratio_1f1b_vs_torch{suffix}", ratios(walls["1f1b m8"], peers)),
        **figure(f"ratio_zb_vs_torch_1f1b{suffix}", ratios(walls["zb_h1 m8"], peers)),
        **figure(f"ratio_zb_vs_torch_1f1b_m4{suffix}", ratios(walls["zb_h1 m4"], walls["torch m4"])),
        **figure(f"ratio_1f1b_vs_ideal{suffix}", ratios(walls["1f1b m8"], ideals)),
        **figure(f"torch_vs_itself{suffix}", ratios(walls["torch m8 again"], walls["torch m8"])),
        f"two_over_one{suffix}": round(ranks[0].two_over_one, 2),
        f"difference{suffix}": max(rank.off for rank in ranks),
    }


def print_tables(dtype: str, ranks: Sequence[Measured]) -> None:
    walls = wall_times([rank.steps for rank in ranks])
    off = max(rank.off for rank in ranks)
    print(f"real compute, {NUM_RANKS} ranks, {dtype}; losses and gradients of ours and torch's differ by {off:.1e}"
          + (" (more than 1e-5: WRONG)" if dtype == "fp32" and off > 1e-5 else ""))
    print(f"  two ranks compute {ranks[0].two_over_one:.2f} times as much as one (2: a core each, near 1: one core)")
    for name, seconds in walls.items():
        print(f"  {name:16s} {statistics.median(seconds) * 1e3:8.0f} ms")
    print(table({name: [rank.profiles[name] for rank in ranks] for name in OURS}), flush=True)
