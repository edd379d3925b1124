"""Trainers for benchmarks of the whole driver: layers that sleep instead of computing, and no data.

In a file of their own, so that rank processes can import them.
"""

import random
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from raytrain3d.config import JobConfig, ModelConfig
from raytrain3d.data.micro_batch import MicroBatch
from raytrain3d.model.transformer import Layer
from raytrain3d.plan.plan import Plan
from raytrain3d.train.trainer import Trainer

FORWARD_S, BACKWARD_S = 0.002, 0.004
"""Of a block."""
HEAD_BLOCKS = 4
"""How many blocks the head is worth."""


class _Sleep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad.clone(), None, None


class SleepingLayer(Layer):
    """Takes the time of `blocks` blocks, give or take a share `noise`."""

    def __init__(self, model: ModelConfig, index: int, blocks: float, noise: float) -> None:
        super().__init__(model, index)
        self._blocks, self._noise, self._draw = blocks, noise, random.Random(index)

    def bind(self, parameters: Any) -> None:
        pass

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        if not x.is_floating_point():
            return torch.zeros(*x.shape, self.model.hidden)
        factor = self._blocks * max(0.1, 1 + self._noise * self._draw.gauss(0, 1))
        y: Tensor = _Sleep.apply(x, FORWARD_S * factor, BACKWARD_S * factor)
        return y.sum() if self.index == self.model.blocks + 1 else y


def sleeping_layers(model: ModelConfig, layers: Iterable[int], noise: float) -> dict[int, Layer]:
    return {i: SleepingLayer(model, i, HEAD_BLOCKS if i == model.blocks + 1 else float(i > 0), noise) for i in layers}


class NoData:
    """The same tokens at every step, and nothing to validate on."""

    validation_sets = ()

    def __init__(self, config: JobConfig, plan: Plan, replica: int) -> None:
        self._shape, self._replica = (config.train.micro_batch, config.train.sequence), replica
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        self._share = plan.shares[self._replica]

    def micro_batches(self, step: int) -> list[MicroBatch]:
        tokens = torch.zeros(self._shape, dtype=torch.int64)
        return [MicroBatch(tokens=tokens, targets=tokens, samples=(i,)) for i in range(self._share)]

    def close(self) -> None:
        pass


class SleepingTrainer(Trainer):
    """The trainer over sleeping layers."""

    def __init__(self, config: JobConfig, plan: Plan, rank: int, noise: float) -> None:
        super().__init__(config, plan, rank, loader=NoData(config, plan, plan.mesh.coordinate(rank).data),  # type: ignore[arg-type]
                         build=partial(sleeping_layers, noise=noise))


class RealTrainer(Trainer):
    """The trainer over real layers and made-up tokens."""

    def __init__(self, config: JobConfig, plan: Plan, rank: int) -> None:
        super().__init__(config, plan, rank, loader=NoData(config, plan, plan.mesh.coordinate(rank).data))  # type: ignore[arg-type]
