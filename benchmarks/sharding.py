"""Two replicas: our trainer unsharded against torch's DDP, and fully sharded against FSDP2, same model, weights and batch.

A step of all is forward and backward of every micro-batch, reduction, and AdamW without clipping. Both pairs send alike:
DDP and our `none` reduce once a step; FSDP2 as it comes and our `full` gather a layer for its forward and its backward and
reduce after every micro-batch. A round also runs each of torch's twice, so that it is seen against itself. Then tensor
parallelism against DTensor (`sharding_tensor.py`), bf16 against FP32 and the loss in chunks (`sharding_precision.py`).

    python benchmarks/sharding.py [--quick]
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import sharding_precision
import sharding_tensor
import torch
import torch.distributed as dist
from common import Place, Span, figure, means, ratios, spawn, take_turns, wall_times
from language_model import FULL, QUICK, Workload
from pipeline_mesh import COMPARED, NUM_MICRO_BATCHES, OurTraining, mesh_job
from plain_llama import PlainStage
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from raytrain3d.config import JobConfig, MeshConfig
from raytrain3d.plan.plan import make_plan

NUM_RANKS = 2
OURS = {"none": "DDP", "full": "FSDP2"}
"""Our level of sharding -> torch's counterpart."""


class TorchTraining:
    """The plain model under DDP or FSDP2, each with fused AdamW."""

    def __init__(self, place: Place, config: JobConfig, workload: Workload, *, sharded: bool) -> None:
        module = PlainStage(config, range(config.model.blocks + 2))
        self._replicas: Any = _fsdp(module) if sharded else DistributedDataParallel(module, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.AdamW(self._replicas.parameters(), lr=config.learning_rate.peak, betas=(0.9, 0.95),
                                            eps=1e-8, weight_decay=config.optimizer.weight_decay, fused=True)
        tokens, targets = (part.chunk(NUM_RANKS)[place.rank] for part in workload.batch(NUM_RANKS * NUM_MICRO_BATCHES))
        self._micro_batches = list(zip(tokens.chunk(NUM_MICRO_BATCHES), targets.chunk(NUM_MICRO_BATCHES), strict=True))
        self.losses: list[float] = []
        """This replica's mean loss of every step."""

    def step(self) -> None:
        self._optimizer.zero_grad()
        losses = [self._backward(*each, last=i == NUM_MICRO_BATCHES - 1) for i, each in enumerate(self._micro_batches)]
        self._optimizer.step()
        self.losses.append(float(torch.stack(losses).sum()))

    def _backward(self, tokens: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        """A micro-batch's part of the mean loss. DDP reduces in the last one."""
        is_ddp = isinstance(self._replicas, DistributedDataParallel)
        with self._replicas.no_sync() if is_ddp and not last else nullcontext():
            logits = self._replicas(tokens)
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten()) / NUM_MICRO_BATCHES
            loss.backward()
        return loss.detach()


def _fsdp(module: PlainStage) -> nn.Module:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for layer in module.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one rank saw."""

    steps: dict[str, list[Span]]
    losses: dict[str, list[float]]
    """Mean over all replicas, by contestant and step."""


def train(place: Place, workload: Workload, rounds: int) -> Measured:
    config = mesh_job(workload, MeshConfig(data=NUM_RANKS))
    ours: dict[str, OurTraining] = {}
    theirs: dict[str, TorchTraining] = {}
    turns = {}
    for generation, (sharding, peer) in enumerate(OURS.items()):
        job = replace(config, train=replace(config.train, sharding=sharding))  # type: ignore[arg-type]
        ours[sharding] = OurTraining(place, job, make_plan(job), workload, generation)
        theirs[peer] = TorchTraining(place, config, workload, sharded=peer == "FSDP2")
        turns |= {sharding: ours[sharding].step, peer: theirs[peer].step, f"{peer} again": theirs[peer].step}
    steps = take_turns(turns, rounds, warmup=2)
    return Measured(steps=steps, losses={**{name: each.losses for name, each in ours.items()},
                                         **{name: _mean(each.losses) for name, each in theirs.items()}})


def _mean(losses: Sequence[float]) -> list[float]:
    summed = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(summed)
    mean: list[float] = (summed / NUM_RANKS).tolist()
    return mean


def largest_difference(losses: dict[str, list[float]]) -> float:
    """Relative, of our losses from their counterpart's, in the first steps: later ones differ by rounding that training
    amplifies."""
    pairs = [pair for name, peer in OURS.items()
             for pair in zip(losses[name][:COMPARED], losses[peer][:COMPARED], strict=True)]
    return max(abs(own - other) / other for own, other in pairs)


def figures(ranks: Sequence[Measured]) -> dict[str, Any]:
    """A table on the way."""
    walls, off = wall_times([rank.steps for rank in ranks]), largest_difference(ranks[0].losses)
    print(f"{NUM_RANKS} replicas, {NUM_MICRO_BATCHES} micro-batches each; losses of the first {COMPARED} steps differ by "
          f"{off:.1e}{' (more than 1e-5: WRONG)' if off > 1e-5 else ''}")
    for name, seconds in walls.items():
        print(f"  {name:12s} {statistics.median(seconds) * 1e3:8.0f} ms")
    found: dict[str, Any] = {}
    for name, peer in OURS.items():
        both = means(walls[peer], walls[f"{peer} again"])
        found |= figure(f"ratio_vs_{peer.lower()}", ratios(walls[name], both))
        found |= figure(f"{peer.lower()}_vs_itself", ratios(walls[f"{peer} again"], walls[peer]))
    return {**found, "loss_difference": off, "rounds": len(walls["none"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, seconds; the figures then mean nothing")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    workload, rounds = (QUICK, 1) if arguments.quick else (FULL, arguments.rounds)
    found = figures(spawn(train, NUM_RANKS, workload, rounds))
    for part in (sharding_tensor, sharding_precision):
        found |= part.run(quick=arguments.quick)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
