"""A layer on its way from one rank to another, between two steps of a running job.

In a move every buffer goes point to point from (data, pipeline, tensor) to (data, pipeline', tensor): with sharding each
data coordinate passes on its own shard, so shards and data groups stay what they were. The source keeps its copy until the
driver has committed the move. A rank that takes a lost one's place is filled in the same way along the data axis, from one
that holds the same.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raytrain3d.parallel.groups import Group
from raytrain3d.parallel.layer_state import LayerState
from raytrain3d.plan.program import Channel


def channel_between(channels: Mapping[Channel, Group], source: int, target: int) -> Group:
    """A channel from pipeline rank `source` to `target`, which hold neighbouring stages."""
    return next(group for channel, group in channels.items() if (channel.sender, channel.receiver) == (source, target))


def moving_buffers(state: LayerState) -> list[Tensor]:
    """Everything of a layer but its gradient, which is empty between steps."""
    weights, _ = state.kept_weights
    if state.spec.frozen:
        return [weights]
    master = [state.master] if state.has_master else []
    return [weights, state.exp_avg, state.exp_avg_sq, *master]


def send_layer(state: LayerState, group: Group, to: int = 1) -> int:
    """To the member of `group` with index `to`. Returns the number of bytes, when all of them have left."""
    buffers = [buffer.to(state.weights.device) for buffer in moving_buffers(state)]
    for work in [group.send(buffer, to) for buffer in buffers]:
        work.wait()
    return sum(buffer.nbytes for buffer in buffers)


def receive_layer(state: LayerState, group: Group, sender: int = 0) -> None:
    """Fill `state`, which is as large as the one that was sent. What it keeps on the host arrives on the device, too."""
    buffers, device = moving_buffers(state), state.weights.device
    arriving = [buffer if buffer.device == device else torch.empty_like(buffer, device=device) for buffer in buffers]
    for work in [group.receive(tensor, sender) for tensor in arriving]:
        work.wait()
    for buffer, tensor in zip(buffers, arriving, strict=True):
        if buffer is not tensor:
            buffer.copy_(tensor)


def fill(states: Sequence[LayerState], data: Group, rank: int, donor: int) -> None:
    """`rank` gets all that `donor` holds; both call it, and differ in their data coordinate alone."""
    to, sender = data.ranks.index(rank), data.ranks.index(donor)
    for state in states:
        send_layer(state, data, to) if data.index == sender else receive_layer(state, data, sender)
