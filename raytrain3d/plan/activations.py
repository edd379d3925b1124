"""Bytes of activations and logits on a rank, and what of them is in host memory.

Activations are what autograd keeps for the backward, by the counting of https://arxiv.org/abs/2205.05198 section 4 applied
to each family's own shapes, under these assumptions: a matrix product keeps its input; a norm its input; attention is fused
and keeps query, key, value and output (with attention dropout it runs unfused and keeps the probabilities before and after
dropout and the mask); a dropout mask is one byte an element; elementwise functions keep their inputs. Within a backward the
gradients inside one layer come on top. Not counted: communication buffers, temporaries of a forward, fragmentation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from raytrain3d.config import JobConfig, ModelConfig, Recompute
from raytrain3d.plan.params import LayerSpec, ModelSpec
from raytrain3d.plan.recompute import recompute_kind
from raytrain3d.plan.schedule import Kind, Op
from raytrain3d.plan.simulate import held_at_peak
from raytrain3d.plan.state_memory import ELEMENT_BYTES, EXACT_BYTES, Memory


def activation_bytes_per_token(layer: LayerSpec, model: ModelConfig, *, dtype: str, sequence: int, tensor: int,
                               sequence_parallel: bool = False, recompute: Recompute = "none") -> float:
    """What one layer keeps of one token until its backward, on one rank, without logits.

    A gpt2 block in 16 bit with both dropouts keeps h (10 + 24 / t + 5 a s / (h t)) bytes, h / t (34 + 5 a s / h) with
    sequence parallelism, which gathers the inputs of column slices again in the backward. Selective recompute drops the
    quadratic term, full recompute keeps the input: 2 h, or 2 h / t.
    """
    element, hidden = ELEMENT_BYTES[dtype], model.hidden / (tensor if sequence_parallel else 1)
    mask = hidden if model.dropout else 0
    match layer.kind:
        case "embedding":
            return 9 + mask  # an int64 id and whether the row is held elsewhere
        case "head":
            return 2 * hidden * element  # input and output of the norm; in chunks the output's gradient in its place
    if recompute == "full":
        return hidden * element
    query, key, inner = _widths(layer, tensor)
    split = 2 * query + 2 * key + inner * (4 if model.family == "llama" else 2) + (query + key if model.qk_norm else 0)
    return (4 * hidden + split) * element + 2 * mask + (_attention(model, element, sequence, tensor)
                                                        if recompute == "none" else 0)


def _widths(block: LayerSpec, tensor: int) -> tuple[int, int, int]:
    """Of query, key and inner feed-forward activations on one rank."""
    rows = {param.name: param.local_shape(tensor)[0] for param in block.params}
    return rows["attention.query.weight"], rows["attention.key.weight"], rows["mlp.up.weight"]


def _attention(model: ModelConfig, element: int, sequence: int, tensor: int) -> float:
    """Of one token inside unfused attention: probabilities before and after dropout, and its mask."""
    return (2 * element + 1) * sequence * model.heads / tensor if model.attention_dropout else 0


def product_bytes_per_token(layer: LayerSpec, model: ModelConfig, *, dtype: str, tensor: int,
                            sequence_parallel: bool = False) -> float:
    """What the weight gradients of one layer wait for after a split backward: input and output gradient of every matrix
    product, of one token on one rank, without logits. A frozen layer waits for nothing."""
    hidden = model.hidden / (tensor if sequence_parallel else 1)
    if layer.frozen or layer.kind == "embedding":
        return 0
    if layer.kind == "head":
        return hidden * ELEMENT_BYTES[dtype]
    query, key, inner = _widths(layer, tensor)
    products = 4 * hidden + 2 * query + 2 * key + inner * (3 if model.family == "llama" else 2)
    return products * ELEMENT_BYTES[dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What a job's micro-batches keep on one rank. Sizes in bytes of one micro-batch."""

    config: JobConfig
    spec: ModelSpec
    stages: Mapping[int, range]
    """The rank's stages and their layers."""

    def kept(self, stage: int, after: Kind) -> Memory:
        """What `stage` holds after F for its backward, or after I for its W."""
        layers = [self.spec.layers[i] for i in self.stages[stage]]
        is_last = layers[-1].kind == "head"
        forward = after is Kind.FORWARD
        kept = sum((self._kept(layer, stage) for layer in layers) if forward else map(self._product, layers))
        if not forward:  # received messages are let go after W; a gradient may be part of a product
            arrived = (layers[0].kind != "embedding") + (not is_last and self.config.model.dropout > 0)
            kept += arrived * self._carried
        elif not is_last and self._kind(layers[-1], stage) != "full":
            kept += self._carried  # the last layer's output is kept with its graph
        whole = self.config.train.loss_chunk is None
        masks = self._mask_bytes if forward and any(self._keeps_mask(layer, stage) for layer in layers) else 0
        return Memory(activations=round(self._tokens * kept) + masks,
                      logits=self._logits(self._tokens) if is_last and whole else 0,
                      host=round(self._tokens * sum(self._on_host(layer, stage) for layer in layers)) if forward else 0)

    def passing(self, op: Op) -> Memory:
        """What lives only within an op, most at a time.

        Within a backward: of the layer at work what is computed again and the gradients inside; of those before it what is
        kept; of those behind it, in I, what waits for W; less what `kept` counts. Within a forward that ends in a loss: the
        logits of one chunk, or the product that whole ones are copied from, beside what is kept by then.
        """
        if op.kind is Kind.FORWARD and self.stages[op.stage][-1] == len(self.spec.layers) - 1:
            return self.kept(op.stage, Kind.FORWARD) + Memory(logits=self._logits_at_work())
        layers = [self.spec.layers[i] for i in self.stages[op.stage]]
        blocks = [layer for layer in layers if layer.kind == "block"]
        masks = self._mask_bytes if blocks and not any(self._keeps_mask(layer, op.stage) for layer in blocks) else 0
        if op.kind not in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            return Memory(activations=masks if op.kind is Kind.FORWARD else 0)
        split, now, most = op.kind is Kind.BACKWARD_INPUT, 0.0, 0.0
        for layer in reversed(layers):
            kept = self._kept(layer, op.stage)
            most = max(most, now - kept + self._at_work(layer, op.stage, split=split))
            now += (self._product(layer) if split else 0) - kept
        return Memory(activations=round(self._tokens * most) + masks)

    @property
    def _mask_bytes(self) -> int:
        """Of one micro-batch whose documents are told apart (data.mask_documents): the mask that a stage's layers share."""
        train = self.config.train
        masked = self.config.data.mask_documents
        return train.micro_batch * train.sequence**2 * ELEMENT_BYTES[train.dtype] if masked else 0

    def _keeps_mask(self, layer: LayerSpec, stage: int) -> bool:
        """Until the backward; a block that runs again makes it again."""
        return layer.kind == "block" and self._kind(layer, stage) != "full"

    @property
    def _tokens(self) -> int:
        return self.config.train.micro_batch * self.config.train.sequence

    @property
    def _carried(self) -> float:
        """Of a token in the residual stream."""
        config = self.config
        return config.model.hidden * ELEMENT_BYTES[config.train.dtype] * config.residual_sequence / config.train.sequence

    def _logits(self, tokens: int) -> int:
        """Bytes on the rank that holds the head."""
        config = self.config
        return tokens * vocabulary_rows(config.model, config.mesh.tensor) * EXACT_BYTES[config.train.dtype]

    def _logits_at_work(self) -> int:
        """Bytes of logits beside those that are kept, while the loss is made. bf16 ones are cast to FP32 and their gradients
        back."""
        train, element = self.config.train, ELEMENT_BYTES[self.config.train.dtype]
        if train.loss_chunk is None:
            return self._logits(self._tokens) * element // EXACT_BYTES[train.dtype]
        logits = self._logits(-(-self._tokens // -(-self._tokens // train.loss_chunk)))
        return logits + (logits * element // EXACT_BYTES[train.dtype] if element != EXACT_BYTES[train.dtype] else 0)

    def _kept(self, layer: LayerSpec, stage: int) -> float:
        """Of one token after F, on the device."""
        return self._layer(layer, self._kind(layer, stage)) - self._on_host(layer, stage)

    def _on_host(self, layer: LayerSpec, stage: int) -> float:
        """Of one token after F, under offload: all but the layer's input."""
        return self.on_host(layer, self._kind(layer, stage)) if self.config.train.offload_activations else 0.0

    def on_host(self, layer: LayerSpec, recompute: Recompute) -> float:
        """Of one token: what goes to the host and comes back, where activations do."""
        return max(0.0, self._layer(layer, recompute) - (8 if layer.kind == "embedding" else self._carried))

    def _kind(self, layer: LayerSpec, stage: int) -> Recompute:
        return recompute_kind(self.config, layer, stage)

    def _layer(self, layer: LayerSpec, recompute: Recompute) -> float:
        train = self.config.train
        kept = activation_bytes_per_token(layer, self.config.model, dtype=train.dtype, sequence=train.sequence,
                                          tensor=self.config.mesh.tensor, sequence_parallel=train.sequence_parallel,
                                          recompute=recompute)
        if layer.kind == "block" and self.config.data.mask_documents and recompute != "full":
            query, key, _ = _widths(layer, self.config.mesh.tensor)  # under a mask each head gets its own key and value
            kept += 2 * (query - key) * ELEMENT_BYTES[train.dtype]
        if layer.kind == "head" and train.loss_chunk is not None:  # the gradient of what the norm put out is that of all
            kept += self.config.model.hidden * ELEMENT_BYTES[train.dtype] - self._carried
        return kept

    def _at_work(self, layer: LayerSpec, stage: int, *, split: bool) -> float:
        """Of one token of a layer in the middle of its backward, most at a time.

        A block goes back through its feed-forward part, where gradients of inner activations begin to exist before those
        are freed, then through attention, where unfused heads have one more matrix. In I products of the former wait.
        """
        config, kind = self.config, self._kind(layer, stage)
        gradient = self._carried * (2 if config.model.dropout else 1)
        kept = self._layer(layer, "selective" if kind == "selective" else "none") + (self._carried if kind == "full" else 0)
        if layer.kind == "head" and config.train.loss_chunk is None:  # logits are saved; their gradient is made, and cast
            exact, element = EXACT_BYTES[config.train.dtype], ELEMENT_BYTES[config.train.dtype]
            rows = vocabulary_rows(config.model, config.mesh.tensor)
            return kept + gradient + rows * (exact + (element if element != exact else 0))
        if layer.kind != "block":
            return kept + gradient
        element, llama = ELEMENT_BYTES[config.train.dtype], config.model.family == "llama"
        query, key, inner = (width * element for width in _widths(layer, config.mesh.tensor))
        feed_forward = 2 * self._carried + inner * (4 if llama else 2)
        waiting = split * (2 * self._carried + inner * (3 if llama else 2))
        core = _attention(config.model, element, config.train.sequence, config.mesh.tensor)
        matrix = core * element / (2 * element + 1)
        heads = 2 * query + 2 * key + matrix + (core + query if kind == "selective" else 0)
        return kept + gradient + max(inner * (2 if llama else 1), heads - feed_forward + waiting)

    def _product(self, layer: LayerSpec) -> float:
        train = self.config.train
        if layer.kind == "head" and train.loss_chunk is not None:
            return 0.0  # its weight gradient was made in the forward
        return product_bytes_per_token(layer, self.config.model, dtype=train.dtype, tensor=self.config.mesh.tensor,
                                       sequence_parallel=train.sequence_parallel)


def activation_memory(config: JobConfig, spec: ModelSpec, stages: Mapping[int, range], ops: Iterable[Op]) -> Memory:
    """Activations and logits of a rank when its program `ops` holds most of them. stages: its stages' layers."""
    activations = Activations(config=config, spec=spec, stages=stages)
    kept, passing = cache(activations.kept), cache(lambda kind, stage: activations.passing(Op(kind, stage, 0)))
    held, during = held_at_peak(ops, lambda stage, after: kept(stage, after).total,
                                lambda op: passing(op.kind, op.stage).total)
    memory = sum((kept(*what) * count for what, count in held.items()), Memory())
    return memory if during is None else memory + passing(during.kind, during.stage)


def vocabulary_rows(model: ModelConfig, tensor: int) -> int:
    """Rows of the output projection on one tensor rank, padding included."""
    return -(-model.vocabulary // (tensor * model.vocabulary_multiple)) * model.vocabulary_multiple
