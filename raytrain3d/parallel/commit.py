"""The commit vector: what all ranks know before any parameter changes.

Phase 1 of a step ends when every rank holds the same vector on its host. It carries the squared gradient norm in one slot
per (state, tensor coordinate, data part), loss and token counts in one slot per replica, and flags. Members of a gang
send to their leader, leaders to the root, each adds in rank order, and the sum returns the same way; with a slot written
by one rank only, the result does not depend on the layout of the layers. Always over gloo, on the CPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from raytrain3d.parallel.groups import Groups
from raytrain3d.plan.mesh import Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """A step's result, the same on every rank."""

    gradient_norm: float
    """Of the mean gradient, before clipping."""
    loss: float
    """Mean over all loss tokens, in nats."""
    tokens: int
    copies_done: bool
    """No rank has a snapshot of its state under way."""
    stop: bool

    @property
    def finite(self) -> bool:
        return math.isfinite(self.gradient_norm) and math.isfinite(self.loss)


class CommitVector:
    """Slots of one step, filled by one rank."""

    def __init__(self, mesh: Mesh, num_states: int, num_ranks: int | None = None) -> None:
        """num_ranks: that take part; default all of the mesh."""
        self._mesh, self._num_ranks = mesh, mesh.size if num_ranks is None else num_ranks
        self._norms = num_states * mesh.tensor * mesh.data
        self.values = torch.zeros(self._norms + 2 * mesh.data + 2, dtype=torch.float64)

    def set_norm(self, state: int, tensor: int, part: int, squared: float) -> None:
        self.values[(state * self._mesh.tensor + tensor) * self._mesh.data + part] = squared

    def set_loss(self, replica: int, loss_sum: float, tokens: int) -> None:
        self.values[self._norms + replica] = loss_sum
        self.values[self._norms + self._mesh.data + replica] = tokens

    def say_copies_done(self) -> None:
        """By every rank that has no snapshot under way."""
        self.values[-2] = 1

    def ask_stop(self) -> None:
        self.values[-1] = 1

    def agreement(self) -> Agreement:
        """Read the summed vector; slots are added in their order."""
        values = self.values.tolist()
        losses, tokens = values[self._norms : self._norms + self._mesh.data], values[self._norms + self._mesh.data : -2]
        count = int(sum(tokens))
        return Agreement(gradient_norm=math.sqrt(sum(values[: self._norms])) / max(count, 1),
                         loss=sum(losses) / max(count, 1), tokens=count, copies_done=values[-2] == self._num_ranks,
                         stop=values[-1] > 0)


def sum_over_all(values: Tensor, groups: Groups, *, got: Callable[[], None] = lambda: None) -> None:
    """Replace `values` (float64, CPU) by its sum over all ranks, added in rank order, in place. `got` is called as soon as
    this rank has the sum, before anyone gets it from here (and maybe again)."""
    groups.gang.gather_sum(values)
    if groups.leaders is not None:
        groups.leaders.gather_sum(values)
        groups.leaders.send_back(values, got=got)
    groups.gang.send_back(values, got=got)
