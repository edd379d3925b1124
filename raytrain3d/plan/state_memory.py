"""Bytes of a rank's state: weights, gradients, master weights, moments; and what of it is in host memory.

Exact, padding of the flat buffers included: what stays between steps by kind, and as `transient` what layers at work have
beside it under sharding.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from operator import add

from raytrain3d.config import JobConfig
from raytrain3d.plan.params import FlatLayout, LayerSpec, ModelSpec, flat_layout
from raytrain3d.plan.schedule import Kind, Op
from raytrain3d.plan.uses import Use, layer_uses, makes_gradient

ELEMENT_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
"""By `train.dtype`: weights and activations."""
EXACT_BYTES = {"bf16": 4, "fp32": 4, "fp64": 8}
"""By `train.dtype`: gradients, master weights, moments, probabilities of the loss."""
REDUCE_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
"""By `JobConfig.reduce_dtype`: gradients on their way to other replicas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one rank by kind."""

    weights: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    transient: int = 0
    """Whole weights and gradients of sharded layers that are at work or on their way."""
    activations: int = 0
    logits: int = 0
    host: int = 0
    """In host memory by `train.offload_*`; not part of the total."""
    snapshots: int = 0
    """In host memory by `recovery.snapshot_interval`; not part of the total."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self) if field.name not in ("host", "snapshots"))

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    def __mul__(self, count: int) -> "Memory":
        return Memory(**{field.name: getattr(self, field.name) * count for field in fields(self)})


def state_memory(num_elements: int, *, dtype: str, sharding: str, data: int,
                 gradient_bytes: int | None = None) -> Memory:
    """Weights, gradients and AdamW state of `num_elements` trained elements, a multiple of `data`, over which they are
    sharded.

    Bytes an element (https://arxiv.org/abs/1910.02054 with FP32 gradients): bf16 2 + 4 + 4 + 8 = 18, fp32 and fp64 have
    no master copy: 16 and 32. `optimizer` divides master weights and moments by `data`, `gradients` gradients as well,
    `full` everything. gradient_bytes: instead of the type that this package accumulates gradients in.
    """
    element, exact, own = ELEMENT_BYTES[dtype], EXACT_BYTES[dtype], num_elements // data
    weights = own if sharding == "full" else num_elements
    gradients = own if sharding in ("gradients", "full") else num_elements
    optimizer = num_elements if sharding == "none" else own
    return Memory(weights=weights * element, gradients=gradients * (gradient_bytes or exact),
                  master=optimizer * exact if exact != element else 0, moments=2 * optimizer * exact)


def layer_state_memory(layer: LayerSpec, config: JobConfig) -> Memory:
    """State of one layer on a rank that holds it, between steps. A frozen layer has weights only. Where gradients are
    sharded those of norms and biases are kept whole beside the shard."""
    train, layout = config.train, _layout(layer, config)
    memory = state_memory(layout.size, dtype=train.dtype, sharding=train.sharding, data=config.shard_group)
    if layer.frozen:
        return Memory(weights=memory.weights)
    vectors = sum(slot.size for slot in layout.vectors) if config.joint_ops else 0
    memory += Memory(gradients=vectors * EXACT_BYTES[train.dtype])
    return optimizer_on_host(memory) if train.offload_optimizer else memory


def moved_bytes(layer: LayerSpec, config: JobConfig) -> int:
    """Of what a rank holds of a layer between steps, wherever it is: all but gradients. So much is sent when it moves, and
    copied for a snapshot."""
    memory = layer_state_memory(layer, config)
    return memory.total + memory.host - memory.gradients


def optimizer_on_host(memory: Memory) -> Memory:
    """Moments there, and in every type a master copy of the weights, half as large."""
    return replace(memory, master=0, moments=0, host=memory.moments + memory.moments // 2)


def _layout(layer: LayerSpec, config: JobConfig) -> FlatLayout:
    return _flat_layout(layer, config.mesh.tensor, config.mesh.replicas, config.optimizer.decay_all)


@cache
def _flat_layout(layer: LayerSpec, tensor: int, data: int, decay_all: bool) -> FlatLayout:
    return flat_layout(layer, tensor=tensor, data=data, decay_all=decay_all)


def transient_memory(config: JobConfig, spec: ModelSpec, stages: Mapping[int, range], ops: Iterable[Op]) -> Memory:
    """Most that whole weights and gradients of sharded layers take at a time: gathered weights of the layer at work and of
    the next one (of all layers with `keep_gathered: step`), gradients of the layer at work and of the one being reduced.
    """
    if not config.joint_ops:
        return Memory()
    uses = layer_uses(ops, stages)
    weights = _gathered(config, spec, uses) if config.train.sharding == "full" else [0] * len(uses)
    return Memory(transient=max(map(add, weights, _unreduced(config, spec, uses)), default=0))


def _gathered(config: JobConfig, spec: ModelSpec, uses: Sequence[Use]) -> list[int]:
    """Bytes of gathered weights at each use."""
    element = ELEMENT_BYTES[config.train.dtype]

    def whole(layers: Iterable[int]) -> int:
        return sum(_layout(state, config).size for state in spec.states_of(set(layers))) * element

    if config.train.keep_gathered == "step":
        return [whole(layer for _, layer in uses)] * len(uses)
    found: list[int] = []
    following: list[int] = []
    for kind, layer in reversed(uses):
        needed = [] if kind is Kind.BACKWARD_WEIGHT else [layer]
        found.append(whole([*needed, *following]))
        following = needed or following
    return found[::-1]


def _unreduced(config: JobConfig, spec: ModelSpec, uses: Sequence[Use]) -> list[int]:
    """Bytes of whole gradients at each use. A reduction adds its result, which is not in place."""
    exact = EXACT_BYTES[config.train.dtype]
    found: list[int] = []
    under_way = 0
    for kind, layer in uses:
        sizes = [_layout(state, config).size for state in spec.states_of([layer])
                 if state.has_matrices and not state.frozen]
        whole = sum(sizes) * exact if makes_gradient(kind, spec.layers[layer], config.train) else 0
        found.append(whole + under_way)
        under_way = whole + whole // config.shard_group if whole else under_way
    return found


def local_parameters(layer: LayerSpec, tensor: int) -> int:
    """Elements of a layer on one tensor rank, vocabulary padding included."""
    return sum(math.prod(param.local_shape(tensor)) for param in layer.params)
