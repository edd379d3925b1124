"""The state of one layer on one rank, in flat buffers: weights, gradient, master weights and moments.

The layer is what is reduced, updated, saved, moved and rebuilt. Its buffers follow `plan.params.flat_layout`; parameters
are views of them. With sharding over the data axis a rank owns the interval `own` of the optimizer state, and by level of
the gradient and of the weights too: then the whole buffer has memory only while the layer is at work (`transient.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from raytrain3d.checkpoint.layout import Piece, interval_rectangles
from raytrain3d.config import JobConfig
from raytrain3d.parallel.transient import release
from raytrain3d.plan.mesh import Coordinate, Mesh
from raytrain3d.plan.params import LayerSpec, ParamSpec, Rectangle, Slot, flat_layout, local_rectangle

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class LayerState:
    """Buffers of one layer, empty of values until `fill` or a checkpoint. Sizes in elements."""

    def __init__(self, spec: LayerSpec, config: JobConfig, mesh: Mesh, at: Coordinate, device: torch.device) -> None:
        self.spec = spec
        self.layout = flat_layout(spec, tensor=mesh.tensor, data=mesh.data, decay_all=config.optimizer.decay_all)
        self._tensor, self._at, self._group = mesh.tensor, at, config.shard_group
        size, group, level = self.layout.size, config.shard_group, config.train.sharding
        self.own = _part((0, size), at.data % group, group)
        """What this rank keeps of whatever is sharded: all of it in a group of one."""
        self.data_part = _part(self.own, at.data // group, mesh.data // group)
        """What of it this rank saves and counts in the norm, and no other replica does."""
        self.shards_weights = level == "full" and group > 1
        self.shards_gradient = level in ("gradients", "full") and group > 1 and not spec.frozen
        dtype = DTYPES[config.train.dtype]
        self._exact = torch.float32 if dtype == torch.bfloat16 else dtype
        self.weights = torch.zeros(size, dtype=dtype, device=device)
        self.own_weights = self._own_part(self.weights, apart=self.shards_weights)
        if not spec.frozen:
            self.gradient = torch.zeros(size, dtype=self._exact, device=device)
            self.own_gradient = self._own_part(self.gradient, apart=self.shards_gradient)
            on_host = config.train.offload_optimizer
            make = partial(torch.zeros, len(self.own_gradient), dtype=self._exact, device="cpu" if on_host else device,
                           pin_memory=on_host and device.type == "cuda")
            self.exp_avg, self.exp_avg_sq = make(), make()
            self.master = self.own_weights if dtype == self._exact and not on_host else make()
        self.parameters = {slot.param.name: self._parameter(slot) for slot in self.layout.slots}
        self._vectors = self.layout.vectors if self.shards_gradient else ()
        self.vector_gradient = torch.zeros(sum(slot.size for slot in self._vectors), dtype=self._exact, device=device)
        """Gradient of norms and biases where gradients are sharded: so little that every rank keeps all of it and reduces
        it once a step, at whatever point of a backward it is made."""
        for slot, part in self._vector_parts():
            self.parameters[slot.param.name].grad = part
        if self.shards_weights:
            release(self.weights)
        if self.shards_gradient:
            release(self.gradient)

    def _own_part(self, whole: Tensor, *, apart: bool) -> Tensor:
        """The own interval of a flat buffer; a buffer of its own where the memory of the whole one comes and goes."""
        part = whole[self.own[0] : self.own[1]]
        return torch.zeros_like(part) if apart else part

    def _parameter(self, slot: Slot) -> nn.Parameter:
        parameter = nn.Parameter(self._view(self.weights, slot), requires_grad=not self.spec.frozen)
        if not self.spec.frozen:
            parameter.grad_dtype = self._exact
            parameter.grad = self._view(self.gradient, slot)
        return parameter

    @staticmethod
    def _view(buffer: Tensor, slot: Slot) -> Tensor:
        return buffer[slot.start : slot.stop].view(slot.shape)

    def deal(self, present: Sequence[int]) -> None:
        """Cut anew what each replica saves and counts in the norm, over these replicas."""
        holders = sorted({replica // self._group for replica in present})
        self.data_part = _part(self.own, holders.index(self._at.data // self._group), len(holders))

    def own_slice(self, start: int, stop: int) -> slice:
        """Elements [start, stop) of the layer as far as they are in the own interval: a slice of the own buffers, maybe
        empty."""
        low, high = self.own
        return slice(min(max(start, low), high) - low, min(max(stop, low), high) - low)

    def rest(self) -> None:
        """Nothing is left of a step, be it over or broken off: gradients are zero, what is sharded has no memory beside the
        own part."""
        if self.shards_weights:
            release(self.weights)
        if self.shards_gradient:
            release(self.gradient)
            self.own_gradient.zero_()
            self.vector_gradient.zero_()
        elif not self.spec.frozen:
            self.gradient.zero_()

    def take_vector_gradient(self) -> None:
        """Add `vector_gradient`, reduced, to the own gradient."""
        for slot, part in self._vector_parts():
            inside = self.own_slice(slot.start, slot.stop)
            first = self.own[0] + inside.start - slot.start
            self.own_gradient[inside] += part[first : first + inside.stop - inside.start]

    def _vector_parts(self) -> Iterable[tuple[Slot, Tensor]]:
        return zip(self._vectors, self.vector_gradient.split([slot.size for slot in self._vectors] or 1), strict=False)

    @property
    def has_master(self) -> bool:
        """Master weights are a buffer of their own (bf16, or kept on the host), not the weights themselves."""
        return not self.spec.frozen and self.master.data_ptr() != self.own_weights.data_ptr()

    def fill(self, values: Callable[[str, ParamSpec, Rectangle], Tensor]) -> None:
        """Set weights, in full precision first, from values(global name, parameter, rectangle); moments to zero."""
        with torch.no_grad():
            exact = torch.zeros(self.layout.size, dtype=self.weights.dtype if self.spec.frozen else self._exact)
            for slot in self.layout.slots:
                part = local_rectangle(slot.param, self._tensor, self._at.tensor)
                inner = tuple(slice(n) for n in part.shape)
                self._view(exact, slot)[inner] = values(f"{self.spec.name}.{slot.param.name}", slot.param, part)
            kept, start = self.kept_weights
            kept.copy_(exact[start : start + kept.numel()])
            if not self.spec.frozen:
                self.master.copy_(exact[self.own[0] : self.own[1]])
                self.exp_avg.zero_()
                self.exp_avg_sq.zero_()

    @property
    def kept_weights(self) -> tuple[Tensor, int]:
        """What stays of the weights between steps, and the element of the layer with which it begins."""
        return (self.own_weights, self.own[0]) if self.shards_weights else (self.weights, 0)

    def decayed(self) -> Iterator[slice]:
        """Parts of the own interval that get weight decay, as slices of the own buffers."""
        yield from (self.own_slice(*run) for run in self.layout.decay_runs)

    def norms(self) -> list[Tensor]:
        """Norms of the reduced gradient in this rank's `data_part`, by fixed intervals, so that they do not depend on where
        a layer lives; what all tensor ranks share is counted at tensor coordinate 0 only. Scalars in float64, on the device.
        """
        (low, high), (shared_low, shared_high) = self.data_part, self.layout.shared_run
        parts = [(low, min(high, shared_low)), (max(low, shared_high), high)]
        if self._at.tensor == 0:
            parts = [(low, min(high, shared_low)), (max(low, shared_low), min(high, shared_high)), *parts[1:]]
        gradients = [self.own_gradient[self.own_slice(a, b)] for a, b in parts if a < b]
        return [torch.linalg.vector_norm(part, dtype=torch.float64) for part in gradients]

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
        found = [("weight", *self.kept_weights)]
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


def _part(whole: tuple[int, int], index: int, count: int) -> tuple[int, int]:
    """Interval `index` of `count` equal ones; the last one has what is left over."""
    size = (whole[1] - whole[0]) // count
    return whole[0] + index * size, whole[1] if index == count - 1 else whole[0] + (index + 1) * size
