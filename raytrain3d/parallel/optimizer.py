"""AdamW on a layer's flat buffers (https://arxiv.org/abs/1711.05101), and the gather that follows under sharding.

Moments, master weights and decay are intervals of the layer's own part, so one layer is a handful of operations whatever
its parameters, and nothing spans two layers. On GPUs it is one kernel, torch's fused AdamW, which updates intervals.
"""

from collections.abc import Iterator, Sequence

import torch

from raytrain3d.config import OptimizerConfig
from raytrain3d.parallel.groups import DONE, Group, Work
from raytrain3d.parallel.layer_state import LayerState


@torch.no_grad()
def update(state: LayerState, config: OptimizerConfig, *, step: int, rate: float, scale: float) -> None:
    """One update of the own part, where the moments are. `scale` turns the summed gradient into the mean, clipped one. Steps
    count from 1."""
    fused = state.exp_avg.is_cuda if config.fused is None else config.fused
    (_update_fused if fused else _update)(state, config, step=step, rate=rate, scale=scale)
    if state.has_master:
        state.own_weights.copy_(state.master)


def _update(state: LayerState, config: OptimizerConfig, *, step: int, rate: float, scale: float) -> None:
    gradient = state.own_gradient.mul_(scale).to(state.exp_avg.device)
    state.exp_avg.lerp_(gradient, 1 - config.beta1)
    state.exp_avg_sq.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    for part in state.decayed():
        state.master[part].mul_(1 - rate * config.weight_decay)
    root = (state.exp_avg_sq / (1 - config.beta2**step)).sqrt_().add_(config.epsilon)
    state.master.addcdiv_(state.exp_avg, root, value=-rate / (1 - config.beta1**step))


def _update_fused(state: LayerState, config: OptimizerConfig, *, step: int, rate: float, scale: float) -> None:
    gradient = state.own_gradient.to(state.exp_avg.device)
    count, divisor = (torch.full((), value, device=gradient.device) for value in (float(step), 1 / scale))
    decayed = list(state.decayed())
    for parts, decay in ((decayed, config.weight_decay), (list(_between(decayed, len(gradient))), 0.0)):
        filled = [part for part in parts if part.start < part.stop]
        if filled:
            master, own, mean, square = ([buffer[part] for part in filled]
                                         for buffer in (state.master, gradient, state.exp_avg, state.exp_avg_sq))
            torch._fused_adamw_(master, own, mean, square, [], [count] * len(filled), lr=rate, beta1=config.beta1,
                                beta2=config.beta2, weight_decay=decay, eps=config.epsilon, amsgrad=False,
                                maximize=False, grad_scale=divisor)


def _between(slices: Sequence[slice], length: int) -> Iterator[slice]:
    """What neighbouring, ordered slices leave of `length` elements."""
    starts, stops = [0, *(each.stop for each in slices)], [*(each.start for each in slices), length]
    yield from map(slice, starts, stops)


def gather(state: LayerState, shard: Group) -> Work:
    """Bring the updated parts of the ranks that share a layer together, where all of them keep its whole weights."""
    if state.shards_weights or shard.size == 1:
        return DONE
    return shard.all_gather(state.weights, state.own_weights.clone())
