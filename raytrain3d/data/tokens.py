"""Token shards: Arrow IPC files of one record batch whose rows are documents, read through memory maps.

The one column is list<uintN>: its offsets are the document offsets, its values are all tokens of the shard, one after
the other, so a split is one long stream of tokens cut into samples wherever documents end. A document too long for a
shard goes on as the first row of the next.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain3d.data.manifest import DatasetManifest, ShardRecord, Split, read_manifest
from raytrain3d.errors import DataError

Tokens = npt.NDArray[np.unsignedinteger]


def token_type(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    """Smallest unsigned type for ids below `vocabulary`."""
    return np.dtype(np.min_scalar_type(vocabulary - 1))


def checksum(file: Path) -> str:
    """BLAKE2b of a file's bytes, hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def write_shard(file: Path, tokens: Tokens, offsets: list[int], documents: int) -> ShardRecord:
    """Writes `tokens` cut into rows at `offsets` (from 0 to len(tokens)); `documents` of them end in this shard."""
    rows = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(tokens))
    batch = pa.record_batch([rows], names=["tokens"])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return ShardRecord(file=file.name, tokens=len(tokens), documents=documents, checksum=checksum(file))


def open_shard(directory: Path, shard: ShardRecord, vocabulary: int) -> Tokens:
    """All tokens of a shard, (shard.tokens,), mapped and not read. DataError when the file is not what the manifest says.
    """
    file = directory / shard.file
    try:
        table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
        tokens: Tokens = table.column("tokens").chunk(0).values.to_numpy(zero_copy_only=True)
    except FileNotFoundError:
        raise DataError(f"{file} is missing though the manifest lists it: prepare the data again") from None
    except (OSError, pa.ArrowException, KeyError, IndexError, AttributeError) as error:
        raise DataError(f"{file} is not a whole Arrow token shard ({error}): prepare the data again") from None
    if len(tokens) != shard.tokens or tokens.dtype != token_type(vocabulary):
        raise DataError(f"{file} holds {len(tokens)} tokens of type {tokens.dtype}, the manifest says {shard.tokens} of "
                        f"type {token_type(vocabulary)}: prepare the data again")
    return tokens


class Dataset:
    """One split as a stream of tokens, cut into samples. Shards are mapped when first read."""

    def __init__(self, directory: Path, manifest: DatasetManifest, split: Split) -> None:
        self.manifest = manifest
        self._directory = directory
        self._shards = manifest.shards(split)
        self._ends = list(accumulate(shard.tokens for shard in self._shards))
        self._mapped: dict[int, Tokens] = {}

    @staticmethod
    def open(path: str, split: Split) -> "Dataset":
        return Dataset(Path(path), read_manifest(path), split)

    @property
    def num_tokens(self) -> int:
        return self._ends[-1] if self._ends else 0

    def num_samples(self, sequence: int) -> int:
        """Samples of `sequence` tokens; each needs one token more, its last target."""
        return max(0, self.num_tokens - 1) // sequence

    def sample(self, index: int, sequence: int) -> Tokens:
        """Tokens [index * sequence, index * sequence + sequence + 1) of the stream, (sequence + 1,): a view of the
        mapped file, copied only where a sample crosses shards."""
        if not 0 <= index < self.num_samples(sequence):
            raise IndexError(f"sample {index} of {self.num_samples(sequence)}")
        first = index * sequence
        pieces = self._pieces(first, first + sequence + 1)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _pieces(self, first: int, last: int) -> list[Tokens]:
        pieces = []
        number = bisect_right(self._ends, first)
        while first < last:
            start = self._ends[number] - self._shards[number].tokens
            stop = min(last, self._ends[number])
            pieces.append(self._shard(number)[first - start:stop - start])
            first, number = stop, number + 1
        return pieces

    def shards(self) -> Iterator[Tokens]:
        """All tokens of each shard in turn, mapped."""
        return (self._shard(number) for number in range(len(self._shards)))

    def _shard(self, number: int) -> Tokens:
        """All tokens of one shard, mapped."""
        if number not in self._mapped:
            self._mapped[number] = open_shard(self._directory, self._shards[number], self.manifest.vocabulary)
        return self._mapped[number]
