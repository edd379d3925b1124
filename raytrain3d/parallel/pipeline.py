"""Runs one rank's program, op by op.

The autograd graph is cut at every layer: a forward keeps each layer's input and output, a backward goes through them one
layer at a time. So a layer's cost can be timed, its reduction can start as soon as its last backward is done, and it can
be recomputed, all without knowing its neighbours. What crosses a layer border is contiguous in both directions, inside a
stage as on a channel, so that the same kernels run wherever a layer lives.

A split backward (I, then W) goes through the layers once, in I; what the weight gradients of the linear layers need is
kept by layer until W. All else of the micro-batch is free after I, but for received messages: a linear may have kept one.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from raytrain3d.parallel.channels import Mail
from raytrain3d.parallel.clock import Clock
from raytrain3d.parallel.offload import saved_on_host
from raytrain3d.plan.program import RECEIVES, SENDS
from raytrain3d.plan.rank_program import RankProgram
from raytrain3d.plan.schedule import Kind, Op
from raytrain3d.plan.uses import in_order

LAST_PARTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
"""Ops that complete a micro-batch's gradient at a stage."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds by layer index, and waiting, of one run."""

    forward: Mapping[int, float]
    backward: Mapping[int, float]
    """Whole backwards, and input gradients of split ones."""
    weight: Mapping[int, float]
    """Weight gradients of split backwards."""
    receive_wait: float

    @staticmethod
    def none() -> "LayerTimes":
        """Of a run that nothing is known of."""
        return LayerTimes(forward={}, backward={}, weight={}, receive_wait=0.0)

    @property
    def compute(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values()) + sum(self.weight.values())


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one stage as modules, in order."""

    layers: Mapping[int, nn.Module]
    is_first: bool
    is_last: bool
    recompute: frozenset[int] = frozenset()
    """Layers of which only the input is kept: their forward runs again before their backward."""
    is_compiled: bool = False
    """A layer has one graph, whether what it keeps for a backward is used or not: both forwards of a recomputed layer are
    the same, to the bit."""


@dataclass(frozen=True, slots=True)
class Feed:
    """What enters from outside during one run."""

    tokens: Callable[[int], Tensor]
    """Micro-batch -> input of the first stage, (batch, seq)."""
    arguments: Callable[[int, int], tuple[Any, ...]]
    """(micro-batch, layer) -> what the layer's forward takes beside its input."""
    present: int | None = None
    """Only so many of the program's micro-batches are there. Absent: all of them."""


class WeightGradients(Protocol):
    """What the backward of one layer put off."""

    def accumulate(self) -> None:
        """Add it to the layer's gradient buffer."""


PutOff = Callable[[], AbstractContextManager[WeightGradients]]
"""Backwards under it leave the weight gradients of linear layers to what it yields."""


@dataclass(slots=True)
class InFlight:
    """What one micro-batch leaves at one stage until its backward, and until its weight gradients."""

    layers: list[tuple[int, Tensor, Tensor | None]] = field(default_factory=list)
    """(layer, what entered it, its output or None to compute it again) from first to last."""
    messages: list[Tensor] = field(default_factory=list)
    """Received activations and gradients."""
    put_off: list[tuple[int, WeightGradients]] = field(default_factory=list)
    """Weight gradients by layer, from last to first."""


class Around(Protocol):
    """What has to happen around the part of an op that belongs to one layer."""

    def before(self, kind: Kind, layer: int) -> None: ...

    def after(self, kind: Kind, layer: int, *, last: bool) -> None:
        """`last`: the layer's gradient is complete."""


def back_propagate(out: Tensor, gradient: Tensor) -> None:
    """As `torch.autograd.backward(out, gradient)`, without its checks of the arguments, which take as long as the engine
    itself needs to go through a small graph."""
    Variable._execution_engine.run_backward((out,), (gradient,), keep_graph=False, create_graph=False, inputs=(),
                                            allow_unreachable=True, accumulate_grad=True)


class PipelineRun:
    """One run of a rank's program: activations in flight, losses so far, times.

    Without backwards in the program nothing is kept. An op of a micro-batch that is not there is only what is around it.
    `offload`: what layers keep for their backward is kept on the host.
    `slowdown(layer)` is how many times as long as it takes a layer's compute shall take (for tests and demonstrations).
    """

    def __init__(self, stages: Mapping[int, Stage], mail: Mail, feed: Feed, *, put_off: PutOff, clock: Clock,
                 around: Sequence[Around] = (), offload: bool = False,
                 slowdown: Callable[[int], float] | None = None) -> None:
        self._stages, self._mail, self._feed = stages, mail, feed
        self._put_off, self._around, self._offload = put_off, around, offload
        self._clock, self._slowdown = clock, slowdown
        self._training = False
        self._gradients_left: dict[int, int] = {}
        self._entering: dict[tuple[int, int], Tensor] = {}
        self._coming_back: dict[tuple[int, int], Tensor] = {}
        self._leaving: dict[tuple[Kind, int, int], Tensor] = {}
        self._in_flight: dict[tuple[int, int], InFlight] = defaultdict(InFlight)
        self._ops: list[tuple[Op, Any, Any]] = []
        self._ends: list[Any] = []
        self._laps: list[tuple[Kind, int, Any, Any]] = []
        self.losses: list[Tensor] = []
        """Summed loss of each micro-batch, on the last stage."""
        self.current: Op | None = None
        """The op under way, if one is; stays where it was when an error ends the run."""

    def execute(self, program: RankProgram) -> None:
        """Run all ops in order and wait until everything sent has left."""
        self._gradients_left = Counter(op.stage for op in program.ops if op.kind in LAST_PARTS)
        self._training = any(op.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) for op in program.ops)
        for op in program.ops:
            self.current = op
            start = self._clock.mark()
            self._execute(op)
            self._ends.append(self._clock.mark())
            if op.kind not in SENDS:
                self._ops.append((op, start, self._ends[-1]))
        self._mail.finish()
        self.current = None

    @property
    def finished(self) -> int:
        """Ops that are over, on the device too. From any thread."""
        ends = list(self._ends)
        return next((i for i, end in enumerate(ends) if not self._clock.passed(end)), len(ends))

    def times(self) -> LayerTimes:
        """Of all layers, once the device is done with them."""
        found: dict[Kind, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for kind, layer, start, end in self._laps:
            found[kind][layer] += self._clock.seconds(start, end)
        waits = (self._clock.seconds(start, end) for op, start, end in self._ops if op.kind in RECEIVES)
        return LayerTimes(forward=found[Kind.FORWARD], backward=found[Kind.BACKWARD], weight=found[Kind.BACKWARD_WEIGHT],
                          receive_wait=sum(waits))

    def spans(self) -> list[tuple[Op, float, float]]:
        """(op, start, end) of every op but sends, which take no time; seconds since the first one's start."""
        if not self._ops:
            return []
        zero = self._ops[0][1]
        return [(op, self._clock.seconds(zero, start), self._clock.seconds(zero, end)) for op, start, end in self._ops]

    def _lap(self, kind: Kind, layer: int, start: Any) -> None:
        """A part of a layer is over that began at the mark `start`."""
        end = self._clock.mark()
        factor = 1.0 if self._slowdown is None else self._slowdown(layer)
        if factor > 1:
            self._clock.wait()
            time.sleep((factor - 1) * self._clock.seconds(start, end))
            end = self._clock.mark()
        self._laps.append((kind, layer, start, end))

    def _execute(self, op: Op) -> None:
        if self._feed.present is not None and op.micro_batch >= self._feed.present:
            self._pass_by(op)
            return
        match op.kind:
            case Kind.FORWARD:
                self._forward(op)
            case Kind.BACKWARD:
                self._backward(op, split=False)
                self._finish_backward(op)
            case Kind.BACKWARD_INPUT:
                self._backward(op, split=True)
            case Kind.BACKWARD_WEIGHT:
                self._weight_gradients(op)
                self._finish_backward(op)
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                self._mail.send(op, self._leaving.pop((op.kind, op.stage, op.micro_batch)))
            case Kind.RECEIVE_FORWARD | Kind.RECEIVE_BACKWARD:
                self._receive(op)

    def _pass_by(self, op: Op) -> None:
        for layer in in_order(op.kind, tuple(self._stages[op.stage].layers)):
            self._before(op, layer)
            self._after(op, layer)
        if op.kind in LAST_PARTS:
            self._finish_backward(op)

    def _before(self, op: Op, layer: int) -> None:
        for each in self._around:
            each.before(op.kind, layer)

    def _after(self, op: Op, layer: int) -> None:
        last = op.kind in LAST_PARTS and self._gradients_left[op.stage] == 1
        for each in self._around:
            each.after(op.kind, layer, last=last)

    def _receive(self, op: Op) -> None:
        message = self._mail.receive(op)
        forward = op.kind is Kind.RECEIVE_FORWARD
        (self._entering if forward else self._coming_back)[op.stage, op.micro_batch] = message
        self._in_flight[op.stage, op.micro_batch].messages.append(message)

    def _forward(self, op: Op) -> None:
        stage, key = self._stages[op.stage], (op.stage, op.micro_batch)
        x = self._feed.tokens(op.micro_batch) if stage.is_first else self._entering.pop(key)
        for layer, module in stage.layers.items():
            self._before(op, layer)
            start = self._clock.mark()
            entering = x.detach().requires_grad_() if x.is_floating_point() and self._training else x
            keep = self._training and layer not in stage.recompute
            recording = nullcontext() if keep or (self._training and stage.is_compiled) else torch.no_grad()
            saving = saved_on_host(module, entering) if self._offload else nullcontext()
            with recording, saving:
                out = module(entering, *self._feed.arguments(op.micro_batch, layer))
            if self._training:
                self._in_flight[key].layers.append((layer, entering, out if keep else None))
            x = out.detach().contiguous()
            del out
            self._lap(Kind.FORWARD, layer, start)
            self._after(op, layer)
        if stage.is_last:
            self.losses.append(x)
        else:
            self._pass_on(x, op, Kind.SEND_FORWARD, op.stage + 1)
        if not self._training:
            self._let_go(op)

    def _backward(self, op: Op, *, split: bool) -> None:
        stage, key = self._stages[op.stage], (op.stage, op.micro_batch)
        gradient = None if stage.is_last else self._coming_back.pop(key)
        in_flight = self._in_flight[key]
        while in_flight.layers:
            layer, entering, out = in_flight.layers.pop()
            self._before(op, layer)
            start = self._clock.mark()
            if out is None:
                out = stage.layers[layer](entering, *self._feed.arguments(op.micro_batch, layer))
            with self._put_off() if split else nullcontext() as later:
                if out.requires_grad:
                    back_propagate(out, torch.ones_like(out) if gradient is None else gradient)
            if later is not None:
                in_flight.put_off.append((layer, later))
            gradient = None if entering.grad is None else entering.grad.contiguous()
            self._lap(Kind.BACKWARD, layer, start)
            self._after(op, layer)
        if not stage.is_first:
            assert gradient is not None
            self._pass_on(gradient, op, Kind.SEND_BACKWARD, op.stage - 1)

    def _weight_gradients(self, op: Op) -> None:
        for layer, later in self._in_flight[op.stage, op.micro_batch].put_off:
            self._before(op, layer)
            start = self._clock.mark()
            later.accumulate()
            self._lap(Kind.BACKWARD_WEIGHT, layer, start)
            self._after(op, layer)

    def _finish_backward(self, op: Op) -> None:
        self._gradients_left[op.stage] -= 1
        self._let_go(op)

    def _pass_on(self, x: Tensor, op: Op, send: Kind, stage: int) -> None:
        """To a stage on this rank directly, else to the send that follows."""
        if stage in self._stages:
            (self._entering if send is Kind.SEND_FORWARD else self._coming_back)[stage, op.micro_batch] = x
            return
        start = x.data_ptr()
        borrowed = any(message.data_ptr() <= start < message.data_ptr() + message.nbytes
                       for message in self._in_flight[op.stage, op.micro_batch].messages)
        # A layer may hand on what it was given; that buffer is used again as soon as this stage is done with it.
        self._leaving[send, op.stage, op.micro_batch] = x.clone() if borrowed else x

    def _let_go(self, op: Op) -> None:
        for message in self._in_flight.pop((op.stage, op.micro_batch), InFlight()).messages:
            self._mail.release(message)
