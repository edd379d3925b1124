"""One shard file, in the safetensors format (https://github.com/huggingface/safetensors#format).

Both ways stream. Writing takes one piece at a time, straight from its memory where it is contiguous on the host, and its
checksum on the way. Reading takes a box a block at a time and touches only boxes that are wanted. Whatever is large
(writing, reading, checksums) happens with the interpreter lock released.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedWriter
from typing import Any

import torch

from raytrain3d.checkpoint.layout import Piece
from raytrain3d.checkpoint.manifest import DTYPES, Entry, FileRecord, checksum
from raytrain3d.checkpoint.storage import OpenFile
from raytrain3d.errors import CheckpointError
from raytrain3d.plan.params import Rectangle

CODES = {"float32": "F32", "bfloat16": "BF16", "float64": "F64", "float16": "F16"}
"""Names of types in the format, by torch's."""
BLOCK_BYTES = 1 << 20
"""How much of a box is read, verified and copied at once, unless a single row is larger: it stays in the cache."""
WRITTEN_BYTES = 1 << 23
"""How much is written at once."""
PASSED_ON_BYTES = 1 << 25
"""How much is written before the system is told to bring it to the disk."""
_LENGTH_BYTES = 8


def dtype_name(tensor: torch.Tensor) -> str:
    """`float32` and so on."""
    return str(tensor.dtype).removeprefix("torch.")


def write_file(path: str, name: str, pieces: Sequence[Piece],
               before_block: Callable[[], None] = lambda: None) -> tuple[FileRecord, tuple[Entry, ...]]:
    """Writes `pieces` to `path`, to be known as `name`. An OSError passes through, and so does what `before_block` raises.
    """
    # Wider elements first: with no gaps allowed in the format, this keeps every tensor aligned.
    ordered = sorted(pieces, key=lambda piece: -piece.tensor.element_size())
    head = _header(ordered)
    entries, passed_on = [], 0
    with open(path, "wb") as file:
        file.write(head)
        for piece in ordered:
            start = file.tell()
            found = _write(file, tensor_bytes(piece.tensor), before_block)
            entries.append(Entry(name=piece.name, kind=piece.kind, rectangle=piece.rectangle,
                                 dtype=dtype_name(piece.tensor), file=name, start=start, checksum=found))
            if file.tell() - passed_on >= PASSED_ON_BYTES:
                _pass_on(file, passed_on)
                passed_on = file.tell()
        size = file.tell()
    return FileRecord(name=name, size=size, header_checksum=checksum(head)), tuple(entries)


def _write(file: BufferedWriter, data: memoryview, before_block: Callable[[], None]) -> str:
    """Its checksum."""
    found = checksum(b"")
    for first in range(0, len(data), WRITTEN_BYTES):
        before_block()
        block = data[first : first + WRITTEN_BYTES]
        found = checksum(block, found)
        file.write(block)
    return found


def _pass_on(file: BufferedWriter, start: int) -> None:
    """What was written from `start` on goes to the disk now, in this thread and at its priority, and leaves the page cache,
    where it would push out what training reads. Where the system cannot be told so, it decides itself."""
    if sys.platform == "linux":
        os.posix_fadvise(file.fileno(), start, file.tell() - start, os.POSIX_FADV_DONTNEED)


def _header(pieces: Sequence[Piece]) -> bytes:
    keys = [_key(piece) for piece in pieces]
    if len(set(keys)) != len(keys):
        raise ValueError(f"two pieces begin at the same place: {next(key for key in keys if keys.count(key) > 1)}")
    return header((key, dtype_name(piece.tensor), piece.rectangle.shape) for key, piece in zip(keys, pieces, strict=True))


def _key(piece: Piece) -> str:
    dtype, shape = dtype_name(piece.tensor), tuple(piece.tensor.shape)
    if dtype not in DTYPES or shape != piece.rectangle.shape:
        raise ValueError(f"{piece.kind} of {piece.name}: {dtype} tensor of shape {shape} for {piece.rectangle}")
    return f"{piece.name}/{piece.kind}@{','.join(map(str, piece.rectangle.offset))}"


def header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None = None) -> bytes:
    """What stands before the data of the tensors (key, dtype, shape), which follow one another in this order."""
    record: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for key, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * DTYPES[dtype]
        record[key] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(record).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Its elements in row order; a copy only where it is not contiguous on the host."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


class ShardReader:
    """Boxes of one open file, each verified while it is read. Errors name `where`, the file as people know it."""

    def __init__(self, file: OpenFile, where: str, record: FileRecord) -> None:
        """Raises CheckpointError unless the file has the recorded size and header."""
        self._file, self._where = file, where
        size = file.seek(0, 2)
        if size != record.size:
            raise CheckpointError(f"{where} has {size} bytes, its manifest says {record.size}: it was cut or changed")
        if checksum(self._header(size)) != record.header_checksum:
            self._damaged("its header's checksum")

    def copy(self, entry: Entry, boxes: Sequence[tuple[Piece, Rectangle]]) -> None:
        """Copies boxes inside `entry` to their places in the pieces' tensors. Raises CheckpointError when the entry is
        damaged; tensors may then hold parts of it."""
        with torch.no_grad():
            for rows, block in self._blocks(entry):
                for piece, box in boxes:
                    part = box.intersect(rows)
                    if part is not None:
                        piece.tensor[part.within(piece.rectangle)].copy_(block[part.within(rows)])

    def verify(self, entry: Entry) -> None:
        """Raises CheckpointError when the entry is damaged."""
        self.copy(entry, ())

    def _header(self, size: int) -> memoryview:
        length = self._read(0, memoryview(bytearray(min(_LENGTH_BYTES, size))))
        end = min(_LENGTH_BYTES + int.from_bytes(length, "little"), size)
        return self._read(0, memoryview(bytearray(end)))

    def _blocks(self, entry: Entry) -> Iterator[tuple[Rectangle, torch.Tensor]]:
        """All rows of a box in order, some at a time: where they are in the parameter, and their values."""
        offset, shape = entry.rectangle.offset, entry.rectangle.shape
        row_bytes = math.prod(shape[1:]) * DTYPES[entry.dtype]
        step = max(1, BLOCK_BYTES // row_bytes)
        memory = memoryview(bytearray(min(step, shape[0]) * row_bytes))
        found, at = checksum(b""), entry.start
        for first in range(0, shape[0], step):
            rows = Rectangle(offset=(offset[0] + first, *offset[1:]), shape=(min(step, shape[0] - first), *shape[1:]))
            block = memory[: rows.shape[0] * row_bytes]
            found = checksum(self._read(at, block), found)
            at += len(block)
            yield rows, torch.frombuffer(block, dtype=getattr(torch, entry.dtype)).view(rows.shape)
        if found != entry.checksum:
            self._damaged(f"the checksum of {entry.kind} of {entry.name}")

    def _read(self, start: int, target: memoryview) -> memoryview:
        self._file.seek(start)
        done = 0
        while done < len(target):
            read = self._file.readinto(target[done:])
            if not read:
                raise CheckpointError(f"{self._where} ends at byte {start + done}: it was cut while it was read")
            done += read
        return target

    def _damaged(self, what: str) -> None:
        raise CheckpointError(f"{self._where} is damaged: {what} is not the one in the manifest")
