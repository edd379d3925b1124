"""Writes the shards of one split of one piece: parts of documents in, files of bounded size out."""

from pathlib import Path

import numpy as np

from raytrain3d.data.manifest import ShardRecord, Split
from raytrain3d.data.tokens import Tokens, token_type, write_shard

_FIRST_ROOM = 1 << 16


class SplitWriter:
    """Appends documents, each followed by the end of document, and writes a shard whenever one is full."""

    def __init__(self, directory: Path, split: Split, piece: int, *, vocabulary: int, end: int, shard_tokens: int) -> None:
        self._directory, self._name = directory, f"{split}-{piece:05d}"
        self._end = np.array([end], dtype=token_type(vocabulary))
        self._shard_tokens = shard_tokens
        self._buffer: Tokens = np.empty_like(self._end, shape=(min(shard_tokens, _FIRST_ROOM),))
        self._filled = self._documents = self._text_bytes = 0
        self._offsets = [0]
        self._records: list[ShardRecord] = []

    def add(self, tokens: Tokens, text_bytes: int, *, ends: bool) -> None:
        """Appends a document, or a part of one; `ends` with its last part."""
        self._append(tokens)
        self._text_bytes += text_bytes
        if ends:
            self._append(self._end)
            self._documents += 1
            self._offsets.append(self._filled)

    def finish(self) -> tuple[ShardRecord, ...]:
        """Writes what is left; all shards."""
        if self._filled:
            self._flush()
        return tuple(self._records)

    def _append(self, tokens: Tokens) -> None:
        while len(tokens):
            if self._filled == self._shard_tokens:
                self._flush()
            taken = tokens[:self._shard_tokens - self._filled]
            self._make_room(self._filled + len(taken))
            self._buffer[self._filled:self._filled + len(taken)] = taken
            self._filled += len(taken)
            tokens = tokens[len(taken):]

    def _make_room(self, wanted: int) -> None:
        """The buffer grows by doubling: most pieces fill a small part of a shard."""
        if wanted > len(self._buffer):
            grown = np.empty_like(self._buffer, shape=(min(self._shard_tokens, max(wanted, 2 * len(self._buffer))),))
            grown[:self._filled] = self._buffer[:self._filled]
            self._buffer = grown

    def _flush(self) -> None:
        if self._offsets[-1] != self._filled:
            self._offsets.append(self._filled)
        file = self._directory / f"{self._name}-{len(self._records):03d}.arrow"
        self._records.append(write_shard(file, self._buffer[:self._filled], self._offsets, self._documents,
                                         self._text_bytes))
        self._filled, self._offsets, self._documents, self._text_bytes = 0, [0], 0, 0
