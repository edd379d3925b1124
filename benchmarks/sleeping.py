"""Stages that sleep instead of computing: the schedule and the runtime remain, and more ranks than cores fit a machine.

A sleeping layer goes through autograd and through our linear, so forward, input gradient and weight gradient come when
they would come in a model; each is a sleep of its own, and is noted as long as it was.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from runtime import Runtime
from torch import Tensor, nn
from torch.autograd import Function

from raytrain3d.model.functional import linear
from raytrain3d.parallel.pipeline import Feed, PipelineRun, Stage
from raytrain3d.plan.program import RECEIVES, Programs
from raytrain3d.plan.rank_program import rank_program
from raytrain3d.plan.schedule import Kind, Op

SHAPE = (1, 16, 64)
"""(batch, seq, hidden) of a message."""

Sleep = Callable[[Kind], None]
"""Spends the time of a forward, an input gradient or a weight gradient."""


PR_SET_TIMERSLACK = 29


def sleep_exactly() -> None:
    """From now on the kernel ends this thread's sleeps when they are due, not up to 50 us later to save interrupts
    (prctl(2)): what is measured is the runtime and not the sleep."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)


def sleep(seconds: float) -> float:
    """Seconds that it really took."""
    start = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - start


class _Sleep(Function):
    """`weight` is there so that a first stage, whose input needs no gradient, has a backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, spend: Sleep) -> Tensor:
        ctx.spend = spend
        spend(Kind.FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.spend(Kind.BACKWARD_INPUT)
        return grad.contiguous(), None, None  # of a sum it is expanded, which torch.distributed cannot receive


class SleepingLayer(nn.Module):
    """A layer whose backward is not split. `to_loss`: its output is a scalar."""

    def __init__(self, spend: Sleep, *, to_loss: bool = False) -> None:
        super().__init__()
        self._spend, self._to_loss = spend, to_loss
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """x: SHAPE -> SHAPE, or a scalar."""
        y = _Sleep.apply(x, self.weight, self._spend)
        return y.sum() if self._to_loss else y


class SleepingGradient(Tensor):
    """A gradient buffer into which a weight gradient is not added but slept."""

    spend: Sleep
    __torch_function__ = torch._C._disabled_torch_function_impl  # only the method below is ours

    def addmm_(self, *factors: Tensor, **_: Any) -> Tensor:
        self.spend(Kind.BACKWARD_WEIGHT)
        return self


class SplitSleepingLayer(nn.Module):
    """A layer with a linear of ours, so that its weight gradient may come later. `to_loss`: its output is a scalar."""

    def __init__(self, spend: Sleep, *, to_loss: bool = False) -> None:
        super().__init__()
        self._spend, self._to_loss = spend, to_loss
        self.weight = nn.Parameter(torch.eye(SHAPE[-1]))
        gradient = torch.zeros_like(self.weight).as_subclass(SleepingGradient)
        gradient.spend = spend
        self.weight.grad = gradient

    def forward(self, x: Tensor) -> Tensor:
        """x: SHAPE -> SHAPE, or a scalar."""
        y = linear(_Sleep.apply(x, self.weight, self._spend), self.weight)
        return y.sum() if self._to_loss else y


class SleepingPipeline:
    """Our runtime over sleeping stages on one rank. `seconds`: how long an op is to take."""

    def __init__(self, runtime: Runtime, programs: Programs, seconds: Callable[[Op], float]) -> None:
        sleep_exactly()
        self._runtime, self._seconds = runtime, seconds
        self._program = rank_program(programs, runtime.rank)
        own = {op.stage for op in self._program.ops}
        last = programs.schedule.num_stages - 1
        split = any(op.kind is Kind.BACKWARD_WEIGHT for op in self._program.ops)
        layer = SplitSleepingLayer if split else SleepingLayer
        self._stages = {stage: Stage({stage: layer(self._spend, to_loss=stage == last)}, is_first=stage == 0,
                                     is_last=stage == last) for stage in own}
        self._run: PipelineRun | None = None
        self.slept: list[dict[Op, float]] = []
        """Seconds that each op really slept, by step."""
        self.ran: list[dict[Op, float]] = []
        """Seconds of each compute op, what the runtime itself takes within it included, by step."""

    def _spend(self, part: Kind) -> None:
        assert self._run is not None
        op = self._run.current
        assert op is not None
        # A full backward is one sleep, when the input gradient is due.
        if part is op.kind or (part is Kind.BACKWARD_INPUT and op.kind is Kind.BACKWARD):
            self.slept[-1][op] = sleep(self._seconds(op))

    def step(self) -> None:
        self.slept.append({})
        feed = Feed(tokens=lambda micro_batch: torch.zeros(SHAPE), arguments=lambda micro_batch, layer: ())
        self._run = self._runtime.prepare(self._program, self._stages, feed)
        self._run.execute(self._program)
        self.ran.append({op: end - start for op, start, end in self._run.spans() if op.kind not in RECEIVES})
