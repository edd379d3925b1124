"""The sums that make a layer's gradient whole: over replicas, over tensor ranks, over the two ends of a tied weight."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from raytrain3d.parallel.groups import Group, Groups, Work
from raytrain3d.parallel.layer_state import LayerState


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over a group under way. `result` is this rank's part of it, maybe in another type than what is summed."""

    work: Work
    source: Tensor
    """Kept as it is until the work is done."""
    result: Tensor

    def wait(self) -> Tensor:
        """The result."""
        self.work.wait()
        return self.result


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over the groups of one rank. dtype: the type that replicas sum in (`train.reduce_dtype`)."""

    groups: Groups
    dtype: torch.dtype

    def over_group(self, group: Group, tensor: Tensor) -> Sum:
        """All of `tensor`, in place where the type allows."""
        source = tensor.to(self.dtype)
        return Sum(group.all_reduce(source), source, source)

    def scatter(self, state: LayerState) -> Sum:
        """The own part of the layer's gradient, over the ranks that share the layer."""
        source = state.gradient.to(self.dtype)
        own = source[state.own[0] : state.own[1]]
        result = torch.empty_like(own) if state.shards_gradient else own
        return Sum(self.groups.shard.reduce_scatter(result, source), source, result)

    def across(self, states: Iterable[LayerState]) -> None:
        """Own parts, over the groups that each hold all of a layer."""
        under_way = [(state, self.over_group(self.groups.across, state.own_gradient)) for state in states]
        for state, each in under_way:
            state.own_gradient.copy_(each.wait())

    def partial(self, state: LayerState, gradient: Tensor, first: int) -> None:
        """What every tensor rank has seen only its share of. gradient: elements of the layer from `first` on."""
        low, high = (min(max(end - first, 0), gradient.numel()) for end in state.layout.partial_run)
        if low < high:
            self.groups.tensor.reduce(gradient[low:high])

    def tied(self, state: LayerState) -> None:
        """First stage + last stage, in this order on both, so that the two copies stay equal to the bit."""
        ends = self.groups.ends
        if ends is None:
            return
        mine = state.own_gradient
        theirs = ends.exchange(mine)
        first, last = (mine, theirs) if ends.index == 0 else (theirs, mine)
        mine.copy_(first + last)
