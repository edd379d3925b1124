"""The files of a directory in the Hugging Face layout: config.json, an index perhaps, and safetensors files.

Headers are read first, tensors by parts. An index cannot lead out of the directory, and pickle files are not read at all.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from raytrain3d.checkpoint.shard import CODES
from raytrain3d.errors import CheckpointError
from raytrain3d.model.huggingface_config import CONFIG, parse_settings, read_text

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CARRIED = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
           "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")
"""Files that go along with the weights."""
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_PICKLES = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where a tensor is stored."""

    path: str
    key: str
    """Its name inside the file."""
    dtype: str
    """By torch's name."""
    shape: tuple[int, ...]

    def read(self, box: tuple[slice, ...]) -> torch.Tensor:
        """A part of it: a view of the file, which is opened anew each time, so that memory holds only what is in use."""
        with _opened(self.path) as file:
            values: torch.Tensor = file.get_slice(self.key)[box]
            return values


def stored_tensors(directory: str) -> Iterator[StoredTensor]:
    """Every tensor of every weight file; what the index says of them has been checked."""
    names = os.listdir(directory)
    if SINGLE in names:
        yield from _tensors_of(os.path.join(directory, SINGLE))
        return
    if INDEX not in names:
        pickles = sorted(name for name in names if _PICKLES.fullmatch(name))
        raise CheckpointError(
            f"{directory} holds {pickles[0]}, a pickle: reading it could run code, so it is refused; save the model as "
            "safetensors" if pickles else f"{directory} holds neither {SINGLE} nor {INDEX}")
    index = _read_index(os.path.join(directory, INDEX))
    for file in dict.fromkeys(index.values()):
        found = list(_tensors_of(os.path.join(directory, file)))
        expected = {name for name, place in index.items() if place == file}
        if missing := sorted(expected - {each.key for each in found}):
            raise CheckpointError(f"{os.path.join(directory, file)}: the tensor {missing[0]} is missing, {INDEX} says that "
                                  "it is there")
        yield from found


def _read_index(path: str) -> dict[str, str]:
    """Tensor name -> file in the same directory."""
    index = parse_settings(read_text(path), path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{path} has no weight_map")
    for name, file in index.items():
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise CheckpointError(f"{path}: {name} is in {file!r}: only names of safetensors files in the same directory "
                                  "are valid")
    return index


def _tensors_of(path: str) -> Iterator[StoredTensor]:
    names = {code: name for name, code in CODES.items()}
    with _opened(path) as file:
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            found = file.get_slice(key)
            if found.get_dtype() not in names:
                raise CheckpointError(f"{path}: {key} has type {found.get_dtype()}, supported are {', '.join(names)}")
            yield StoredTensor(path=path, key=key, dtype=names[found.get_dtype()], shape=tuple(found.get_shape()))


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
