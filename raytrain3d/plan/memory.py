"""Bytes on a rank: weights, gradients, master weights, moments, activations, logits.

State is exact, padding of the flat buffers included. Activations are what autograd keeps for the backward, by the
counting of https://arxiv.org/abs/2205.05198 section 4 applied to each family's own shapes, under these assumptions: a
matrix product keeps its input; a norm its input; attention is fused and keeps query, key, value and output (with
attention dropout it runs unfused and keeps the probabilities before and after dropout and the mask); a dropout mask is
one byte an element; elementwise functions keep their inputs. RMSNorm on a CPU is not fused and keeps normed values in
FP32 as well: a llama block was measured to keep 12 % more in fp32, 33 % more in bf16. Not counted: the framework,
communication buffers, temporaries of a running op, fragmentation.
"""

import math
from dataclasses import dataclass, fields

from raytrain3d.config import JobConfig, ModelConfig
from raytrain3d.plan.params import LayerSpec, ModelSpec, flat_layout

ELEMENT_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
"""By `train.dtype`: weights and activations."""
EXACT_BYTES = {"bf16": 4, "fp32": 4, "fp64": 8}
"""By `train.dtype`: gradients, master weights, moments, probabilities of the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one rank by kind."""

    weights: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


def state_memory(num_elements: int, *, dtype: str, sharding: str, data: int,
                 gradient_bytes: int | None = None) -> Memory:
    """Weights, gradients and AdamW state of `num_elements` trained elements, a multiple of `data` under sharding.

    Bytes an element (https://arxiv.org/abs/1910.02054 with FP32 gradients): bf16 2 + 4 + 4 + 8 = 18, fp32 and fp64 have
    no master copy: 16 and 32. `optimizer` divides master weights and moments by `data`. gradient_bytes: instead of the
    type that this package accumulates gradients in.
    """
    element, exact = ELEMENT_BYTES[dtype], EXACT_BYTES[dtype]
    own = num_elements // data if sharding == "optimizer" else num_elements
    return Memory(weights=num_elements * element, gradients=num_elements * (gradient_bytes or exact),
                  master=own * exact if exact != element else 0, moments=2 * own * exact)


def layer_state_memory(layer: LayerSpec, config: JobConfig) -> Memory:
    """State of one layer on a rank that holds it. A frozen layer has weights only."""
    mesh, train = config.mesh, config.train
    size = flat_layout(layer, tensor=mesh.tensor, data=mesh.data, decay_all=config.optimizer.decay_all).size
    if layer.frozen:
        return Memory(weights=size * ELEMENT_BYTES[train.dtype])
    return state_memory(size, dtype=train.dtype, sharding=train.sharding, data=mesh.data)


def local_parameters(layer: LayerSpec, tensor: int) -> int:
    """Elements of a layer on one tensor rank, vocabulary padding included."""
    return sum(math.prod(param.local_shape(tensor)) for param in layer.params)


def activation_bytes_per_token(layer: LayerSpec, model: ModelConfig, *, dtype: str, sequence: int,
                               tensor: int) -> float:
    """What one layer keeps of one token until its backward, on one rank, without recompute and logits.

    A gpt2 block in 16 bit with both dropouts keeps h (10 + 24 / t + 5 a s / (h t)) bytes.
    """
    element, hidden = ELEMENT_BYTES[dtype], model.hidden
    mask = hidden if model.dropout else 0
    match layer.kind:
        case "embedding":
            return 9 + mask  # an int64 id and whether the row is held elsewhere
        case "head":
            return 2 * hidden * element  # input and output of the norm
    rows = {param.name: param.local_shape(tensor)[0] for param in layer.params}
    query, key = rows["attention.query.weight"], rows["attention.key.weight"]
    inner = rows["mlp.up.weight"] * (4 if model.family == "llama" else 2)
    split = 2 * query + 2 * key + inner + (query + key if model.qk_norm else 0)
    attention = (2 * element + 1) * sequence * model.heads / tensor if model.attention_dropout else 0.0
    return (4 * hidden + split) * element + 2 * mask + attention


def activation_memory(config: JobConfig, spec: ModelSpec, layers: range, in_flight: int) -> Memory:
    """Activations and logits of a stage with `in_flight` micro-batches waiting for their backward.

    Full recompute keeps the input of each layer, and one layer in full while it is computed again.
    """
    model, train, tensor = config.model, config.train, config.mesh.tensor
    tokens = train.micro_batch * train.sequence
    carried = model.hidden * ELEMENT_BYTES[train.dtype]
    kept = [activation_bytes_per_token(spec.layers[i], model, dtype=train.dtype, sequence=train.sequence, tensor=tensor)
            for i in layers]
    has_head = len(spec.layers) - 1 in layers
    logits = vocabulary_rows(model, tensor) * EXACT_BYTES[train.dtype] if has_head else 0
    if train.recompute == "full":
        inputs = sum(8 if spec.layers[i].kind == "embedding" else carried for i in layers)
        live = min(in_flight, 1)
        return Memory(activations=round(tokens * (in_flight * inputs + live * max(kept))),
                      logits=tokens * logits * live)
    output = 0 if has_head else carried  # the last layer's output is kept with its graph
    return Memory(activations=round(tokens * in_flight * (sum(kept) + output)), logits=tokens * logits * in_flight)


def vocabulary_rows(model: ModelConfig, tensor: int) -> int:
    """Rows of the output projection on one tensor rank, padding included."""
    return -(-model.vocabulary // (tensor * model.vocabulary_multiple)) * model.vocabulary_multiple


def stage_memory(config: JobConfig, spec: ModelSpec, layers: range, in_flight: int) -> Memory:
    """Everything on a rank that holds `layers`."""
    states = (layer_state_memory(state, config) for state in spec.states_of(layers))
    return sum(states, activation_memory(config, spec, layers, in_flight))
