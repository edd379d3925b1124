"""A layer on its way from one pipeline rank to another, between two steps of a running job.

Every buffer goes point to point from (data, pipeline, tensor) to (data, pipeline', tensor): with sharding each data
coordinate passes on its own shard, so shards and data groups stay what they were. The source keeps its copy until the
driver has committed the move.
"""

from collections.abc import Mapping

from torch import Tensor

from raytrain3d.parallel.groups import Group
from raytrain3d.parallel.layer_state import LayerState
from raytrain3d.plan.program import Channel


def channel_between(channels: Mapping[Channel, Group], source: int, target: int) -> Group:
    """A channel from pipeline rank `source` to `target`, which hold neighbouring stages."""
    return next(group for channel, group in channels.items() if (channel.sender, channel.receiver) == (source, target))


def moving_buffers(state: LayerState) -> list[Tensor]:
    """Everything of a layer but its gradient, which is empty between steps."""
    if state.spec.frozen:
        return [state.weights]
    master = [state.master] if state.has_master else []
    return [state.weights, state.exp_avg, state.exp_avg_sq, *master]


def send_layer(state: LayerState, channel: Group) -> int:
    """Returns the number of bytes, when all of them have left."""
    buffers = moving_buffers(state)
    for work in [channel.send(buffer, 1) for buffer in buffers]:
        work.wait()
    return sum(buffer.nbytes for buffer in buffers)


def receive_layer(state: LayerState, channel: Group) -> None:
    """Fill `state`, which is as large as the one that was sent."""
    for work in [channel.receive(buffer, 0) for buffer in moving_buffers(state)]:
        work.wait()
