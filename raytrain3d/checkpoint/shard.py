"""One shard file, in the safetensors format (https://github.com/huggingface/safetensors#format).

Writing streams one piece at a time, straight from its memory where it is contiguous on the host, and takes the
checksum on the way: at most one piece is copied, no second pass over the file, the interpreter lock released.
Reading goes through the library and touches only the wanted boxes.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from raytrain3d.checkpoint.layout import Piece
from raytrain3d.checkpoint.manifest import DTYPES, Entry, FileRecord
from raytrain3d.errors import CheckpointError
from raytrain3d.plan.params import Rectangle

CODES = {"float32": "F32", "bfloat16": "BF16", "float64": "F64", "float16": "F16"}
"""Names of types in the format, by torch's."""


def dtype_name(tensor: torch.Tensor) -> str:
    """`float32` and so on."""
    return str(tensor.dtype).removeprefix("torch.")


def write_file(path: str, name: str, pieces: Sequence[Piece]) -> tuple[FileRecord, tuple[Entry, ...]]:
    """Writes `pieces` to `path`, to be known as `name`. An OSError passes through."""
    # Wider elements first: with no gaps allowed in the format, this keeps every tensor aligned.
    ordered = sorted(pieces, key=lambda piece: -piece.tensor.element_size())
    entries = tuple(_entry(piece, name) for piece in ordered)
    digest = hashlib.sha256()
    size = 0
    with open(path, "wb") as file:
        for data in chain([memoryview(_header(entries))], (tensor_bytes(piece.tensor) for piece in ordered)):
            file.write(data)
            digest.update(data)
            size += len(data)
    return FileRecord(name=name, size=size, checksum=f"sha256:{digest.hexdigest()}"), entries


def _entry(piece: Piece, file: str) -> Entry:
    dtype = dtype_name(piece.tensor)
    if dtype not in DTYPES or tuple(piece.tensor.shape) != piece.rectangle.shape:
        raise ValueError(f"{piece.kind} of {piece.name}: {dtype} tensor of shape {tuple(piece.tensor.shape)} for "
                         f"{piece.rectangle}")
    key = f"{piece.name}/{piece.kind}@{','.join(map(str, piece.rectangle.offset))}"
    return Entry(name=piece.name, kind=piece.kind, rectangle=piece.rectangle, dtype=dtype, file=file, key=key)


def _header(entries: Sequence[Entry]) -> bytes:
    keys = [entry.key for entry in entries]
    if len(set(keys)) != len(keys):
        raise ValueError(f"two pieces begin at the same place: {next(key for key in keys if keys.count(key) > 1)}")
    return header((entry.key, entry.dtype, entry.rectangle.shape) for entry in entries)


def header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None = None) -> bytes:
    """What stands before the data of the tensors (key, dtype, shape), which follow one another in this order."""
    record: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for key, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * DTYPES[dtype]
        record[key] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(record).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Its elements in row order; a copy only where it is not contiguous on the host."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def verify_file(path: str, where: str, record: FileRecord) -> None:
    """Raises CheckpointError naming `where` unless size and checksum are the recorded ones."""
    size = os.path.getsize(path)
    if size != record.size:
        raise CheckpointError(f"{where} has {size} bytes, its manifest says {record.size}: it was cut or changed")
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    if f"sha256:{digest.hexdigest()}" != record.checksum:
        raise CheckpointError(f"{where} is damaged: its checksum is not the one in the manifest")


@torch.no_grad()
def copy_boxes(path: str, where: str, boxes: Sequence[tuple[Piece, Entry, Rectangle]]) -> None:
    """Copies each box from its entry in the file at `path` to its place in the piece's tensor."""
    try:
        with safe_open(path, framework="pt") as file:
            for piece, entry, box in boxes:
                stored = file.get_slice(entry.key)
                if stored.get_dtype() != CODES[entry.dtype] or tuple(stored.get_shape()) != entry.rectangle.shape:
                    raise CheckpointError(f"{where}: {entry.key} is not the {entry.dtype} box of shape "
                                          f"{entry.rectangle.shape} that the manifest says")
                piece.tensor[box.within(piece.rectangle)].copy_(stored[box.within(entry.rectangle)])
    except SafetensorError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
