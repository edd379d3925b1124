"""A checkpoint of ours to a directory in the Hugging Face layout, one tensor at a time.

The weights keep their type. A config.json that came with the model (or lies where the run started from) is kept while it
still describes it; else one is written for the architecture that has these parts.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from raytrain3d.checkpoint.huggingface_files import CARRIED, INDEX, SINGLE
from raytrain3d.checkpoint.manifest import DTYPES
from raytrain3d.checkpoint.reader import Reader
from raytrain3d.checkpoint.shard import header, tensor_bytes
from raytrain3d.checkpoint.storage import Folder, open_folder
from raytrain3d.config import ModelConfig
from raytrain3d.errors import CheckpointError
from raytrain3d.model.huggingface import HuggingFaceTensor, huggingface_tensors
from raytrain3d.model.huggingface_config import (ARCHITECTURES, CONFIG, decided, model_config, parse_settings, read_text,
                                                 settings_of)

SHARD_BYTES = 5 * 10**9
"""Most bytes of tensors in one file, unless a single tensor is larger."""


def export_huggingface(checkpoint: str | Folder, output: str, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Makes the directory `output` (absent or empty) from a checkpoint. Memory holds one tensor. CheckpointError when the
    checkpoint is not whole, or has parts that no supported architecture has."""
    with Reader(checkpoint) as reader:
        settings = _settings(reader)
        with _written(Path(output)) as directory:
            _write_weights(reader, directory, shard_bytes)
            (directory / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            _carry(reader, directory)


@contextmanager
def _written(output: Path) -> Iterator[Path]:
    """A directory that gets its name only when all is in it."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise CheckpointError(f"{output} already exists: name a new directory")
    target = output.absolute()
    partial = target.with_name(f".{target.name}.partial-{uuid4().hex[:8]}")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(target)
    except OSError as error:
        raise CheckpointError(f"{output} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_weights(reader: Reader, directory: Path, shard_bytes: int) -> None:
    tensors = huggingface_tensors(reader.model, reader.manifest.parameters)
    shards = _packed(reader, tensors, shard_bytes)
    if len(shards) == 1:
        _write_file(reader, directory / SINGLE, shards[0])
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(reader, directory / name, shard)
        index |= {tensor.name: name for tensor in shard}
    total = sum(_num_bytes(reader, tensor) for tensor in tensors)
    record = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / INDEX).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _packed(reader: Reader, tensors: Sequence[HuggingFaceTensor], limit: int) -> list[list[HuggingFaceTensor]]:
    """Tensors of each file, in order."""
    shards: list[list[HuggingFaceTensor]] = []
    size = limit
    for tensor in tensors:
        more = _num_bytes(reader, tensor)
        if size + more > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += more
    return shards


def _num_bytes(reader: Reader, tensor: HuggingFaceTensor) -> int:
    return torch.Size(tensor.shape).numel() * DTYPES[_dtype(reader, tensor)]


def _dtype(reader: Reader, tensor: HuggingFaceTensor) -> str:
    return reader.dtype(tensor.parts[0][0])


def _write_file(reader: Reader, path: Path, tensors: Sequence[HuggingFaceTensor]) -> None:
    # Wider elements first: with no gaps allowed in the format, this keeps every tensor aligned.
    ordered = sorted(tensors, key=lambda tensor: -DTYPES[_dtype(reader, tensor)])
    with path.open("wb") as file:
        file.write(header(((each.name, _dtype(reader, each), each.shape) for each in ordered), {"format": "pt"}))
        for tensor in ordered:
            file.write(tensor_bytes(_values(reader, tensor)))
        file.flush()
        os.fsync(file.fileno())


def _values(reader: Reader, tensor: HuggingFaceTensor) -> torch.Tensor:
    parts = [reader.weight(name) for name, _ in tensor.parts]
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    return whole.t() if tensor.transposed else whole


def _settings(reader: Reader) -> dict[str, Any]:
    model = reader.model
    settings = _carried_settings(reader, model)
    if settings is None:
        parameters = reader.manifest.parameters
        sequence = reader.manifest.config.get("train", {}).get("sequence", 2048)
        settings = settings_of(model, sequence=parameters.get("embedding.positions.weight", (sequence,))[0])
    dtypes = {reader.dtype(name) for name in reader.manifest.parameters}
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"
    return settings | {"architectures": [ARCHITECTURES[settings["model_type"]]],
                       key: max(dtypes, key=lambda dtype: DTYPES[dtype])}


def _carried_settings(reader: Reader, model: ModelConfig) -> dict[str, Any] | None:
    """The config.json that came with the model, if there is one and it still describes it."""
    for folder in _sources(reader):
        if CONFIG in folder.names():
            with folder.reading(CONFIG) as path:
                settings = parse_settings(read_text(path), f"{folder.path}/{CONFIG}")
            if decided(model_config(settings, f"{folder.path}/{CONFIG}")) == decided(model):
                return settings
    return None


def _sources(reader: Reader) -> list[Folder]:
    """Directories that may hold files to carry along."""
    origin = reader.manifest.config.get("model", {}).get("from_huggingface")
    return [reader.folder, *([] if origin is None else [open_folder(origin)])]


def _carry(reader: Reader, directory: Path) -> None:
    for folder in reversed(_sources(reader)):
        for name in sorted(set(CARRIED) & set(folder.names()) - {CONFIG}):
            with folder.reading(name) as path:
                shutil.copyfile(path, directory / name)
