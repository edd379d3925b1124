"""Writes one split: pieces of documents in, shard files of bounded size out."""

from pathlib import Path

import numpy as np

from raytrain3d.data.manifest import ShardRecord, Split
from raytrain3d.data.tokenizer import Tokenizer
from raytrain3d.data.tokens import Tokens, token_type, write_shard


class SplitWriter:
    """Appends documents, each followed by the end of document, and writes a shard whenever one is full."""

    def __init__(self, directory: Path, split: Split, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self._directory, self._split, self._tokenizer = directory, split, tokenizer
        self._end = np.array([tokenizer.record.end_of_document], dtype=token_type(tokenizer.vocabulary))
        self._buffer: Tokens = np.empty_like(self._end, shape=(shard_tokens,))
        self._filled = 0
        self._offsets = [0]
        self._documents = 0
        self._records: list[ShardRecord] = []

    @property
    def num_tokens(self) -> int:
        return self._filled + sum(record.tokens for record in self._records)

    def add(self, file: Path) -> None:
        """Appends one text file. UnicodeDecodeError before anything is appended where the tokenizer cannot read it."""
        for piece in self._tokenizer.encode(file):
            self._append(piece)
        self._append(self._end)
        self._documents += 1
        self._offsets.append(self._filled)

    def finish(self) -> tuple[ShardRecord, ...]:
        """Writes what is left; the shards of the split."""
        if self._filled:
            self._flush()
        return tuple(self._records)

    def _append(self, piece: Tokens) -> None:
        while len(piece):
            if self._filled == len(self._buffer):
                self._flush()
            room = piece[:len(self._buffer) - self._filled]
            self._buffer[self._filled:self._filled + len(room)] = room
            self._filled += len(room)
            piece = piece[len(room):]

    def _flush(self) -> None:
        if self._offsets[-1] != self._filled:
            self._offsets.append(self._filled)
        file = self._directory / f"{self._split}-{len(self._records):05d}.arrow"
        self._records.append(write_shard(file, self._buffer[:self._filled], self._offsets, self._documents))
        self._filled, self._offsets, self._documents = 0, [0], 0
