"""2 x 2 x 2 ranks: our trainer against what a user of torch alone would compose, on the same model, weights and batch.

The composition: DTensor tensor parallelism (`parallelize_module`), torch.distributed.pipelining's Schedule1F1B, DDP over
the data axis, fused AdamW. A step of both is forward, backward, reduction and update without clipping; both train on, and
the losses of their first steps are compared.
"""

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from common import Place, Span, figure, ratios, spawn, take_turns, wall_times
from language_model import FULL, QUICK, Workload
from plain_llama import PlainStage
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from raytrain3d.config import JobConfig, LearningRateConfig, MeshConfig, OptimizerConfig
from raytrain3d.data.micro_batch import MicroBatch
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer

MESH = MeshConfig(data=2, pipeline=2, tensor=2)
NUM_MICRO_BATCHES = 4
"""Of each replica."""
COMPARED = 3
"""Steps whose losses are compared; later ones differ by rounding that training amplifies."""
TENSOR_PLAN = {"query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel(),
               "attention.output": RowwiseParallel(), "gate": ColwiseParallel(), "up": ColwiseParallel(),
               "down": RowwiseParallel(), "tokens": RowwiseParallel(input_layouts=Replicate())}


def mesh_job(workload: Workload, mesh: MeshConfig = MESH) -> JobConfig:
    """AdamW as torch's: one rate, decay on everything, no clipping."""
    config = workload.job(num_micro_batches=NUM_MICRO_BATCHES, mesh=mesh)
    return replace(config, optimizer=OptimizerConfig(clip_norm=None, decay_all=True),
                   learning_rate=LearningRateConfig(peak=3e-4, schedule="constant"))


class OneBatch:
    """A loader that gives this replica's share of one batch at every step."""

    def __init__(self, plan: Plan, workload: Workload, replica: int) -> None:
        tokens, targets = workload.batch(sum(plan.shares))
        first, size = plan.first_micro_batch(replica), workload.micro_batch
        rows = [range(i * size, (i + 1) * size) for i in range(first, first + plan.shares[replica])]
        self._share = [MicroBatch(tokens=tokens[row.start : row.stop], targets=targets[row.start : row.stop],
                                  samples=tuple(row)) for row in rows]

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return self._share

    def close(self) -> None:
        pass


class OurTraining:
    """Several in one process are of different generations."""

    def __init__(self, place: Place, config: JobConfig, plan: Plan, workload: Workload, generation: int = 0) -> None:
        loader: Any = OneBatch(plan, workload, plan.mesh.coordinate(place.rank).data)
        self.trainer = Trainer(config, plan, place.rank, loader=loader)
        self.trainer.connect("127.0.0.1", place.port, generation)
        self.trainer.initialize()
        self.reports: list[StepReport] = []

    @property
    def losses(self) -> list[float]:
        """Mean loss of every step."""
        return [report.loss for report in self.reports]

    def step(self) -> None:
        self.reports.append(self.trainer.step(len(self.reports) + 1))


class TorchTraining:
    def __init__(self, config: JobConfig, plan: Plan, workload: Workload) -> None:
        sizes = {"data": MESH.data, "pipeline": MESH.pipeline, "tensor": MESH.tensor}
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        stage = mesh["pipeline"].get_local_rank()
        module = tensor_parallel(PlainStage(config, plan.layers_of(stage)), mesh["tensor"])
        module = DistributedDataParallel(module, device_mesh=mesh["data"])
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=config.learning_rate.peak, betas=(0.9, 0.95), eps=1e-8,
                                            weight_decay=config.optimizer.weight_decay, fused=True)
        stage_of_model = PipelineStage(module, stage, MESH.pipeline, torch.device("cpu"), group=mesh["pipeline"].get_group())
        self._schedule = Schedule1F1B(stage_of_model, NUM_MICRO_BATCHES, loss_fn=self._loss, scale_grads=False)
        tokens, targets = (part.chunk(MESH.data)[mesh["data"].get_local_rank()]
                           for part in workload.batch(sum(plan.shares)))
        self._inputs = (tokens,) if stage_of_model.is_first else ()
        self._targets = targets if stage_of_model.is_last else None
        self._losses: list[list[Tensor]] = []

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch's part of the mean over the replica's tokens; DDP takes the mean over replicas."""
        total = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / (NUM_MICRO_BATCHES * targets.numel())

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._losses.append([])
        with loss_parallel():
            self._schedule.step(*self._inputs, target=self._targets, losses=self._losses[-1], return_outputs=False)
        self._optimizer.step()

    def losses(self) -> Tensor:
        """This replica's mean loss of every step, on the last stage; zeros elsewhere."""
        return torch.tensor([sum(loss.item() for loss in step) for step in self._losses])


def tensor_parallel(module: PlainStage, mesh: DeviceMesh) -> nn.Module:
    """Megatron's division; the head keeps its vocabulary columns apart, for `loss_parallel`."""
    head = {"output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    for layer in module.layers.values():
        is_head = hasattr(layer, "output")
        plan = {name: style for end, style in (head if is_head else TENSOR_PLAN).items()
                for name, _ in layer.named_modules() if name.endswith(end)}
        parallelize_module(layer, mesh, plan)
    return module


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one rank saw."""

    steps: dict[str, list[Span]]
    our_losses: list[float]
    torch_losses: list[float]
    """By the same step, over all replicas."""


def train(place: Place, workload: Workload, rounds: int) -> Measured:
    config = mesh_job(workload)
    plan = make_plan(config)
    ours, theirs = OurTraining(place, config, plan, workload), TorchTraining(config, plan, workload)
    steps = take_turns({"ours": ours.step, "torch": theirs.step}, rounds, warmup=2)
    losses = theirs.losses() / (MESH.data * MESH.tensor)
    dist.all_reduce(losses)
    return Measured(steps=steps, our_losses=ours.losses, torch_losses=losses.tolist())


def run(*, quick: bool) -> dict[str, Any]:
    """A table on the way; figures for the line of JSON."""
    workload, rounds = (QUICK, 1) if quick else (replace(FULL, micro_batch=1), 15)
    ranks = spawn(train, MESH.data * MESH.pipeline * MESH.tensor, workload, rounds)
    walls, off = wall_times([rank.steps for rank in ranks]), loss_difference(ranks[0])
    print(f"2 x 2 x 2 ranks, {workload.model.blocks} blocks of {workload.model.hidden}, whole steps with AdamW; losses of "
          f"the first {COMPARED} steps differ by {off:.1e}{' (more than 1e-5: WRONG)' if off > 1e-5 else ''}")
    for name, seconds in walls.items():
        print(f"  {name:6s} {statistics.median(seconds) * 1e3:8.0f} ms")
    return {**figure("ratio_3d_vs_torch", ratios(walls["ours"], walls["torch"])), "loss_difference_3d": off}


def loss_difference(rank: Measured) -> float:
    """Largest relative difference between the two in the first steps."""
    pairs = list(zip(rank.our_losses, rank.torch_losses, strict=True))[:COMPARED]
    return max(abs(own - other) / other for own, other in pairs)
