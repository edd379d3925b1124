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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache

from raytrain3d.config import JobConfig, ModelConfig
from raytrain3d.plan.params import LayerSpec, ModelSpec, flat_layout
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.program import Programs
from raytrain3d.plan.schedule import Kind, Op
from raytrain3d.plan.simulate import held_at_peak

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

    def __mul__(self, count: int) -> "Memory":
        return Memory(**{field.name: getattr(self, field.name) * count for field in fields(self)})


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
            return 2 * hidden * element  # input and output of the norm; in chunks the output's gradient in its place
    rows = {param.name: param.local_shape(tensor)[0] for param in layer.params}
    query, key = rows["attention.query.weight"], rows["attention.key.weight"]
    inner = rows["mlp.up.weight"] * (4 if model.family == "llama" else 2)
    split = 2 * query + 2 * key + inner + (query + key if model.qk_norm else 0)
    attention = (2 * element + 1) * sequence * model.heads / tensor if model.attention_dropout else 0.0
    return (4 * hidden + split) * element + 2 * mask + attention


def kept_memory(config: JobConfig, spec: ModelSpec, layers: range, after: Kind) -> Memory:
    """Activations and logits that one micro-batch of a stage keeps after F for its backward, or after I for its W.

    Full recompute keeps the input of each layer after F. A split backward is counted as if I freed nothing: what the
    weight gradients wait for, input and output gradient of every matrix product, is at most that.
    """
    model, train, last = config.model, config.train, len(spec.layers) - 1
    tokens, carried = train.micro_batch * train.sequence, model.hidden * ELEMENT_BYTES[train.dtype]
    if train.recompute == "full" and after is Kind.FORWARD:
        return Memory(activations=tokens * sum(8 if spec.layers[i].kind == "embedding" else carried for i in layers))
    output = 0 if last in layers else carried  # the last layer's output is kept with its graph
    kept = sum(_layer_bytes(config, spec.layers[i]) for i in layers) + output
    logits = _logit_bytes(config, tokens) if last in layers and train.loss_chunk is None else 0
    return Memory(activations=round(tokens * kept), logits=logits)


def _layer_bytes(config: JobConfig, layer: LayerSpec) -> float:
    train = config.train
    return activation_bytes_per_token(layer, config.model, dtype=train.dtype, sequence=train.sequence,
                                      tensor=config.mesh.tensor)


def _logit_bytes(config: JobConfig, tokens: int) -> int:
    """Of `tokens` tokens on the rank that holds the head."""
    return tokens * vocabulary_rows(config.model, config.mesh.tensor) * EXACT_BYTES[config.train.dtype]


def _passing_logits(config: JobConfig) -> int:
    """Bytes of the logits that live only within an op: one chunk (`train.loss_chunk`), or all of a recomputed head."""
    train, tokens = config.train, config.train.micro_batch * config.train.sequence
    if train.loss_chunk is not None:
        chunks = -(-tokens // train.loss_chunk)
        return _logit_bytes(config, -(-tokens // chunks))
    return _logit_bytes(config, tokens) if train.recompute == "full" else 0


def activation_memory(config: JobConfig, spec: ModelSpec, stages: Mapping[int, range], ops: Iterable[Op]) -> Memory:
    """Activations and logits of a rank when its program `ops` holds most of them. stages: its stages' layers.

    Full recompute adds one layer in full, which is computed again.
    """
    kept = cache(lambda stage, after: kept_memory(config, spec, stages[stage], after))
    held = held_at_peak(ops, lambda stage, after: kept(stage, after).total)
    memory = sum((kept(*what) * count for what, count in held.items()), Memory())
    if not held:
        return memory
    layers, tokens = [i for stage in stages.values() for i in stage], config.train.micro_batch * config.train.sequence
    if len(spec.layers) - 1 in layers:
        memory += Memory(logits=_passing_logits(config))
    if config.train.recompute == "full":
        memory += Memory(activations=round(tokens * max(_layer_bytes(config, spec.layers[i]) for i in layers)))
    return memory


def vocabulary_rows(model: ModelConfig, tensor: int) -> int:
    """Rows of the output projection on one tensor rank, padding included."""
    return -(-model.vocabulary // (tensor * model.vocabulary_multiple)) * model.vocabulary_multiple


def rank_memory(config: JobConfig, spec: ModelSpec, stages: Mapping[int, range], ops: Iterable[Op]) -> Memory:
    """Everything on a rank that holds `stages` (stage -> its layers) and runs `ops`."""
    held = spec.states_of(i for layers in stages.values() for i in layers)
    return sum((layer_state_memory(state, config) for state in held), activation_memory(config, spec, stages, ops))


def missing_memory(config: JobConfig, spec: ModelSpec, programs: Programs) -> Callable[[Stages], float] | None:
    """By split: bytes that pipeline ranks lack under placement.memory_per_rank_gib, over all ranks; 0: it fits. None: there
    is no limit."""
    limit, rank_of = config.placement.memory_per_rank_gib, programs.schedule.rank_of
    if limit is None:
        return None

    def missing(stages: Stages) -> float:
        own = [{stage: range(*layers) for stage, layers in enumerate(stages) if rank_of(stage) == rank}
               for rank in range(programs.schedule.num_ranks)]
        needed = [rank_memory(config, spec, held, ops).total for held, ops in zip(own, programs.ops, strict=True)]
        return sum(max(0.0, each - limit * 2**30) for each in needed)

    return missing
