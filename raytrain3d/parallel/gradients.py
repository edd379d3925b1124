"""Reduction of gradients over the data axis, a layer at a time, overlapped with backward.

Ranks that keep whole gradients reduce them once a step. All of a data group issue their reductions in one order fixed by
the plan: the layers of the rank from last to first, the tied state at the end. A layer that is ready early waits for its
turn; a replica without micro-batches issues all of them when it finishes, with zeros.

Ranks that keep a shard reduce after every micro-batch. A layer's whole gradient has memory from the op that makes it until
its reduction is done, which is while the next layer is at work. For that all of a group run the same ops in the same
order, also for micro-batches that they do not have. Under a split backward matrices get their gradient in W, norms and
biases in I: their gradients are kept whole and reduced at the end of the step.

A layer is never reduced together with another and its micro-batches are added in their order, so its sum does not depend
on where it lives.
"""

from collections.abc import Callable, Mapping, Sequence

from raytrain3d.parallel.layer_state import LayerState
from raytrain3d.parallel.sums import Sum, Sums
from raytrain3d.parallel.transient import allocate, release
from raytrain3d.plan.schedule import Kind

Fed = Callable[[Kind, int], Sequence[LayerState]]
"""(kind of op, layer) -> states whose matrices get their gradient in that part of the op."""


class OnceAStep:
    """Reductions of one step for ranks that keep whole gradients. `states`: trained ones by layer, in the order of issue;
    `tied`: index of the tied one."""

    def __init__(self, states: Mapping[int, LayerState], sums: Sums, tied: int | None) -> None:
        self._states, self._sums, self._tied = states, sums, tied
        self._waiting = list(states)
        self._ready: set[int] = set()
        self._under_way: list[tuple[LayerState, Sum]] = []

    def before(self, kind: Kind, layer: int) -> None:
        pass

    def after(self, kind: Kind, layer: int, *, last: bool) -> None:
        """Start every reduction whose turn it is."""
        if last:
            self._ready.add(layer)
        while self._waiting and self._waiting[0] in self._ready:
            self._start(self._states[self._waiting.pop(0)])

    def _start(self, state: LayerState) -> None:
        groups = self._sums.groups
        self._sums.partial(state, state.gradient, 0)
        over = self._sums.over_group(groups.across, state.gradient) if groups.shard.size == 1 else self._sums.scatter(state)
        self._under_way.append((state, over))

    def finish(self) -> None:
        """Start what is left, wait for all of it, and add the two halves of a tied gradient."""
        for layer in self._waiting:
            self._start(self._states[layer])
        for state, each in self._under_way:
            state.own_gradient.copy_(each.wait())
        if self._sums.groups.shard.size > 1:
            self._sums.across(self._states.values())
        if self._tied is not None and self._tied in self._states:
            self._sums.tied(self._states[self._tied])


class EveryMicroBatch:
    """Reductions of one step for ranks that keep a shard of the gradients. `states` and `tied` as above."""

    def __init__(self, states: Mapping[int, LayerState], sums: Sums, tied: int | None, fed: Fed) -> None:
        self._states, self._sums, self._tied, self._fed = states, sums, tied, fed
        self._under_way: list[tuple[LayerState, Sum]] = []

    def before(self, kind: Kind, layer: int) -> None:
        fed = self._fed(kind, layer)
        if any(state in fed for state, _ in self._under_way):
            self._settle()
        for state in fed:
            allocate(state.gradient).zero_()

    def after(self, kind: Kind, layer: int, *, last: bool) -> None:
        if fed := self._fed(kind, layer):
            self._settle()
            self._under_way = [(state, self._sums.scatter(state)) for state in fed]

    def _settle(self) -> None:
        """Wait for the reductions under way, which had the time of a layer, and let go of the whole gradients."""
        for state, each in self._under_way:
            state.own_gradient += each.wait()
            release(state.gradient)
        self._under_way = []

    def finish(self) -> None:
        """Reduce what is reduced once a step, and add the two halves of a tied gradient."""
        self._settle()
        states, sums = self._states.values(), self._sums
        vectors = [(state, sums.over_group(sums.groups.shard, state.vector_gradient)) for state in states]
        for state, each in vectors:
            state.vector_gradient.copy_(each.wait())
            state.take_vector_gradient()
            sums.partial(state, state.own_gradient, state.own[0])
        sums.across(states)
        if self._tied is not None and self._tied in self._states:
            sums.tied(self._states[self._tied])


GradientReduction = OnceAStep | EveryMicroBatch
