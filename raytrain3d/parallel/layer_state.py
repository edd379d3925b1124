"""The state of one layer on one rank, in flat buffers: weights, gradient, master weights and moments.

The layer is what is reduced, updated, saved, moved and rebuilt. Its buffers follow `plan.params.flat_layout`; parameters
are views of them. With sharding over the data axis a rank owns the interval `own` of the optimizer state.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from raytrain3d.checkpoint.layout import Piece, interval_rectangles
from raytrain3d.config import JobConfig
from raytrain3d.plan.mesh import Coordinate, Mesh
from raytrain3d.plan.params import LayerSpec, ParamSpec, Rectangle, Slot, flat_layout, local_rectangle

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class LayerState:
    """Buffers of one layer, empty of values until `fill` or a checkpoint. Sizes in elements."""

    def __init__(self, spec: LayerSpec, config: JobConfig, mesh: Mesh, at: Coordinate, device: torch.device) -> None:
        self.spec = spec
        self.layout = flat_layout(spec, tensor=mesh.tensor, data=mesh.data, decay_all=config.optimizer.decay_all)
        self._tensor, self._at = mesh.tensor, at
        part = self.layout.size // mesh.data
        self.data_part = (at.data * part, (at.data + 1) * part)
        """This data coordinate's interval: what it owns under sharding, and the part whose norm it counts."""
        self.sharded = config.train.sharding == "optimizer" and mesh.data > 1
        self.own = self.data_part if self.sharded else (0, self.layout.size)
        dtype = DTYPES[config.train.dtype]
        exact = torch.float32 if dtype == torch.bfloat16 else dtype
        self.weights = torch.zeros(self.layout.size, dtype=dtype, device=device)
        own_size = self.own[1] - self.own[0]
        if not spec.frozen:
            self.gradient = torch.zeros(self.layout.size, dtype=exact, device=device)
            on_host = config.train.offload_optimizer
            make = partial(torch.zeros, own_size, dtype=exact, device="cpu" if on_host else device,
                           pin_memory=on_host and device.type == "cuda")
            self.exp_avg, self.exp_avg_sq = make(), make()
            self.master = self.own_weights if dtype == exact and not on_host else make()
        self.parameters = {slot.param.name: self._parameter(slot) for slot in self.layout.slots}

    def _parameter(self, slot: Slot) -> nn.Parameter:
        parameter = nn.Parameter(self._view(self.weights, slot), requires_grad=not self.spec.frozen)
        if not self.spec.frozen:
            parameter.grad_dtype = self.gradient.dtype
            parameter.grad = self._view(self.gradient, slot)
        return parameter

    @staticmethod
    def _view(buffer: Tensor, slot: Slot) -> Tensor:
        return buffer[slot.start : slot.stop].view(slot.shape)

    @property
    def own_weights(self) -> Tensor:
        return self.weights[self.own[0] : self.own[1]]

    @property
    def own_gradient(self) -> Tensor:
        return self.gradient[self.own[0] : self.own[1]]

    @property
    def has_master(self) -> bool:
        """Master weights are a buffer of their own (bf16, or kept on the host), not the weights themselves."""
        return not self.spec.frozen and self.master.data_ptr() != self.own_weights.data_ptr()

    def fill(self, values: Callable[[str, ParamSpec, Rectangle], Tensor]) -> None:
        """Set weights, in full precision first, from values(global name, parameter, rectangle); moments to zero."""
        with torch.no_grad():
            exact = torch.zeros(self.layout.size, dtype=self.weights.dtype if self.spec.frozen else self.gradient.dtype)
            for slot in self.layout.slots:
                part = local_rectangle(slot.param, self._tensor, self._at.tensor)
                inner = tuple(slice(n) for n in part.shape)
                self._view(exact, slot)[inner] = values(f"{self.spec.name}.{slot.param.name}", slot.param, part)
            self.weights.copy_(exact)
            if not self.spec.frozen:
                self.master.copy_(exact[self.own[0] : self.own[1]])
                self.exp_avg.zero_()
                self.exp_avg_sq.zero_()

    def decayed(self) -> Iterator[slice]:
        """Parts of the own interval that get weight decay, as slices of the own buffers."""
        low, high = self.own
        for start, stop in self.layout.decay_runs:
            first, last = max(start, low), min(stop, high)
            if first < last:
                yield slice(first - low, last - low)

    def squared_norm(self) -> float:
        """Squared norm of the reduced gradient in this rank's `data_part`, what all tensor ranks share counted at
        tensor coordinate 0 only. Summed in float64 over fixed intervals, so it does not depend on where a layer lives."""
        (low, high), (shared_low, shared_high) = self.data_part, self.layout.shared_run
        parts = [(low, min(high, shared_low)), (max(low, shared_high), high)]
        if self._at.tensor == 0:
            parts = [(low, min(high, shared_low)), (max(low, shared_low), min(high, shared_high)), *parts[1:]]
        squares = [torch.linalg.vector_norm(self.gradient[a:b], dtype=torch.float64) ** 2 for a, b in parts if a < b]
        return float(sum(square.item() for square in squares))

    def pieces(self) -> list[Piece]:
        """What this rank holds of the layer, to be loaded: rectangles over live buffers."""
        return [piece for kind, buffer, start in self._buffers()
                for piece in self._cut(kind, buffer, start, (start, start + buffer.numel()), self.layout.slots)]

    def saved_pieces(self) -> list[Piece]:
        """What this rank saves of them, so that every byte is saved by one rank: of what all replicas hold its part, and
        what all tensor ranks hold at tensor coordinate 0."""
        slots = [slot for slot in self.layout.slots if slot.param.split is not None or self._at.tensor == 0]
        return [piece for kind, buffer, start in self._buffers()
                for piece in self._cut(kind, buffer, start, self.data_part, slots)]

    def _buffers(self) -> list[tuple[str, Tensor, int]]:
        """(kind, buffer, element of the layer's flat layout with which it begins)"""
        found = [("weight", self.weights, 0)]
        if not self.spec.frozen:
            found += [("exp_avg", self.exp_avg, self.own[0]), ("exp_avg_sq", self.exp_avg_sq, self.own[0])]
            if self.has_master:
                found.append(("master", self.master, self.own[0]))
        return found

    def _cut(self, kind: str, buffer: Tensor, start: int, interval: tuple[int, int], slots: Sequence[Slot]) -> list[Piece]:
        """Pieces of `slots` within `interval` of the flat layout, in a buffer that begins with its element `start`."""
        found = []
        for slot in slots:
            offset = [0] * len(slot.shape)
            if slot.param.split is not None:
                offset[slot.param.split] = self._at.tensor * slot.shape[slot.param.split]
            low, high = max(interval[0], slot.start), min(interval[1], slot.stop)
            inside = (low - slot.start, high - slot.start)
            for box in interval_rectangles(slot.shape, offset, inside, slot.param.shape):
                tensor = box.view(buffer[low - start : high - start], inside[0])
                found.append(Piece(name=f"{self.spec.name}.{slot.param.name}", kind=kind, rectangle=box.rectangle,
                                   tensor=tensor))
        return found
