"""Where the time of a step goes: its layers as the trainer reports them, and the parts of a block, each timed alone."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from raytrain3d.model.transformer import Block
from raytrain3d.parallel.clock import clock_for
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer

WARMUP = 2
NAMES = ("attention", "mlp", "norms", "rest of blocks", "embedding", "head", "optimizer", "communication", "commit", "other")


def step_parts(trainer: Trainer, reports: Sequence[StepReport], repeats: int) -> dict[str, float]:
    """Seconds of a step by part, on this rank: medians over reports. Adds to gradients, so to be called last.

    Within a block, attention, feed-forward and norms are timed alone and without a compiler, forward and backward; what the
    layers' own times leave is the rest of blocks: residual additions, and (negative) what a compiler saves.
    """
    layers: dict[int, float] = {}
    for layer in reports[0].layer_forward_s:
        layers[layer] = statistics.median(sum(part.get(layer, 0.0) for part in (
            each.layer_forward_s, each.layer_backward_s, each.layer_weight_s)) for each in reports)
    blocks = {index: module for index, module in trainer.layers.items() if isinstance(module, Block)}
    config = trainer._config
    micro_batches = config.train.num_micro_batches // trainer._plan.mesh.data
    alone = block_parts(next(iter(blocks.values())), trainer._buffers.take(), repeats)
    found = {name: seconds * len(blocks) * micro_batches for name, seconds in alone.items()}
    found["rest of blocks"] = sum(layers[index] for index in blocks) - sum(found.values())
    found |= {"embedding": layers[0], "head": layers[max(layers)]}
    for name, value in (("optimizer", lambda r: r.optimizer_s), ("commit", lambda r: r.commit_wait_s),
                        ("communication", lambda r: r.receive_wait_s + r.reduce_wait_s), ("other", _other)):
        found[name] = statistics.median(map(value, reports))
    return {name: found[name] for name in NAMES}


def _other(report: StepReport) -> float:
    """Between ops, and waiting for data."""
    return report.seconds - (report.compute_s + report.optimizer_s + report.commit_wait_s + report.receive_wait_s
                             + report.reduce_wait_s)


def block_parts(block: Block, x: Tensor, repeats: int) -> dict[str, float]:
    """Seconds of forward and backward of one micro-batch. x: any tensor of the shape (batch, seq, hidden) that enters."""
    x = torch.randn_like(x).requires_grad_()
    angles = block._angles(x, None)
    calls: dict[str, Callable[[], Tensor]] = {
        "attention": lambda: block.attention(x, None, angles, None), "mlp": lambda: block.mlp(x),
        "norms": lambda: block.attention_norm(x) + block.mlp_norm(x)}
    return {name: seconds_of(call, x, repeats) for name, call in calls.items()}


def seconds_of(call: Callable[[], Tensor], x: Tensor, repeats: int) -> float:
    """Median of forward and backward."""
    gradient, clock, found = torch.randn_like(x), clock_for(x.device), []
    for number in range(WARMUP + repeats):
        x.grad = None
        clock.wait()
        start = time.perf_counter()
        call().backward(gradient)
        clock.wait()
        if number >= WARMUP:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def table(parts: Mapping[str, Mapping[str, float]]) -> str:
    """Contestant -> its parts: milliseconds and shares of the sum."""
    lines = [f"{'part':16s}" + "".join(f"{name:>22s}" for name in parts)]
    for part in NAMES:
        cells = (f"{found[part] * 1e3:12.1f} ms {found[part] / sum(found.values()):6.1%}" for found in parts.values())
        lines.append(f"{part:16s}" + "".join(cells))
    return "\n".join(lines)
