"""Documents out of pieces of files: text, JSON lines, Parquet and Arrow, plain or compressed, local or remote."""

import codecs
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from raytrain3d.data.documents import Input
from raytrain3d.data.pieces import ARROW_MAGIC, Piece, named, opened
from raytrain3d.errors import DataError

CUT_BYTES = 1 << 20
"""Longer documents are encoded in parts of about this size, cut where a line begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A document, or a part of a long one."""

    source: int
    """Which of the piece's inputs it is from."""
    row: int
    """In its file or, of JSON lines, from where the piece begins; from 1."""
    text: bytes
    ends: bool = True
    """It is the last part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecord:
    """What is no document."""

    file: str
    row: int
    """As of a record."""
    reason: str | None
    """Absent: a blank line, which is passed over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How records are read."""

    column: str
    longest: int
    """Most bytes of a record; a text file may be longer."""
    any_bytes: bool
    """Text files need not be UTF-8."""


def read_piece(piece: Piece, reading: Reading) -> Iterator[Record | BadRecord]:
    """All records of a piece, in order."""
    for number, source in enumerate(piece.inputs):
        if source.format == "text":
            yield from _text(number, source, reading)
        else:
            read = _lines if source.format == "jsonl" else _column
            for row, found in read(piece, source, reading):
                yield from _checked(number, source, row, found, reading)


def _checked(number: int, source: Input, row: int, found: bytes | str | None,
             reading: Reading) -> Iterator[Record | BadRecord]:
    """found: a document, or what is wrong; None: a blank line."""
    if isinstance(found, bytes) and len(found) > reading.longest:
        found = f"longer than {reading.longest:,} bytes"
    if found == b"":
        found = "empty"
    if not isinstance(found, bytes):
        yield BadRecord(file=source.location, row=row, reason=found)
        return
    *parts, last = split_long([found])
    yield from (Record(source=number, row=row, text=part, ends=False) for part in parts)
    yield Record(source=number, row=row, text=last)


def _text(number: int, source: Input, reading: Reading) -> Iterator[Record | BadRecord]:
    """A file is a document. One that does not fit into one part is read twice, since it must be UTF-8 as a whole."""
    def bad(reason: str) -> BadRecord:
        return BadRecord(file=source.location, row=1, reason=reason)

    with opened(source) as file:
        first = file.read(CUT_BYTES)
        if len(first) < CUT_BYTES:
            if not first:
                yield bad("empty")
            elif not reading.any_bytes and not _is_utf8([first]):
                yield bad("not UTF-8")
            else:
                yield Record(source=number, row=1, text=first)
            return
    if not reading.any_bytes:
        with opened(source) as file:
            if not _is_utf8(_chunks(file)):
                yield bad("not UTF-8")
                return
    with opened(source) as file:
        last: Record | None = None
        for part in split_long(_chunks(file)):
            if last is not None:
                yield last
            last = Record(source=number, row=1, text=part, ends=False)
        assert last is not None
        yield replace(last, ends=True)


def _chunks(file: Any) -> Iterator[bytes]:
    while chunk := file.read(CUT_BYTES):
        yield chunk


def _is_utf8(chunks: Iterable[bytes]) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in chunks:
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def split_long(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in parts of about CUT_BYTES, cut where a line begins with a letter or sign; else, where there is none,
    between two characters. The parts do not depend on how the chunks were cut."""
    waiting = b""
    for chunk in chunks:
        waiting += chunk
        while len(waiting) > 2 * CUT_BYTES:
            end = _line_start(waiting)
            yield waiting[:end]
            waiting = waiting[end:]
    yield waiting


def _line_start(text: bytes) -> int:
    """Last place within the first 2 * CUT_BYTES where a line begins with no white space."""
    end = 2 * CUT_BYTES
    while (end := text.rfind(b"\n", CUT_BYTES, end)) >= 0:
        if not text[end + 1:end + 2].isspace():
            return end + 1
    end = CUT_BYTES
    while end > CUT_BYTES - 4 and 0x80 <= text[end] < 0xC0:
        end -= 1
    return end


def _lines(piece: Piece, source: Input, reading: Reading) -> Iterator[tuple[int, bytes | str | None]]:
    """JSON lines that begin within the piece's range of bytes."""
    with opened(source) as file:
        buffered = io.BufferedReader(file, CUT_BYTES)
        if piece.start:
            buffered.seek(piece.start - 1)
            _rest_of_line(buffered)
        row, longest = 0, 2 * reading.longest + CUT_BYTES  # escapes and other columns come on top
        while piece.stop is None or buffered.tell() < piece.stop:
            line = buffered.readline(longest)
            if not line:
                return
            row += 1
            if len(line) == longest and not line.endswith(b"\n"):
                _rest_of_line(buffered)
                yield row, f"a line longer than {longest:,} bytes"
            else:
                yield row, _field(line, reading.column) if line.strip() else None


def _rest_of_line(file: io.BufferedReader) -> None:
    while (part := file.readline(CUT_BYTES)) and not part.endswith(b"\n"):
        pass


def _field(line: bytes, column: str) -> bytes | str:
    """The document of a line, or what is wrong with it."""
    try:
        value = json.loads(line)
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError):
        return "not JSON"
    if not isinstance(value, dict) or column not in value:
        return f"no column '{column}'"
    text = value[column]
    if text is None:
        return "null"
    if not isinstance(text, str):
        return f"column '{column}' is no string"
    try:
        return text.encode()
    except UnicodeEncodeError:
        return "not UTF-8"


def _column(piece: Piece, source: Input, reading: Reading) -> Iterator[tuple[int, bytes | str | None]]:
    """Rows of a Parquet or Arrow file, one batch in memory."""
    with named(source), opened(source) as file:
        for row, batch in _batches(piece, source, file, reading.column):
            if batch is None:
                yield row, f"no column '{reading.column}'"
                continue
            kind = batch.type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)
                    or pa.types.is_large_binary(kind)):
                raise DataError(f"{source.location}: column '{reading.column}' is of type {kind}, it must hold strings")
            texts = batch.cast(pa.large_binary())
            for offset in range(0, len(texts), 1024):
                for number, value in enumerate(texts.slice(offset, 1024).to_pylist(), row + offset):
                    yield number, "null" if value is None else _valid(value)


def _valid(value: bytes) -> bytes | str:
    try:
        value.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    return value


def _batches(piece: Piece, source: Input, file: Any, column: str) -> Iterator[tuple[int, Any]]:
    """(row of its first record in the file, the column); None instead of a column that is not there."""
    if source.format == "parquet":
        parquet = pyarrow.parquet.ParquetFile(file)
        groups = range(piece.start, parquet.num_row_groups if piece.stop is None else piece.stop)
        row = 1 + sum(parquet.metadata.row_group(i).num_rows for i in range(piece.start))
        if column not in parquet.schema_arrow.names:
            yield row, None
            return
        for batch in parquet.iter_batches(batch_size=8192, row_groups=list(groups), columns=[column]):
            yield row, batch.column(0)
            row += batch.num_rows
        return
    is_file = source.compression is None and file.read(len(ARROW_MAGIC)) == ARROW_MAGIC
    if source.compression is None:
        file.seek(0)
    row, reader = 1, pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
    numbered = enumerate(map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader)
    if column not in reader.schema.names:
        yield row, None
        return
    for number, batch in numbered:
        if number >= piece.start and (piece.stop is None or number < piece.stop):
            yield row, batch.column(column)
        row += batch.num_rows
