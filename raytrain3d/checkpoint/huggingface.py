"""A model in the layout of Hugging Face, as parameters of ours: any rectangle of any parameter, and nothing else is read.

Opening reads headers only and checks every name, type and shape.
"""

import os
from itertools import pairwise

import torch

from raytrain3d.checkpoint.huggingface_files import stored_tensors
from raytrain3d.config import ModelConfig, TrainConfig
from raytrain3d.errors import CheckpointError
from raytrain3d.model.huggingface import HEAD, canonical_name, huggingface_tensors, is_left_out, num_blocks
from raytrain3d.model.huggingface_config import CONFIG, model_config, read_settings
from raytrain3d.plan.params import Rectangle, model_spec

_COMPARED_ROWS = 4096


class HuggingFaceWeights:
    """The model in a directory. CheckpointError naming file and tensor where something is missing, wrong or not
    supported."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.settings = read_settings(directory)
        self.model = model_config(self.settings, os.path.join(directory, CONFIG))
        self._stored = {canonical_name(self.model.family, each.key): each for each in stored_tensors(directory)}
        self._check_blocks()
        self.parameters = parameter_shapes(self.model)
        self._tensors = {tensor.name: tensor for tensor in huggingface_tensors(self.model, self.parameters)}
        self._place = {name: tensor for tensor in self._tensors.values() for name, _ in tensor.parts}
        self._check_tensors()
        self._check_tied_head()

    def read(self, name: str, part: Rectangle) -> torch.Tensor:
        """Values of a rectangle of the parameter with this global name, in the type they are stored in; a view of the
        file where it can be. Shape: part.shape."""
        tensor = self._place[name]
        stored = self._stored[tensor.name]
        if part.size == 0:
            return torch.empty(part.shape, dtype=getattr(torch, stored.dtype))
        offset = (part.offset[0] + tensor.first_row(name), *part.offset[1:])
        box = tuple(slice(start, start + n) for start, n in zip(offset, part.shape, strict=True))
        values = stored.read(box[::-1] if tensor.transposed else box)
        return values.t() if tensor.transposed else values

    def _check_blocks(self) -> None:
        found = num_blocks(self.model.family, self._stored)
        if found != self.model.blocks:
            raise CheckpointError(f"{self.directory}: {CONFIG} says that there are {self.model.blocks} blocks, the weights "
                                  f"are of {found}")

    def _check_tensors(self) -> None:
        for tensor in self._tensors.values():
            stored = self._stored.get(tensor.name)
            if stored is None:
                raise CheckpointError(f"{self.directory}: the tensor {tensor.name} is missing")
            if stored.shape != tensor.shape:
                raise CheckpointError(f"{stored.path}: {stored.key} has shape {stored.shape}, by {CONFIG} it must have "
                                      f"{tensor.shape}")
        for name, stored in self._stored.items():
            if name not in self._tensors and not is_left_out(self.model, name):
                raise CheckpointError(f"{stored.path}: {stored.key} is no tensor of a {self.settings['model_type']} model")

    def _check_tied_head(self) -> None:
        """A tied model may hold its head a second time, but no other head."""
        head = self._stored.get(HEAD) if self.model.tied_embeddings else None
        if head is None:
            return
        table = self._stored[self._place["tied.tokens.weight"].name]
        starts = [*range(0, self.model.vocabulary, _COMPARED_ROWS), self.model.vocabulary]
        same = head.shape == table.shape and all(
            torch.equal(head.read((slice(*rows),)), table.read((slice(*rows),))) for rows in pairwise(starts))
        if not same:
            raise CheckpointError(f"{head.path}: {HEAD} differs from the embedding, though tie_word_embeddings is true")


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global, unpadded shape of every parameter of a model that names all its sizes, by global name."""
    spec = model_spec(model, TrainConfig(steps=1, global_batch=1, sequence=1), tensor=1)
    return {f"{state.name}.{param.name}": param.shape for state in spec.states for param in state.params}
