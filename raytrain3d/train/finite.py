"""Where numbers stop being finite: a step is computed once more under watch.

A layer is the origin if what enters it is finite and what leaves it is not. So a rank that only passes on what it was given
names nothing, and of all ranks those are left in which it began. Costs a look at every tensor that crosses a layer's
border, which is why only a step that has gone bad is watched.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from raytrain3d.parallel.layer_state import LayerState
from raytrain3d.plan.schedule import Kind
from raytrain3d.train.report import Origin, Place


class FiniteWatch:
    """Of one rank in one step. `modules`, `states_of` and `names` by layer; `op()` is the op under way."""

    def __init__(self, modules: Mapping[int, nn.Module], states_of: Callable[[int], Iterable[LayerState]],
                 names: Sequence[str], op: Callable[[], str | None]) -> None:
        self._modules, self._states_of, self._names, self._op = modules, states_of, names, op
        self._spoilt: set[int] = set()
        """Layers that were given what is not finite, from before or from behind: no wonder then."""
        self.found: Origin | None = None
        """The first one."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The layers' tensors are looked at inside."""
        for layer in self._modules:
            if not all(is_finite(state.kept_weights[0]) for state in self._states_of(layer)):
                self._note(layer, "weights")
        hooks = [module.register_forward_hook(self._look_at(layer)) for layer, module in self._modules.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def before(self, kind: Kind, layer: int) -> None:
        pass

    def after(self, kind: Kind, layer: int, *, last: bool) -> None:
        """Before its reduction begins, which spreads what is not finite over all replicas."""
        if kind is not Kind.FORWARD and not self._gradients_finite(layer):
            self._note(layer, "gradient")

    def look_at_sums(self) -> None:
        """When all reductions are over."""
        for layer in sorted(self._modules, reverse=True):
            if not all(state.spec.frozen or is_finite(state.own_gradient) for state in self._states_of(layer)):
                self._note(layer, "sum")

    def _gradients_finite(self, layer: int) -> bool:
        return all(state.spec.frozen or (is_finite(state.gradient) and is_finite(state.vector_gradient))
                   for state in self._states_of(layer))

    def _look_at(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def left(gradient: Tensor) -> None:
            if not is_finite(gradient):
                self._spoilt.add(layer)

        def entered(gradient: Tensor) -> None:
            if not is_finite(gradient):
                self._note(layer, "backward")

        def look(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            entering = arguments[0]
            if not is_finite(entering):
                self._spoilt.add(layer)
            if not is_finite(output):
                self._note(layer, "forward")
            if output.requires_grad:
                output.register_hook(left)  # type: ignore[no-untyped-call]
            if entering.requires_grad:
                entering.register_hook(entered)

        return look

    def _note(self, layer: int, place: Place) -> None:
        if self.found is None and layer not in self._spoilt:
            self.found = Origin(layer=self._names[layer], place=place, op=self._op())


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Also of one whose memory has been let go, or that holds whole numbers."""
    if not tensor.is_floating_point() or tensor.untyped_storage().size() == 0:
        return True
    return bool(torch.isfinite(tensor).all())
