"""Runs one rank's program, op by op.

The autograd graph is cut at every layer: a forward keeps each layer's input and output, a backward goes through them one
layer at a time. So a layer's cost can be timed, its reduction can start as soon as its last backward is done, and it can
be recomputed, all without knowing its neighbours. What crosses a layer border is contiguous in both directions, inside a
stage as on a channel, so that the same kernels run wherever a layer lives.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raytrain3d.parallel.channels import Mail
from raytrain3d.plan.schedule import Kind, Op


@dataclass(slots=True)
class LayerTimes:
    """Seconds by layer index, and waiting, of one run."""

    forward: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    backward: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    receive_wait: float = 0.0


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one stage as modules, in order."""

    layers: Mapping[int, nn.Module]
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class Feed:
    """What enters from outside during one run."""

    tokens: Callable[[int], Tensor]
    """Micro-batch -> input of the first stage, (batch, seq)."""
    arguments: Callable[[int, int], tuple[Any, ...]]
    """(micro-batch, layer) -> what the layer's forward takes beside its input."""


class PipelineRun:
    """One run of a rank's program: activations in flight, losses so far, times.

    `layer_done(layer)` is called after the last backward of a layer. Without backwards in the program nothing is kept.
    """

    def __init__(self, stages: Mapping[int, Stage], mail: Mail, feed: Feed, *, recompute: bool,
                 layer_done: Callable[[int], None]) -> None:
        self._stages, self._mail, self._feed = stages, mail, feed
        self._recompute, self._layer_done = recompute, layer_done
        self._training = False
        self._backwards_left: dict[int, int] = {}
        self._arrived: dict[tuple[int, bool], Tensor] = {}
        self._leaving: dict[tuple[int, bool], Tensor] = {}
        self._kept: dict[tuple[int, int], list[tuple[int, Tensor, Tensor | None]]] = {}
        self.losses: list[Tensor] = []
        """Summed loss of each micro-batch, on the last stage."""
        self.times = LayerTimes()
        self.current: Op | None = None
        """The op under way; stays where it was when an error ends the run."""

    def execute(self, ops: Sequence[Op]) -> None:
        """Run the ops in order and wait until everything sent has left."""
        backwards = Counter(op.stage for op in ops if op.kind is Kind.BACKWARD)
        self._training, self._backwards_left = bool(backwards), dict(backwards)
        for op in ops:
            self.current = op
            self._execute(op)
        self._mail.finish()

    def _execute(self, op: Op) -> None:
        match op.kind:
            case Kind.RECEIVE_FORWARD | Kind.RECEIVE_BACKWARD:
                start = time.perf_counter()
                self._arrived[op.stage, op.kind is Kind.RECEIVE_FORWARD] = self._mail.receive(op)
                self.times.receive_wait += time.perf_counter() - start
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                self._mail.send(op, self._leaving.pop((op.stage, op.kind is Kind.SEND_FORWARD)))
            case Kind.FORWARD:
                self._forward(op)
            case Kind.BACKWARD:
                self._backward(op)

    def _forward(self, op: Op) -> None:
        stage = self._stages[op.stage]
        x = self._feed.tokens(op.micro_batch) if stage.is_first else self._arrived.pop((op.stage, True))
        kept: list[tuple[int, Tensor, Tensor | None]] = []
        for layer, module in stage.layers.items():
            start = time.perf_counter()
            entering = x.requires_grad_() if x.is_floating_point() and self._training else x
            with torch.set_grad_enabled(self._training and not self._recompute):
                out = module(entering, *self._feed.arguments(op.micro_batch, layer))
            kept.append((layer, entering, None if self._recompute else out))
            x = out.detach().contiguous()
            self.times.forward[layer] += time.perf_counter() - start
        if self._training:
            self._kept[op.stage, op.micro_batch] = kept
        if stage.is_last:
            self.losses.append(x)
        else:
            self._leaving[op.stage, True] = x

    def _backward(self, op: Op) -> None:
        stage = self._stages[op.stage]
        gradient = None if stage.is_last else self._arrived.pop((op.stage, False))
        self._backwards_left[op.stage] -= 1
        kept = self._kept.pop((op.stage, op.micro_batch))
        while kept:
            layer, entering, out = kept.pop()
            start = time.perf_counter()
            if out is None:
                out = stage.layers[layer](entering, *self._feed.arguments(op.micro_batch, layer))
            if out.requires_grad:
                torch.autograd.backward(out, gradient)
            gradient = None if entering.grad is None else entering.grad.contiguous()
            self.times.backward[layer] += time.perf_counter() - start
            if self._backwards_left[op.stage] == 0:
                self._layer_done(layer)
        if not stage.is_first:
            assert gradient is not None
            self._leaving[op.stage, False] = gradient
