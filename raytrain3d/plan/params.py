"""The parameter manifest: every layer's parameters with global shape, split dimension and place in the layer's buffer.

One description serves partition, memory model, tensor parallelism, optimizer, checkpoint and import/export. A model is
a row of layers: 0 the embedding, 1..blocks the transformer blocks, blocks + 1 the head. A tied embedding is one more
state (`kind="tied"`, index blocks + 2) that the stages of embedding and head both hold.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from raytrain3d.config import ModelConfig, TrainConfig

ALIGNMENT = 128
"""Elements between parameter starts in a flat buffer: at least 256 bytes in every dtype."""
NO_LOSS = -100
"""Target of a position without loss (torch's `ignore_index`): written by the data, passed over by the head."""

LayerKind = Literal["embedding", "block", "head", "tied"]
Initial = Literal["normal", "residual", "ones", "zeros"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """One parameter of a layer, in its global, unpadded shape."""

    name: str
    """Name inside its layer, such as `attention.query.weight`."""
    shape: tuple[int, ...]
    split: int | None = None
    """Dimension divided over the tensor axis; None: every tensor rank holds all of it."""
    partial: bool = False
    """Held by every tensor rank, but each one's gradient is only its share of the sum."""
    decay: bool = True
    initial: Initial = "normal"
    multiple: int = 1
    """Rows on each tensor rank are padded to a multiple of this (vocabulary)."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def local_shape(self, tensor: int) -> tuple[int, ...]:
        """Shape on one of `tensor` ranks, padding included."""
        if self.split is None:
            return self.shape
        part = -(-self.shape[self.split] // (tensor * self.multiple)) * self.multiple
        return (*self.shape[: self.split], part, *self.shape[self.split + 1 :])


@dataclass(frozen=True, kw_only=True, slots=True)
class Rectangle:
    """A box of a parameter's global, unpadded shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: "Rectangle") -> "Rectangle | None":
        low = tuple(map(max, self.offset, other.offset))
        boxes = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ends = (min(a + m, b + n) for a, m, b, n in boxes)
        shape = tuple(end - start for start, end in zip(low, ends, strict=True))
        return Rectangle(offset=low, shape=shape) if all(n > 0 for n in shape) else None

    def within(self, outer: "Rectangle") -> tuple[slice, ...]:
        """Index of this box inside a tensor that holds `outer`."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.shape, strict=True))


def local_rectangle(param: ParamSpec, tensor: int, coordinate: int) -> Rectangle:
    """The part of `param` that tensor rank `coordinate` holds; padding left out, so it may be empty (a size of 0)."""
    offset = [0] * len(param.shape)
    shape = list(param.shape)
    if param.split is not None:
        part = param.local_shape(tensor)[param.split]
        offset[param.split] = min(coordinate * part, param.shape[param.split])
        shape[param.split] = min(part, param.shape[param.split] - offset[param.split])
    return Rectangle(offset=tuple(offset), shape=tuple(shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One layer: the unit of partition, reduction, optimizer, checkpoint and migration."""

    index: int
    name: str
    kind: LayerKind
    params: tuple[ParamSpec, ...]
    frozen: bool = False
    matmul_parameters: int = 0
    """Weights that every token is multiplied with (a tied head counts the shared weight)."""
    attention_width: int = 0
    """heads x head size; 0 for layers without attention."""

    @property
    def num_parameters(self) -> int:
        return sum(p.size for p in self.params)

    @property
    def has_matrices(self) -> bool:
        """Not norms and biases alone, as a head with a tied projection."""
        return any(len(p.shape) > 1 for p in self.params)

    def forward_flops(self, sequence: int, *, causal: bool = True) -> float:
        """FLOPs of one sample's forward: 2 per weight and token, 4 s^2 x width for attention (half of it when only the
        causal half is computed)."""
        attention = 4 * sequence**2 * self.attention_width
        return 2 * self.matmul_parameters * sequence + (attention / 2 if causal else attention)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """All layers of a model in pipeline order, and the tied state if there is one."""

    layers: tuple[LayerSpec, ...]
    tied: LayerSpec | None

    @property
    def states(self) -> tuple[LayerSpec, ...]:
        """Everything that owns parameters."""
        return self.layers if self.tied is None else (*self.layers, self.tied)

    @property
    def num_parameters(self) -> int:
        return sum(state.num_parameters for state in self.states)

    def states_of(self, layers: Iterable[int]) -> tuple[LayerSpec, ...]:
        """States that a rank holding `layers` needs. The tied one belongs to both ends, once where they share a rank."""
        held = tuple(layers)
        own = tuple(self.layers[i] for i in held)
        at_an_end = 0 in held or len(self.layers) - 1 in held
        return (*own, self.tied) if self.tied is not None and at_an_end else own


def model_spec(model: ModelConfig, train: TrainConfig, tensor: int) -> ModelSpec:
    """The manifest of `model`. `tensor` and sequence parallelism only decide which parameters have partial gradients."""
    vocabulary = (model.vocabulary, model.hidden)
    table = ParamSpec(name="tokens.weight", shape=vocabulary, split=0, decay=False, multiple=model.vocabulary_multiple)
    embedding = [] if model.tied_embeddings else [table]
    if model.family == "gpt2":
        positions = (model.positions or train.sequence, model.hidden)
        embedding.append(ParamSpec(name="positions.weight", shape=positions, decay=False))
    head = _norm("norm", model)
    if not model.tied_embeddings:
        head.append(ParamSpec(name="output.weight", shape=vocabulary, split=0, multiple=model.vocabulary_multiple))
    block = _block(model, tensor)
    if train.sequence_parallel and tensor > 1:  # what every rank holds it applies to its part of the sequence
        embedding, block, head = ([param if param.split is not None else replace(param, partial=True) for param in layer]
                                  for layer in (embedding, block, head))
    frozen = model.frozen_layers()
    last = model.blocks + 1
    block_matmul = sum(p.size for p in block if len(p.shape) == 2)
    width = model.heads * model.size_of_head
    layers = (
        LayerSpec(index=0, name="embedding", kind="embedding", params=tuple(embedding), frozen=0 in frozen),
        *(LayerSpec(index=i, name=f"blocks.{i - 1}", kind="block", params=tuple(block), frozen=i in frozen,
                    matmul_parameters=block_matmul, attention_width=width) for i in range(1, last)),
        LayerSpec(index=last, name="head", kind="head", params=tuple(head), frozen=last in frozen,
                  matmul_parameters=model.vocabulary * model.hidden),
    )
    tied = None
    if model.tied_embeddings:
        tied = LayerSpec(index=last + 1, name="tied", kind="tied", params=(table,), frozen=0 in frozen)
    return ModelSpec(layers=layers, tied=tied)


def _norm(name: str, model: ModelConfig) -> list[ParamSpec]:
    weight = ParamSpec(name=f"{name}.weight", shape=(model.hidden,), decay=False, initial="ones")
    bias = ParamSpec(name=f"{name}.bias", shape=(model.hidden,), decay=False, initial="zeros")
    return [weight, bias] if model.family == "gpt2" else [weight]


def _linear(name: str, rows: int, columns: int, split: int | None, *, bias: bool,
            initial: Initial = "normal", partial: bool = False) -> list[ParamSpec]:
    weight = ParamSpec(name=f"{name}.weight", shape=(rows, columns), split=split, initial=initial, partial=partial)
    if not bias:
        return [weight]
    # A bias is split with the rows; under a split of columns it is added once, after the sum.
    return [weight, ParamSpec(name=f"{name}.bias", shape=(rows,), split=0 if split == 0 else None, decay=False,
                              initial="zeros", partial=partial)]


def _block(model: ModelConfig, tensor: int) -> list[ParamSpec]:
    gpt2 = model.family == "gpt2"
    hidden, width = model.hidden, model.heads * model.size_of_head
    kv_width = model.num_kv_heads * model.size_of_head
    # With more tensor ranks than key/value heads every rank holds them all and uses one.
    kv_split, kv_partial = (None, True) if tensor > model.num_kv_heads else (0, False)
    qkv_bias = gpt2 or model.qkv_bias
    params = _norm("attention_norm", model)
    params += _linear("attention.query", width, hidden, 0, bias=qkv_bias)
    params += _linear("attention.key", kv_width, hidden, kv_split, bias=qkv_bias, partial=kv_partial)
    params += _linear("attention.value", kv_width, hidden, kv_split, bias=qkv_bias, partial=kv_partial)
    if model.qk_norm:
        # Each tensor rank norms its own heads only, so the gradient of the shared weight is a sum over ranks.
        params += [ParamSpec(name=f"attention.{part}_norm.weight", shape=(model.size_of_head,), partial=tensor > 1,
                             decay=False, initial="ones") for part in ("query", "key")]
    params += _linear("attention.output", hidden, width, 1, bias=gpt2, initial="residual")
    params += _norm("mlp_norm", model)
    if not gpt2:
        params += _linear("mlp.gate", model.feed_forward, hidden, 0, bias=False)
    params += _linear("mlp.up", model.feed_forward, hidden, 0, bias=gpt2)
    params += _linear("mlp.down", hidden, model.feed_forward, 1, bias=gpt2, initial="residual")
    return params


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Place of one parameter in the flat buffer of its layer."""

    param: ParamSpec
    start: int
    shape: tuple[int, ...]
    """Local shape, padding included."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatLayout:
    """A layer's parameters one after the other in one buffer, on one rank of the tensor axis. In elements."""

    slots: tuple[Slot, ...]
    size: int
    """Multiple of the data size, so that every data shard is equal."""
    decay_runs: tuple[tuple[int, int], ...]
    """Intervals that get weight decay."""
    partial_run: tuple[int, int]
    """Interval whose gradient is summed over the tensor axis (may be empty)."""
    shared_run: tuple[int, int]
    """Interval that every tensor rank holds alike: counted in the gradient norm at tensor coordinate 0 only."""

    @property
    def vectors(self) -> tuple[Slot, ...]:
        """Parameters with one dimension: norms and biases."""
        return tuple(slot for slot in self.slots if len(slot.shape) == 1)


def flat_layout(layer: LayerSpec, *, tensor: int, data: int, decay_all: bool = False) -> FlatLayout:
    """Order: split with decay, split without, shared with decay, its partial ones, partial without, shared without.

    So what is decayed, summed over the tensor axis, or counted once is an interval, not a list of parameters.
    """
    def decays(p: ParamSpec) -> bool:
        return p.decay or decay_all

    def place(p: ParamSpec) -> int:
        if p.split is not None:
            return 0 if decays(p) else 1
        if decays(p):
            return 3 if p.partial else 2
        return 4 if p.partial else 5

    slots: list[Slot] = []
    starts = [0] * 7
    end = 0
    ordered = sorted(layer.params, key=place)
    for position in range(6):
        starts[position] = end
        for param in (p for p in ordered if place(p) == position):
            slots.append(Slot(param=param, start=end, shape=param.local_shape(tensor)))
            end = -(-slots[-1].stop // ALIGNMENT) * ALIGNMENT
    starts[6] = end
    unit = ALIGNMENT * data
    runs = ((starts[0], starts[1]), (starts[2], starts[4]))
    return FlatLayout(slots=tuple(slots), size=-(-end // unit) * unit,
                      decay_runs=tuple(run for run in runs if run[0] < run[1]),
                      partial_run=(starts[3], starts[5]), shared_run=(starts[2], starts[6]))
