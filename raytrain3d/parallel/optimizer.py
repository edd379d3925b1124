"""AdamW on a layer's flat buffers (https://arxiv.org/abs/1711.05101), and the gather that follows under sharding.

Moments, master weights and decay are intervals of the layer's own part, so one layer is a handful of operations whatever
its parameters, and nothing spans two layers.
"""

import torch

from raytrain3d.config import OptimizerConfig
from raytrain3d.parallel.groups import DONE, Group, Work
from raytrain3d.parallel.layer_state import LayerState


@torch.no_grad()
def update(state: LayerState, config: OptimizerConfig, *, step: int, rate: float, scale: float) -> None:
    """One update of the own part, where the moments are. `scale` turns the summed gradient into the mean, clipped one. Steps
    count from 1."""
    gradient = state.own_gradient.mul_(scale).to(state.exp_avg.device)
    state.exp_avg.lerp_(gradient, 1 - config.beta1)
    state.exp_avg_sq.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    for part in state.decayed():
        state.master[part].mul_(1 - rate * config.weight_decay)
    root = (state.exp_avg_sq / (1 - config.beta2**step)).sqrt_().add_(config.epsilon)
    state.master.addcdiv_(state.exp_avg, root, value=-rate / (1 - config.beta1**step))
    if state.has_master:
        state.own_weights.copy_(state.master)


def gather(state: LayerState, shard: Group) -> Work:
    """Bring the updated parts of the ranks that share a layer together, where all of them keep its whole weights."""
    if state.shards_weights or shard.size == 1:
        return DONE
    return shard.all_gather(state.weights, state.own_weights.clone())
