"""The transformer as a row of layers: Embedding, Blocks, Head. Covers the Llama and GPT-2 families.

Modules know no parallelism. Where ranks may share a matrix they have seams that do nothing by themselves: `enter` (an
input that several column slices read), `reduce` (an output that is a partial sum), `first_row`, `first_head`,
`sequence_part`. `parallel/tensor.py` fills them from a table. Parameters are bound from outside too (`bind`): they are
views of a layer's flat buffer, so a module holds whatever slice it was given and sizes come from the weights.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain3d.config import ModelConfig
from raytrain3d.model.dropout import DropoutKeys, drop, drop_mask, dropout
from raytrain3d.model.functional import IDLE, Seam, again, embedding, linear, linears
from raytrain3d.model.loss import LossGradient, Reduction, Rows, cross_entropy, projected_cross_entropy, unchanged
from raytrain3d.model.norm import rms_norm
from raytrain3d.model.packing import Packing
from raytrain3d.model.rotary import Angles, RotaryTables, rotate


class Parameters(nn.Module):
    """A named place for parameters that are bound later."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)


class Linear(Parameters):
    """y = x W^T + b; the bias is added once, after a reduction over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce: Seam = IDLE

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, in) -> (batch, seq, out)."""
        return self.biased(linear(x, self.weight, reduce=self.reduce))

    def biased(self, y: Tensor) -> Tensor:
        """y: (batch, seq, out) -> the same shape."""
        return y if self.bias is None else y + self.bias


def entered(enter: Seam, x: Tensor, *parts: Linear) -> tuple[Tensor, ...]:
    """Several linears of one input. x: (batch, seq, in) -> (batch, seq, out) each."""
    outs = linears(x, [part.weight for part in parts], enter=enter)
    return tuple(part.biased(y) for part, y in zip(parts, outs, strict=True))


class Norm(Parameters):
    """RMSNorm (llama) or LayerNorm (gpt2) over the last dimension."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self._rms = model.family == "llama"
        self._epsilon = model.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., width) -> the same shape."""
        if self._rms:
            return rms_norm(x, self.weight, self._epsilon)
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self._epsilon)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, over the heads whose weights it was given."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        self.enter: Seam = IDLE
        self.first_head = 0
        self._model, self._layer = model, layer
        self.query, self.key, self.value, self.output = Linear(), Linear(), Linear(), Linear()
        if model.qk_norm:
            self.query_norm, self.key_norm = Norm(model), Norm(model)

    def forward(self, x: Tensor, keys: DropoutKeys | None, angles: Angles | None, mask: Tensor | None, *,
                recompute: bool = False) -> Tensor:
        """x: (batch, seq, hidden) -> (batch, seq, hidden). recompute: heads keep nothing and are computed again."""
        size = self._model.size_of_head
        query, key, value = (part.unflatten(-1, (-1, size))
                             for part in entered(self.enter, x, self.query, self.key, self.value))
        key, value = self._own_heads(key, query), self._own_heads(value, query)
        if self._model.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if angles is not None:
            query, key = rotate(query, *angles), rotate(key, *angles)
        inputs = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        attend = partial(self._attend, keys=keys if self._model.attention_dropout else None, mask=mask)
        heads = again(attend, *inputs) if recompute else attend(*inputs)
        return self.output(heads.transpose(1, 2).flatten(2))

    def _own_heads(self, kv: Tensor, query: Tensor) -> Tensor:
        """The key/value heads that the query heads here read, when all of them are held on every rank."""
        group = self._model.heads // self._model.num_kv_heads
        wanted = max(1, query.shape[2] // group)
        if kv.shape[2] == wanted:
            return kv
        first = self.first_head // group
        return kv[:, :, first : first + wanted]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, keys: DropoutKeys | None, mask: Tensor | None) -> Tensor:
        """query, key, value: (batch, heads, seq, size) -> (batch, heads, seq, size). mask: (batch, 1, seq, seq), added to
        scores; absent: what comes later is hidden."""
        grouped = query.shape[1] != key.shape[1]
        if keys is None and mask is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        if grouped:  # fused kernels take a mask, but on GPUs not together with groups
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        if keys is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        rate, sequence = self._model.attention_dropout, query.shape[2]
        scores = (query @ key.transpose(-1, -2)).mul_(self._model.size_of_head**-0.5)
        if mask is None:
            later = torch.ones(sequence, sequence, dtype=torch.bool, device=query.device).triu(diagonal=1)
            scores.masked_fill_(later, -torch.inf)
        else:
            scores += mask
        probabilities = scores.softmax(dim=-1)
        del scores  # in place and let go of: these are the largest matrices there are
        shape = (self._model.heads, sequence, sequence)
        heads = slice(self.first_head, self.first_head + query.shape[1])
        dropped = drop_mask(keys, self._layer, "attention", rate, shape, heads, query.device)
        return drop(probabilities, dropped, rate) @ value


class FeedForward(nn.Module):
    """SwiGLU (llama) or GELU in its tanh form (gpt2)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.enter: Seam = IDLE
        self._gated = model.family == "llama"
        if self._gated:
            self.gate = Linear()
        self.up, self.down = Linear(), Linear()

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, hidden) -> (batch, seq, hidden)."""
        if self._gated:
            gate, up = entered(self.enter, x, self.gate, self.up)
            return self.down(F.silu(gate) * up)
        (up,) = entered(self.enter, x, self.up)
        return self.down(F.gelu(up, approximate="tanh"))


class TokenTable(Parameters):
    """Vocabulary rows [first_row, first_row + rows) of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.first_row = 0
        self.reduce: Seam = IDLE

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, seq) int64 -> (batch, part of seq, hidden)."""
        rows = tokens - self.first_row
        elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        return embedding(rows.masked_fill(elsewhere, 0), self.weight, elsewhere, reduce=self.reduce)


class Layer(nn.Module):
    """What the pipeline moves data through. `index` is the layer's place in the model.

    Of the residual stream it has the `sequence_part`-th of equal `sequence_parts` of every sequence, called seq.
    """

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.model = model
        self.sequence_part, self.sequence_parts = 0, 1
        self.recompute_attention = False

    def dropout(self, x: Tensor, keys: DropoutKeys | None, site: str) -> Tensor:
        """x: (batch, seq, hidden) -> the same shape."""
        return dropout(x, keys, self.index, site, self.model.dropout, part=self.sequence_part, parts=self.sequence_parts)

    def bind(self, parameters: Mapping[str, Tensor]) -> None:
        """Point parameters (`attention.query.weight`, ...) at the given tensors."""
        for name, tensor in parameters.items():
            path, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(path), leaf, tensor)


class Embedding(Layer):
    """Token ids to the residual stream."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__(model, index)
        self.tokens = TokenTable()
        if model.family == "gpt2":
            self.positions = Parameters()

    def forward(self, tokens: Tensor, keys: DropoutKeys | None, packing: Packing | None = None) -> Tensor:
        """tokens: (batch, whole seq) int64 -> (batch, seq, hidden)."""
        x = self.tokens(tokens)
        if self.model.family == "gpt2":
            first, length = self.sequence_part * x.shape[1], x.shape[1]
            own = slice(first, first + length)
            x = x + self.positions.weight[own if packing is None else packing.positions[:, own]]
        return self.dropout(x, keys, "embedding")


class Block(Layer):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, model: ModelConfig, index: int, rotary: RotaryTables | None) -> None:
        super().__init__(model, index)
        self.attention_norm, self.mlp_norm = Norm(model), Norm(model)
        self.attention = Attention(model, index)
        self.mlp = FeedForward(model)
        self._rotary = rotary
        self.compute: BlockCompute = block_compute
        """What `forward` does with its tensors: itself, or compiled for all blocks at once."""

    def forward(self, x: Tensor, keys: DropoutKeys | None, packing: Packing | None = None) -> Tensor:
        """x: (batch, seq, hidden) -> (batch, seq, hidden)."""
        drops = self.model.dropout or self.model.attention_dropout
        angles, mask = self._angles(x, packing), None if packing is None else packing.mask
        return self.compute(self, x, keys if drops else None, angles, mask)

    def _angles(self, x: Tensor, packing: Packing | None) -> Angles | None:
        if self._rotary is None:
            return None
        length = x.shape[1] * self.sequence_parts
        return self._rotary(length, x.dtype, x.device, None if packing is None else packing.positions)


def block_compute(block: Block, x: Tensor, keys: DropoutKeys | None, angles: Angles | None, mask: Tensor | None) -> Tensor:
    """x: (batch, seq, hidden) -> (batch, seq, hidden). keys: absent where nothing is dropped."""
    attention = block.attention(block.attention_norm(x), keys, angles, mask, recompute=block.recompute_attention)
    x = x + block.dropout(attention, keys, "attention_output")
    return x + block.dropout(block.mlp(block.mlp_norm(x)), keys, "mlp_output")


BlockCompute = Callable[[Block, Tensor, DropoutKeys | None, Angles | None, Tensor | None], Tensor]
"""As `block_compute`."""


class Head(Layer):
    """Final norm, output projection and loss."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__(model, index)
        self.norm = Norm(model)
        self.enter: Seam = IDLE
        self.output = Linear()
        self.first_row = 0
        self.maximum: Reduction = unchanged
        self.total: Reduction = unchanged
        self.loss_chunk: int | None = None
        """Tokens whose logits exist at a time in `forward` (`train.loss_chunk`); None: those of all."""
        self.loss_gradient: LossGradient | None = None
        """Loss and gradient of logits as one compiled function, for a head that holds all rows of the vocabulary."""

    def logits(self, x: Tensor) -> Tensor:
        """x: (batch, seq, hidden) -> (batch, whole seq, rows held here)."""
        return entered(self.enter, self.norm(x), self.output)[0]

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """x: (batch, seq, hidden), targets: (batch, whole seq) -> sum of losses, a scalar."""
        rows = Rows(first=self.first_row, vocabulary=self.model.vocabulary, maximum=self.maximum, total=self.total)
        if self.loss_chunk is None:
            return cross_entropy(self.logits(x).flatten(0, 1), targets.flatten(), rows)
        x = self.enter(self.norm(x)).flatten(0, 1)
        weight = self.output.weight
        is_whole = self.first_row == 0 and len(weight) >= self.model.vocabulary
        return projected_cross_entropy(x, weight, targets.flatten(), rows, chunk=self.loss_chunk,
                                       compiled=self.loss_gradient if is_whole else None)


def build_layers(model: ModelConfig, layers: Iterable[int]) -> dict[int, Layer]:
    """Modules of the given layers, without parameters."""
    rotary = RotaryTables(model) if model.family == "llama" else None
    last = model.blocks + 1

    def build(index: int) -> Layer:
        if index == 0:
            return Embedding(model, index)
        return Head(model, index) if index == last else Block(model, index, rotary)

    return {index: build(index) for index in layers}
