"""Token shards: Arrow IPC files of one record batch whose rows are documents, read through memory maps.

The one column is list<uintN>: its offsets are the document offsets, its values are all tokens of the shard, one after
the other, so a split is one long stream of tokens cut into samples wherever documents end. A document too long for a
shard goes on as the first row of the next.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain3d.data.folder import Cache, Folder, open_folder
from raytrain3d.data.manifest import DatasetManifest, ShardRecord, Split, read_manifest
from raytrain3d.errors import DataError

DEFAULT_CACHE = Cache()
Tokens = npt.NDArray[np.unsignedinteger]


def token_type(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    """Smallest unsigned type for ids below `vocabulary`."""
    return np.dtype(np.min_scalar_type(vocabulary - 1))


def samples_of(tokens: int, sequence: int) -> int:
    """Samples of `sequence` tokens in a stream; each needs one token more, its last target."""
    return max(0, tokens - 1) // sequence


def checksum(file: Path) -> str:
    """BLAKE2b of a file's bytes, hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def write_shard(file: Path, tokens: Tokens, offsets: list[int], documents: int,
                text_bytes: int | None = None) -> ShardRecord:
    """Writes `tokens` cut into rows at `offsets` (from 0 to len(tokens)); `documents` of them end in this shard."""
    rows = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(tokens))
    batch = pa.record_batch([rows], names=["tokens"])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return ShardRecord(file=file.name, tokens=len(tokens), documents=documents, checksum=checksum(file),
                       text_bytes=text_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A mapped shard file."""

    tokens: Tokens
    """(number of tokens,), not read until used."""
    offsets: npt.NDArray[np.signedinteger]
    """(rows + 1,): where documents begin, and the end."""


def open_shard(directory: Path, shard: ShardRecord, vocabulary: int) -> Shard:
    """A shard of a data set, mapped and not read. DataError when the file is not what the manifest says."""
    file = directory / shard.file
    try:
        rows = pa.ipc.open_file(pa.memory_map(str(file))).read_all().column("tokens").chunk(0)
        tokens: Tokens = rows.values.to_numpy(zero_copy_only=True)
        offsets = rows.offsets.to_numpy(zero_copy_only=True)
    except FileNotFoundError:
        raise DataError(f"{file} is missing though the manifest lists it: prepare the data again") from None
    except (OSError, pa.ArrowException, KeyError, IndexError, AttributeError) as error:
        raise DataError(f"{file} is not a whole Arrow token shard ({error}): prepare the data again") from None
    if len(tokens) != shard.tokens or tokens.dtype != token_type(vocabulary):
        raise DataError(f"{file} holds {len(tokens)} tokens of type {tokens.dtype}, the manifest says {shard.tokens} of "
                        f"type {token_type(vocabulary)}: prepare the data again")
    return Shard(tokens, offsets)


class Dataset:
    """One split as a stream of tokens, cut into samples. Shards are fetched and mapped when first read."""

    def __init__(self, folder: Folder, manifest: DatasetManifest, split: Split) -> None:
        self.manifest = manifest
        self._folder = folder
        self._shards = manifest.shards(split)
        self._ends = list(accumulate(shard.tokens for shard in self._shards))
        self._mapped: dict[int, Shard] = {}
        """Those used last come last."""
        largest = max((shard.tokens for shard in self._shards), default=0)
        self._most_mapped = folder.most_mapped(largest * token_type(manifest.vocabulary).itemsize)

    @staticmethod
    def open(path: str, split: Split, cache: Cache = DEFAULT_CACHE) -> "Dataset":
        """path: a directory, or a URI, whose shards go through the cache."""
        return Dataset(open_folder(path, cache), read_manifest(path), split)

    @property
    def num_tokens(self) -> int:
        return self._ends[-1] if self._ends else 0

    def num_samples(self, sequence: int) -> int:
        return samples_of(self.num_tokens, sequence)

    def sample(self, index: int, sequence: int) -> Tokens:
        """Tokens [index * sequence, index * sequence + sequence + 1) of the stream, (sequence + 1,): a view of the
        mapped file, copied only where a sample crosses shards."""
        pieces = [self._shard(number).tokens[piece] for number, piece in self._pieces(index, sequence)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_starts(self, index: int, sequence: int) -> npt.NDArray[np.int64]:
        """Places in `sample` at which documents begin, ascending. Reads no tokens."""
        found, before = [], 0
        for number, piece in self._pieces(index, sequence):
            offsets = self._shard(number).offsets[:-1]
            first, last = np.searchsorted(offsets, (piece.start, piece.stop))
            if first == 0 and piece.start == 0 and self._goes_on(number):
                first += 1
            found.append(offsets[first:last].astype(np.int64) + (before - piece.start))
            before += piece.stop - piece.start
        return np.concatenate(found)

    def _goes_on(self, number: int) -> bool:
        """The first row of this shard is the rest of a document that began before: the shard before has a row that does not
        end there."""
        return number > 0 and len(self._shard(number - 1).offsets) - 1 > self._shards[number - 1].documents

    def _pieces(self, index: int, sequence: int) -> Iterator[tuple[int, slice]]:
        """Which parts of which shards a sample is made of."""
        if not 0 <= index < self.num_samples(sequence):
            raise IndexError(f"sample {index} of {self.num_samples(sequence)}")
        first, last = index * sequence, index * sequence + sequence + 1
        number = bisect_right(self._ends, first)
        while first < last:
            start = self._ends[number] - self._shards[number].tokens
            stop = min(last, self._ends[number])
            yield number, slice(first - start, stop - start)
            first, number = stop, number + 1

    def shards(self) -> Iterator[Tokens]:
        """All tokens of each shard in turn, mapped."""
        return (shard.tokens for shard in self.mapped())

    def mapped(self) -> Iterator[Shard]:
        """Each shard in turn."""
        return map(self._shard, range(len(self._shards)))

    @property
    def num_rows(self) -> int:
        """Documents; one that goes on in the next shard counts again there."""
        return sum(len(shard.offsets) - 1 for shard in self.mapped())

    def row(self, number: int) -> Tokens:
        """Tokens of one of `num_rows`."""
        for shard in self.mapped():
            if number < len(shard.offsets) - 1:
                return shard.tokens[shard.offsets[number]:shard.offsets[number + 1]]
            number -= len(shard.offsets) - 1
        raise IndexError(f"row {number} beyond the last")

    def _shard(self, number: int) -> Shard:
        shard = self._mapped.pop(number, None)
        if shard is None:
            file = self._folder.local(self._shards[number].file)
            shard = open_shard(file.parent, self._shards[number], self.manifest.vocabulary)
            if len(self._mapped) >= self._most_mapped:
                del self._mapped[next(iter(self._mapped))]
        self._mapped[number] = shard
        return shard
