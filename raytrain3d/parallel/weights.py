"""Weights that are sharded over the data axis (ZeRO-3, https://arxiv.org/abs/1910.02054), gathered for use.

A run of a program uses layers in an order that is known beforehand: the gather of the next one starts before the present
one is at work. All ranks of a group gather in the order of the same ops.
"""

from collections.abc import Callable, Sequence

from raytrain3d.parallel.groups import Group, Work
from raytrain3d.parallel.layer_state import LayerState
from raytrain3d.parallel.transient import allocate, is_allocated, release
from raytrain3d.plan.schedule import Kind
from raytrain3d.plan.uses import Use

States = tuple[LayerState, ...]


class WeightGathering:
    """Gathers of one run.

    uses: of the whole run; weight gradients (W) need no weights. states_of: layer -> its states. keep: what was gathered
    stays until the run is over; else until the next use is of other states.
    """

    def __init__(self, uses: Sequence[Use], states_of: Callable[[int], Sequence[LayerState]], shard: Group, *,
                 keep: bool) -> None:
        self._uses: list[States] = [tuple(state for state in states_of(layer) if state.shards_weights)
                                    for kind, layer in uses if kind is not Kind.BACKWARD_WEIGHT]
        self._shard, self._keep = shard, keep
        self._at = 0
        self._coming: dict[int, Work] = {}

    def before(self, kind: Kind, layer: int) -> None:
        """Have the weights of this use, and start to bring those of the next."""
        if kind is Kind.BACKWARD_WEIGHT:
            return
        for state in (*self._uses[self._at], *self._next):
            self._start(state)
        for state in self._uses[self._at]:
            if state.spec.index in self._coming:
                self._coming.pop(state.spec.index).wait()

    def after(self, kind: Kind, layer: int, *, last: bool) -> None:
        if kind is Kind.BACKWARD_WEIGHT:
            return
        for state in () if self._keep else self._uses[self._at]:
            if state not in self._next:
                release(state.weights)
        self._at += 1

    def finish(self) -> None:
        """The run is over: keep nothing."""
        for states in self._uses:
            for state in states:
                release(state.weights)

    @property
    def _next(self) -> States:
        return self._uses[self._at + 1] if self._at + 1 < len(self._uses) else ()

    def _start(self, state: LayerState) -> None:
        if not is_allocated(state.weights):
            self._coming[state.spec.index] = self._shard.all_gather(allocate(state.weights), state.own_weights)
