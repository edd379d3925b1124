"""The same layers under two runtimes: ours and torch.distributed.pipelining, on one rank of a pipeline."""

import torch
from common import Place
from language_model import Model, Workload
from runtime import Runtime
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from raytrain3d.model.loss import Rows, cross_entropy
from raytrain3d.model.transformer import Head, Layer
from raytrain3d.parallel.pipeline import Feed, PipelineRun, Stage
from raytrain3d.plan.program import Programs
from raytrain3d.plan.rank_program import rank_program


class OurPipeline:
    """Steps of ours. `split`: layers of each stage, those of this rank being in `model`."""

    def __init__(self, runtime: Runtime, model: Model, programs: Programs, split: tuple[range, ...],
                 workload: Workload) -> None:
        self._runtime, self._model, self._program = runtime, model, rank_program(programs, runtime.rank)
        self._stages = {stage: Stage({layer: model.layers[layer] for layer in layers}, is_first=stage == 0,
                                     is_last=stage == len(split) - 1)
                        for stage, layers in enumerate(split) if programs.schedule.rank_of(stage) == runtime.rank}
        tokens, targets = (part.split(workload.micro_batch)
                           for part in workload.batch(programs.schedule.num_micro_batches))
        head = split[-1][-1]
        self._feed = Feed(tokens=lambda i: tokens[i],
                          arguments=lambda i, layer: (targets[i],) if layer == head else (None,))
        self.runs: list[PipelineRun] = []
        """Of every step, with the times of its ops."""

    def step(self) -> None:
        self._model.zero_gradients()
        run = self._runtime.prepare(self._program, self._stages, self._feed)
        run.execute(self._program)
        self.runs.append(run)

    def loss(self) -> float:
        """Summed loss of the latest step on the rank of the last stage, 0 elsewhere."""
        return sum(loss.item() for loss in self.runs[-1].losses)


class SameLayers(nn.Module):
    """Our layers as one module: tokens or activations (batch, seq, hidden) to activations or logits."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.logits(x) if isinstance(layer, Head) else layer(x, None)
        return x


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """logits: (batch, seq, vocabulary), targets: (batch, seq) -> scalar, by our own cross-entropy."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), Rows(vocabulary=logits.shape[-1]))


class TorchPipeline:
    """Steps of torch's 1F1B over the layers of `model`. Their gradient buffers exist beforehand, because our linear layers
    add to them."""

    def __init__(self, place: Place, model: Model, num_micro_batches: int, workload: Workload) -> None:
        self._model = model
        module = SameLayers(list(model.layers.values()))
        stage = PipelineStage(module, place.rank, place.num_ranks, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=summed_loss, scale_grads=False)
        tokens, targets = workload.batch(num_micro_batches)
        self._inputs = (tokens,) if stage.is_first else ()
        self._targets = targets if stage.is_last else None
        self._losses: list[Tensor] = []
        self.step()  # learns shapes by a backward of its own, which the gradient buffers keep until the next step

    def step(self) -> None:
        self._model.zero_gradients()
        self._losses = []
        self._schedule.step(*self._inputs, target=self._targets, losses=self._losses, return_outputs=False)

    def loss(self) -> float:
        """Summed loss of the latest step on the last rank, 0 elsewhere."""
        return sum(loss.item() for loss in self._losses)
