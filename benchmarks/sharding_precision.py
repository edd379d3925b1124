"""What precision and the loss cost, on one rank of one thread: a step in bf16 over one in FP32, and the head's projection
and cross-entropy in chunks over torch's plain ones.

The step is forward, backward and AdamW of the 30M model of the other benchmarks. bf16 pays where the CPU multiplies it in
tiles (AMX); elsewhere torch may be slower in it than in FP32, and the reason is printed beside the figure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import Place, Span, figure, ratios, spawn, take_turns, wall_times
from language_model import FULL, QUICK, Model, Workload
from live_memory import peak_bytes
from torch import Tensor, nn

from raytrain3d.config import OptimizerConfig
from raytrain3d.model.functional import linear
from raytrain3d.model.loss import Rows, cross_entropy, projected_cross_entropy
from raytrain3d.parallel.optimizer import update

NUM_MICRO_BATCHES = 2
ADAMW = OptimizerConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSize:
    """Of one call of the head."""

    tokens: int
    hidden: int
    vocabulary: int
    chunk: int


LARGE = HeadSize(tokens=2048, hidden=512, vocabulary=16384, chunk=256)
"""128 MiB of FP32 logits, 16 MiB in a chunk."""
SMALL = HeadSize(tokens=64, hidden=32, vocabulary=512, chunk=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the rank saw."""

    steps: dict[str, list[Span]]
    losses: dict[str, float]
    peaks: dict[str, int]
    """Most bytes that a step allocates; of losses only."""


def run(*, quick: bool) -> dict[str, Any]:
    """Tables on the way; figures for the line of JSON."""
    rounds = 1 if quick else 15
    (precision,) = spawn(measure_precision, 1, QUICK if quick else FULL, rounds)
    (losses,) = spawn(measure_losses, 1, SMALL if quick else LARGE, rounds)
    return precision_figures(precision) | loss_figures(losses)


def measure_precision(place: Place, workload: Workload, rounds: int) -> Measured:
    trainings = {dtype: Training(workload, dtype) for dtype in ("fp32", "bf16")}
    losses = {dtype: training.loss() for dtype, training in trainings.items()}
    steps = take_turns({dtype: training.step for dtype, training in trainings.items()}, rounds)
    return Measured(steps=steps, losses=losses, peaks={})


class Training:
    """Steps of the whole model on one rank."""

    def __init__(self, workload: Workload, dtype: str) -> None:
        self._model = Model(workload.job(dtype), range(workload.model.blocks + 2))
        tokens, targets = (part.split(workload.micro_batch) for part in workload.batch(NUM_MICRO_BATCHES))
        self._micro_batches = list(zip(tokens, targets, strict=True))
        self._num_tokens = sum(part.numel() for part in tokens)

    def step(self) -> None:
        self._model.zero_gradients()
        for tokens, targets in self._micro_batches:
            self._forward(tokens, targets).backward()
        for state in self._model.states.values():
            update(state, ADAMW, step=1, rate=1e-5, scale=1 / self._num_tokens)

    @torch.no_grad()
    def loss(self) -> float:
        """Mean over all tokens."""
        return sum(self._forward(*each).item() for each in self._micro_batches) / self._num_tokens

    def _forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        *layers, head = self._model.layers.values()
        x = tokens
        for layer in layers:
            x = layer(x, None)
        loss: Tensor = head(x, targets)
        return loss


def heads_of(size: HeadSize) -> dict[str, "OneHead"]:
    losses = {"torch": plain_loss, "ours whole": whole_loss, "ours in chunks": chunked_loss(size.chunk)}
    return {name: OneHead(size, loss) for name, loss in losses.items()}


def measure_losses(place: Place, size: HeadSize, rounds: int) -> Measured:
    heads = heads_of(size)
    losses = {name: head.loss() for name, head in heads.items()}
    peaks = {name: head.peak() for name, head in heads.items()}
    steps = take_turns({name: head.step for name, head in heads.items()}, rounds)
    return Measured(steps=steps, losses=losses, peaks=peaks)


Loss = Callable[[Tensor, nn.Parameter, Tensor], Tensor]
"""(tokens, hidden), (vocabulary, hidden), (tokens,) -> sum of losses."""


def plain_loss(x: Tensor, weight: nn.Parameter, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets, reduction="sum")


def whole_loss(x: Tensor, weight: nn.Parameter, targets: Tensor) -> Tensor:
    return cross_entropy(linear(x, weight), targets, Rows(vocabulary=len(weight)))


def chunked_loss(chunk: int) -> Loss:
    return lambda x, weight, targets: projected_cross_entropy(x, weight, targets, Rows(vocabulary=len(weight)), chunk=chunk)


class OneHead:
    """Projection and loss, forward and backward, with the same values each time."""

    def __init__(self, size: HeadSize, loss: Loss) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size.tokens, size.hidden, generator=generator, requires_grad=True)
        self.weight = nn.Parameter(torch.randn(size.vocabulary, size.hidden, generator=generator) / size.hidden**0.5)
        self.weight.grad = torch.zeros_like(self.weight)
        self._targets = torch.randint(size.vocabulary, (size.tokens,), generator=generator)
        self._loss = loss

    def step(self) -> None:
        self.x.grad = None
        self._loss(self.x, self.weight, self._targets).backward()

    @torch.no_grad()
    def loss(self) -> float:
        """Sum over all tokens."""
        return self._loss(self.x, self.weight, self._targets).item()

    def peak(self) -> int:
        return peak_bytes(self.step)


def precision_figures(measured: Measured) -> dict[str, Any]:
    walls = wall_times([measured.steps])
    speedup = figure("bf16_speedup", ratios(walls["fp32"], walls["bf16"]))
    off = abs(measured.losses["bf16"] / measured.losses["fp32"] - 1)
    reason = "with AMX" if has_amx() else "this CPU has no AMX"
    print(f"bf16 over FP32, a step of 30M parameters on one thread: {speedup['bf16_speedup']:.2f} times as fast ({reason}); "
          f"losses differ by {off:.1e}", flush=True)
    return {**speedup, "bf16_speedup_reason": reason, "bf16_loss_difference": off}


def has_amx() -> bool:
    """Whether the CPU has tiles for bf16, as Linux tells it."""
    info = Path("/proc/cpuinfo")
    return info.exists() and "amx_bf16" in info.read_text()


def loss_figures(measured: Measured) -> dict[str, Any]:
    walls, peaks, plain = wall_times([measured.steps]), measured.peaks, measured.losses["torch"]
    off = max(abs(loss / plain - 1) for loss in measured.losses.values())
    print(f"projection and cross-entropy, forward and backward; losses differ by {off:.1e}"
          + (" (more than 1e-5: WRONG)" if off > 1e-5 else ""))
    for name, peak in peaks.items():
        print(f"  {name:16s} {min(walls[name]) * 1e3:8.1f} ms at best {peak / 2**20:8.1f} MiB at most")
    return {
        **figure("ratio_cross_entropy_time", ratios(walls["ours in chunks"], walls["torch"])),
        "ratio_cross_entropy_peak": round(peaks["ours in chunks"] / peaks["torch"], 4),
        "difference_cross_entropy": off,
    }
