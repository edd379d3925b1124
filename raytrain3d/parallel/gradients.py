"""Reduction of gradients over the data axis, a layer at a time, overlapped with backward.

All ranks of a data group issue their reductions in one order fixed by the plan: the layers of the rank from last to
first, the tied state at the end. A layer that is ready early waits for its turn; a replica without micro-batches issues
all of them when it finishes, with zeros. A layer is never reduced together with another, so its sum does not depend on
where it lives.
"""

from collections.abc import Mapping, Sequence

import torch

from raytrain3d.parallel.groups import Groups, Work
from raytrain3d.parallel.layer_state import LayerState


class GradientReduction:
    """Reductions of one step. `order`: indices of the rank's trained states in the order of issue."""

    def __init__(self, states: Mapping[int, LayerState], order: Sequence[int], groups: Groups, tied: int | None) -> None:
        self._states, self._groups, self._tied = states, groups, tied
        self._waiting = list(order)
        self._ready: set[int] = set()
        self._works: list[Work] = []

    def ready(self, layer: int) -> None:
        """The last backward of `layer` is done; start every reduction whose turn it is."""
        self._ready.add(layer)
        while self._waiting and self._waiting[0] in self._ready:
            self._start(self._states[self._waiting.pop(0)])

    def _start(self, state: LayerState) -> None:
        low, high = state.layout.partial_run
        if low < high:
            self._groups.tensor.reduce(state.gradient[low:high])
        if state.sharded:
            self._works.append(self._groups.data.reduce_scatter(state.own_gradient, state.gradient))
        else:
            self._works.append(self._groups.data.all_reduce(state.gradient))

    def finish(self) -> None:
        """Start what is left, wait for all of it, and add the two halves of a tied gradient."""
        for layer in list(self._waiting):
            self.ready(layer)
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._tied is not None and self._groups.ends is not None and self._tied in self._states:
            self._add_tied(self._states[self._tied])

    def _add_tied(self, state: LayerState) -> None:
        """First stage + last stage, in this order on both, so that the two copies stay equal to the bit."""
        ends = self._groups.ends
        if ends is None or state.spec.frozen:
            return
        mine, theirs = state.own_gradient, torch.empty_like(state.own_gradient)
        receive = ends.receive(theirs, 1 - ends.index)
        ends.send(mine.clone(), 1 - ends.index).wait()
        receive.wait()
        first, last = (mine, theirs) if ends.index == 0 else (theirs, mine)
        mine.copy_(first + last)
