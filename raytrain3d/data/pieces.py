"""Input cut into pieces that tasks read independently of each other: some small text files, a range of bytes of a file of
JSON lines, some row groups or record batches. Which pieces there are depends on the input alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from pyarrow.fs import FileSystem

from raytrain3d.data.documents import Input
from raytrain3d.errors import DataError

ARROW_MAGIC = b"ARROW1"
"""What an Arrow file, not a stream, begins with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What one task reads."""

    number: int
    inputs: tuple[Input, ...]
    """Several only of text."""
    start: int = 0
    stop: int | None = None
    """Of one input: bytes of JSON lines, row groups of Parquet, record batches of Arrow. Absent: to the end."""


@contextmanager
def opened(source: Input, *, plain: bool = False) -> Iterator[Any]:
    """The file, decompressed unless `plain`. DataError when it cannot be read."""
    try:
        remote = "://" in source.location
        filesystem, path = FileSystem.from_uri(source.location) if remote else (None, source.location)
        with filesystem.open_input_file(path) if filesystem is not None else pa.OSFile(path) as file:
            if source.compression is None or plain:
                yield file
            else:
                with pa.CompressedInputStream(file, source.compression) as stream:
                    yield stream
    except (OSError, ValueError) as error:
        raise DataError(f"{source.location} cannot be read ({getattr(error, 'strerror', None) or error})") from None


@contextmanager
def named(source: Input) -> Iterator[None]:
    """What pyarrow finds wrong with the file becomes a DataError."""
    try:
        yield
    except pa.ArrowException as error:
        raise DataError(f"{source.location} is no whole file of its format ({str(error).splitlines()[0]})") from None


def cut(inputs: Sequence[Input], piece_bytes: int) -> list[Piece]:
    """Pieces of about `piece_bytes` each, in the order of the inputs."""
    pieces: list[Piece] = []
    texts: list[Input] = []
    size = 0

    def add(*sources: Input, start: int = 0, stop: int | None = None) -> None:
        pieces.append(Piece(number=len(pieces), inputs=sources, start=start, stop=stop))

    for source in inputs:
        if texts and (source.format != "text" or size >= piece_bytes):
            add(*texts)
            texts, size = [], 0
        if source.format == "text":
            texts.append(source)
            size += source.size
            continue
        for start, stop in _ranges(source, piece_bytes):
            add(source, start=start, stop=stop)
    if texts:
        add(*texts)
    return pieces


def _ranges(source: Input, piece_bytes: int) -> list[tuple[int, int | None]]:
    if source.compression is not None:
        return [(0, None)]
    if source.format == "jsonl":
        edges = list(range(0, source.size, piece_bytes)) or [0]
        return list(zip(edges, [*edges[1:], None], strict=True))
    with named(source), opened(source) as file:
        if source.format == "parquet":
            parquet = pyarrow.parquet.ParquetFile(file)
            sizes = [parquet.metadata.row_group(i).total_byte_size for i in range(parquet.num_row_groups)]
        elif file.read(len(ARROW_MAGIC)) == ARROW_MAGIC:
            batches = pa.ipc.open_file(file).num_record_batches
            sizes = [source.size // max(batches, 1)] * batches
        else:
            return [(0, None)]  # a stream, which has no index
    edges, filled = [0], 0
    for number, size in enumerate(sizes):
        if filled >= piece_bytes:
            edges.append(number)
            filled = 0
        filled += size
    return list(zip(edges, [*edges[1:], len(sizes)], strict=True))
