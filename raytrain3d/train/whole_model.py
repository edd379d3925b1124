"""The model of a checkpoint in one process, without what training needs: only its weights and its layers."""

import torch
from torch import Tensor, nn

from raytrain3d.checkpoint.reader import Reader
from raytrain3d.data.micro_batch import MicroBatch
from raytrain3d.model.packing import packing
from raytrain3d.model.transformer import Embedding, Head, build_layers


class WholeModel:
    """All layers, for forwards alone."""

    def __init__(self, reader: Reader, *, dtype: torch.dtype, device: torch.device,
                 loss_chunk: int | None = None) -> None:
        """Weights of the checkpoint, cast to `dtype` for computing. loss_chunk: as in `train.loss_chunk`."""
        self.config, self.device, self.dtype = reader.model, device, dtype
        table = reader.manifest.parameters.get("embedding.positions.weight")
        self.positions = None if table is None else table[0]
        """Most tokens of a sample, where positions are learned."""
        layers = build_layers(self.config, range(self.config.blocks + 2))
        embedding, head = layers[0], layers[self.config.blocks + 1]
        assert isinstance(embedding, Embedding)
        assert isinstance(head, Head)
        head.loss_chunk = loss_chunk
        self._embedding, self._head = embedding, head
        self._blocks = [layers[index] for index in range(1, self.config.blocks + 1)]
        for name in reader.manifest.parameters:
            self._bind(name, nn.Parameter(reader.weight(name).to(device, dtype), requires_grad=False))

    @torch.no_grad()
    def hidden(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """tokens: (batch, seq) -> (batch, seq, hidden), before the final norm. starts: as in MicroBatch."""
        documents = None if starts is None else packing(starts.to(self.device), self.dtype)
        x = self._embedding(tokens.to(self.device), None, documents)
        for block in self._blocks:
            x = block(x, None, documents)
        hidden: Tensor = x
        return hidden

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, seq) -> (batch, seq, vocabulary)."""
        return self._head.logits(self.hidden(tokens))

    @torch.no_grad()
    def next_logits(self, tokens: Tensor) -> Tensor:
        """tokens: (seq,) -> (vocabulary,) for the token after the last one."""
        return self._head.logits(self.hidden(tokens[None])[:, -1:])[0, 0]

    @torch.no_grad()
    def loss(self, batch: MicroBatch) -> Tensor:
        """Sum of losses in nats, a scalar."""
        loss: Tensor = self._head(self.hidden(batch.tokens, batch.starts), batch.targets.to(self.device))
        return loss

    def _bind(self, name: str, weight: nn.Parameter) -> None:
        layer, _, rest = name.partition(".")
        match layer:
            case "blocks":
                number, _, rest = rest.partition(".")
                self._blocks[int(number)].bind({rest: weight})
            case "tied":
                self._embedding.bind({rest: weight})
                self._head.bind({"output.weight": weight})
            case "embedding":
                self._embedding.bind({rest: weight})
            case _:
                self._head.bind({rest: weight})
