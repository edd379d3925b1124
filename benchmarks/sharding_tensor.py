"""Tensor parallelism on 2 ranks of one thread each: ours against DTensor's, with and without sequence parallelism.

Same model, weights, micro-batches and AdamW; a step is forward, backward and update. The peer is what torch's own trainer
composes (`parallelize_module`, inputs of attention and feed-forward prepared once, `loss_parallel`), over the model as a
user of torch would write it. Both train on, and the losses of their first steps are compared. The peer takes part twice a
round: ours is taken over the mean of the two, and the two against each other show the noise.
"""

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import Place, Span, figure, means, ratios, spawn, take_turns, wall_times
from language_model import FULL, QUICK, Workload
from pipeline_mesh import COMPARED, OurTraining
from plain_llama import PlainStage
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel,
                                               SequenceParallel, loss_parallel, parallelize_module)
from torch.nn.functional import cross_entropy

from raytrain3d.config import JobConfig, LearningRateConfig, MeshConfig, OptimizerConfig
from raytrain3d.plan.plan import make_plan

NUM_RANKS = 2
NUM_MICRO_BATCHES = 4
ROUNDS = 15


def tensor_job(workload: Workload, *, sequence_parallel: bool) -> JobConfig:
    """AdamW as torch's: one rate, decay on everything, no clipping."""
    config = workload.job(num_micro_batches=NUM_MICRO_BATCHES, mesh=MeshConfig(tensor=NUM_RANKS))
    return replace(config, optimizer=OptimizerConfig(clip_norm=None, decay_all=True),
                   learning_rate=LearningRateConfig(peak=3e-4, schedule="constant"),
                   train=replace(config.train, sequence_parallel=sequence_parallel))


def tensor_parallel(module: PlainStage, mesh: DeviceMesh, *, sequence_parallel: bool) -> nn.Module:
    """Megatron's division as torch's own trainer writes it; the head keeps its vocabulary columns apart."""
    stream = Shard(1) if sequence_parallel else Replicate()
    entered = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    norm: dict[str, ParallelStyle] = {"norm": SequenceParallel()} if sequence_parallel else {}
    block = {"attention": entered, "mlp": entered,
             **{name: RowwiseParallel(output_layouts=stream) for name in ("attention.output", "mlp.down")},
             **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
             **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
             **{f"{part}_{name}": style for part in ("attention", "mlp") for name, style in norm.items()}}
    first = {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)}
    head = {**norm, "output": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)}
    last = len(module.layers) - 1
    for index, layer in module.layers.items():
        parallelize_module(layer, mesh, {0: first, last: head}.get(int(index), block))
    return module


class DTensorTraining:
    def __init__(self, config: JobConfig, workload: Workload) -> None:
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        self._module = tensor_parallel(PlainStage(config, range(config.model.blocks + 2)), mesh,
                                       sequence_parallel=config.train.sequence_parallel)
        # The fused update takes DTensors or plain tensors at a time.
        kinds = [[each for each in self._module.parameters() if isinstance(each, DTensor) == divided]
                 for divided in (True, False)]
        self._optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=config.learning_rate.peak,
                                            betas=(0.9, 0.95), eps=1e-8, weight_decay=config.optimizer.weight_decay,
                                            fused=True)
        self._batch = [part.split(workload.micro_batch) for part in workload.batch(NUM_MICRO_BATCHES)]
        self.losses: list[float] = []
        """Mean loss of every step."""

    def step(self) -> None:
        self._optimizer.zero_grad()
        with loss_parallel():
            losses = [self._loss(tokens, targets) for tokens, targets in zip(*self._batch, strict=True)]
        self._optimizer.step()
        self.losses.append(sum(losses))

    def _loss(self, tokens: Tensor, targets: Tensor) -> float:
        """A micro-batch's part of the mean, after its backward."""
        logits = self._module(tokens)
        total = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = total / (NUM_MICRO_BATCHES * targets.numel())
        loss.backward()
        return loss.item()


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one rank saw."""

    steps: dict[str, list[Span]]
    losses: dict[str, list[float]]
    """By contestant and step."""


def train(place: Place, workload: Workload, rounds: int, sequence_parallel: bool) -> Measured:
    config = tensor_job(workload, sequence_parallel=sequence_parallel)
    ours, theirs = OurTraining(place, config, make_plan(config), workload), DTensorTraining(config, workload)
    steps = take_turns({"dtensor": theirs.step, "ours": ours.step, "dtensor again": theirs.step}, rounds, warmup=2)
    return Measured(steps=steps, losses={"ours": ours.losses, "dtensor": theirs.losses})


def loss_difference(rank: Measured) -> float:
    """Largest relative one of the first steps; later ones differ by rounding that training amplifies."""
    pairs = list(zip(rank.losses["ours"], rank.losses["dtensor"], strict=False))[:COMPARED]
    return max(abs(own - other) / abs(other) for own, other in pairs)


def run(*, quick: bool) -> dict[str, Any]:
    """A table on the way; figures for the line of JSON."""
    workload, rounds = (QUICK, 1) if quick else (replace(FULL, micro_batch=1), ROUNDS)
    model, found = workload.model, {}
    for sequence_parallel, key in ((False, "tp"), (True, "sp")):
        ranks = spawn(train, NUM_RANKS, workload, rounds, sequence_parallel)
        walls, off = wall_times([rank.steps for rank in ranks]), loss_difference(ranks[0])
        print(f"tensor 2{', sequence parallel' if sequence_parallel else ''}: {model.blocks} blocks of {model.hidden}, "
              f"{NUM_MICRO_BATCHES} micro-batches of {workload.micro_batch} x {workload.sequence} tokens; losses of the "
              f"first {COMPARED} steps differ by {off:.1e}{' (more than 1e-5: WRONG)' if off > 1e-5 else ''}")
        for name, seconds in walls.items():
            print(f"  {name:14s} {statistics.median(seconds) * 1e3:8.0f} ms")
        peers = means(walls["dtensor"], walls["dtensor again"])
        found |= {**figure(f"ratio_{key}_vs_dtensor", ratios(walls["ours"], peers)),
                  **figure(f"dtensor_{key}_vs_itself", ratios(walls["dtensor again"], walls["dtensor"])),
                  f"loss_difference_{key}": off}
    return found

