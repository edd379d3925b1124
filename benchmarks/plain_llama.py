"""The model as a user of torch alone would write it: nn.Linear, nn.RMSNorm, autograd's own gradients, no seams.

Submodules are named as the parameters of ours, so that both start from the same weights.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain3d.config import JobConfig, ModelConfig
from raytrain3d.model.init import initial_values
from raytrain3d.plan.params import Rectangle, model_spec


class Attention(nn.Module):
    """Causal, with rotary positions. Heads are counted from what the projections give, so column slices work."""

    def __init__(self, model: ModelConfig, sequence: int) -> None:
        super().__init__()
        self.size, self.grouped = model.size_of_head, model.num_kv_heads < model.heads
        width, kv_width = model.heads * self.size, model.num_kv_heads * self.size
        self.query = nn.Linear(model.hidden, width, bias=False)
        self.key, self.value = (nn.Linear(model.hidden, kv_width, bias=False) for _ in range(2))
        self.output = nn.Linear(width, model.hidden, bias=False)
        frequencies = model.rotary_theta ** (-torch.arange(0, self.size, 2).float() / self.size)
        angles = torch.outer(torch.arange(sequence).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, hidden) -> (batch, seq, hidden)."""
        query, key, value = (part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
                             for part in (self.query, self.key, self.value))
        heads = F.scaled_dot_product_attention(self._rotate(query), self._rotate(key), value, is_causal=True,
                                               enable_gqa=self.grouped)
        return self.output(heads.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * self.cos.to(x.dtype) + torch.cat((-right, left), dim=-1) * self.sin.to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(model.hidden, model.feed_forward, bias=False) for _ in range(2))
        self.down = nn.Linear(model.feed_forward, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, model: ModelConfig, sequence: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden, model.norm_epsilon)
        self.mlp_norm = nn.RMSNorm(model.hidden, model.norm_epsilon)
        self.attention, self.mlp = Attention(model, sequence), FeedForward(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)


class Head(nn.Module):
    """Without the loss."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(model.hidden, model.norm_epsilon)
        self.output = nn.Linear(model.hidden, model.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class PlainStage(nn.Module):
    """Some layers of the model of `config`, with the initial weights that ours has unless it shall not be filled."""

    def __init__(self, config: JobConfig, layers: Iterable[int], dtype: torch.dtype = torch.float32, *,
                 filled: bool = True) -> None:
        super().__init__()
        last = config.model.blocks + 1

        def build(index: int) -> nn.Module:
            if index == 0:
                return Embedding(config.model)
            return Head(config.model) if index == last else Block(config.model, config.train.sequence)

        self.layers = nn.ModuleDict({str(index): build(index) for index in layers})
        if filled:
            self._fill(config)
        self.to(dtype)

    @torch.no_grad()
    def _fill(self, config: JobConfig) -> None:
        spec = model_spec(config.model, config.train, 1)
        for index, layer in self.layers.items():
            for param in spec.layers[int(index)].params:
                whole = Rectangle(offset=(0,) * len(param.shape), shape=param.shape)
                name = f"{spec.layers[int(index)].name}.{param.name}"
                layer.get_parameter(param.name).copy_(initial_values(config.model, config.train.seed, name, param, whole))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, seq) or activations (batch, seq, hidden) to activations or logits."""
        for layer in self.layers.values():
            x = layer(x)
        return x
