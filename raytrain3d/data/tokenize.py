"""One piece of input to token shards and a record of what was found: a task that any process can do again.

The record is written last, by rename, so a piece that has one is done. The same piece gives the same bytes wherever and
whenever it is done.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from raytrain3d.data.documents import place_of, split_of
from raytrain3d.data.manifest import SPLITS, ShardRecord, Split
from raytrain3d.data.pieces import Piece, opened
from raytrain3d.data.records import BadRecord, Reading, Record, read_piece
from raytrain3d.data.shards import SplitWriter
from raytrain3d.data.tokenizer import open_tokenizer
from raytrain3d.errors import DataError
from raytrain3d.files import write_whole

BATCH_BYTES = 1 << 20
"""Text that is encoded at a time."""
EXAMPLES = 1000
"""Most bad records of a piece whose place is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What all pieces of a preparation have in common."""

    directory: str
    """Where shards and records go; all processes see it."""
    tokenizer: str
    reading: Reading
    validation_fraction: float
    shard_tokens: int
    fail: bool
    """The first bad record is an error."""
    drop_duplicates: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceResult:
    """What came of one piece."""

    shards: dict[Split, tuple[ShardRecord, ...]]
    rows: int
    """Last row that was read."""
    duplicates: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    """Reason -> number of records."""
    examples: tuple[BadRecord, ...] = ()


def record_file(directory: str, piece: int) -> Path:
    return Path(directory) / f"piece-{piece:05d}.json"


def duplicates_file(directory: str, piece: int) -> Path:
    """Which documents of a piece repeat earlier ones, as sorted numbers."""
    return Path(directory) / f"duplicates-{piece:05d}.bin"


def read_result(directory: str, piece: int) -> PieceResult | None:
    """None when the piece is not done."""
    try:
        stored = json.loads(record_file(directory, piece).read_text())
    except FileNotFoundError:
        return None
    shards = {split: tuple(ShardRecord(**shard) for shard in stored["shards"][split]) for split in SPLITS}
    return PieceResult(**stored | {"shards": shards, "examples": tuple(BadRecord(**bad) for bad in stored["examples"])})


def tokenize_piece(work: Work, piece: Piece) -> PieceResult:
    """Does one piece. DataError for input that cannot be read, and with `work.fail` for the first bad record."""
    result = _Tokenizing(work, piece).run()
    write_whole(record_file(work.directory, piece.number), json.dumps(asdict(result)).encode())
    return result


class _Tokenizing:
    """One piece under way."""

    def __init__(self, work: Work, piece: Piece) -> None:
        self._work, self._piece = work, piece
        self._tokenizer = open_tokenizer(work.tokenizer)
        self._writers: dict[Split, SplitWriter] = {
            split: SplitWriter(Path(work.directory), split, piece.number, vocabulary=self._tokenizer.vocabulary,
                               end=self._tokenizer.record.end_of_document, shard_tokens=work.shard_tokens)
            for split in SPLITS}
        self._bad: Counter[str] = Counter()
        self._examples: list[BadRecord] = []
        self._rows = self._duplicates = 0
        self._under_way: Split | None = None

    def run(self) -> PieceResult:
        batch: list[Record] = []
        size = 0
        for record in self._kept():
            batch.append(record)
            size += len(record.text)
            if size >= BATCH_BYTES:
                self._encode(batch)
                batch, size = [], 0
        self._encode(batch)
        shards = {split: writer.finish() for split, writer in self._writers.items()}
        return PieceResult(shards=shards, rows=self._rows, duplicates=self._duplicates, bad=dict(self._bad),
                           examples=tuple(self._examples))

    def _kept(self) -> Iterator[Record]:
        """Parts of documents that are neither bad nor duplicates."""
        repeated: frozenset[int] = frozenset()
        if self._work.drop_duplicates:
            file = duplicates_file(self._work.directory, self._piece.number)
            repeated = frozenset(np.fromfile(file, dtype=np.uint32).tolist())
        number = 0
        for record in read_piece(self._piece, self._work.reading):
            self._rows = record.row
            if isinstance(record, BadRecord):
                if record.reason is not None:
                    self._add_bad(record, record.reason)
                continue
            if number not in repeated:
                yield record
            else:
                self._duplicates += record.ends
            number += record.ends

    def _add_bad(self, record: BadRecord, reason: str) -> None:
        if self._work.fail:
            row = record.row + rows_before(self._piece)
            raise DataError(f"{record.file} row {row}: {reason}; repair it, or leave such records out with "
                            "data.bad_records=skip")
        self._bad[reason] += 1
        if len(self._examples) < EXAMPLES:
            self._examples.append(record)

    def _encode(self, batch: list[Record]) -> None:
        for record, tokens in zip(batch, self._tokenizer.encode_batch([record.text for record in batch]), strict=True):
            self._writers[self._split(record)].add(tokens, len(record.text), ends=record.ends)

    def _split(self, record: Record) -> Split:
        """Parts of a document stay together. Of a record the text (its first part) decides."""
        split = self._under_way or self._piece.inputs[record.source].split
        split = split or split_of(place_of(record.text), self._work.validation_fraction)
        self._under_way = None if record.ends else split
        return split


def rows_before(piece: Piece) -> int:
    """Lines of a file of JSON lines that begin before the piece; of other formats rows are numbered in their file anyway."""
    if piece.inputs[0].format != "jsonl" or not piece.start:
        return 0
    lines, left = 1, piece.start - 1
    with opened(piece.inputs[0], plain=True) as file:
        while left and (block := file.read(min(left, 1 << 24))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines

