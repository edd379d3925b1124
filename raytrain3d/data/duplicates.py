"""Documents that repeat an earlier one to the byte, found by 128-bit hashes in bounded memory.

Every piece leaves its hashes sorted; then one range of hashes after the other is compared over all pieces.
"""

import hashlib
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raytrain3d.data.pieces import Piece
from raytrain3d.data.records import Record, read_piece
from raytrain3d.data.tokenize import Work, duplicates_file
from raytrain3d.files import write_whole

_HASH = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u4")])
RANGE_DOCUMENTS = 1 << 22
"""About so many documents are compared at a time."""


def hashes_file(directory: str, piece: int) -> Path:
    return Path(directory) / f"hashes-{piece:05d}.bin"


def hash_piece(work: Work, piece: Piece) -> None:
    """Writes the hashes of all documents of a piece."""
    found: list[tuple[int, int, int]] = []
    new = partial(hashlib.blake2b, digest_size=16)
    hashing = new()
    for record in read_piece(piece, work.reading):
        if isinstance(record, Record):
            hashing.update(record.text)
            if record.ends:
                number = int.from_bytes(hashing.digest())
                found.append((number >> 64, number & (1 << 64) - 1, len(found)))
                hashing = new()
    hashes = np.array(found, dtype=_HASH)
    hashes.sort(order=("high", "low", "document"))
    write_whole(hashes_file(work.directory, piece.number), hashes.tobytes())


def mark_duplicates(directory: str, num_pieces: int) -> None:
    """Writes for each piece which of its documents repeat an earlier one of it or of a piece before."""
    pieces = [_mapped(hashes_file(directory, number)) for number in range(num_pieces)]
    repeated: list[list[npt.NDArray[np.uint32]]] = [[] for _ in pieces]
    ranges = -(-sum(map(len, pieces)) // RANGE_DOCUMENTS) or 1
    edges = [(1 << 64) * edge // ranges for edge in range(ranges + 1)]
    for first, last in pairwise(edges):
        parts = [_between(hashes, first, last) for hashes in pieces]
        together = np.concatenate(parts)
        owner = np.repeat(np.arange(num_pieces), list(map(len, parts)))
        order = np.lexsort((together["document"], owner, together["low"], together["high"]))
        together, owner = together[order], owner[order]
        same = (together["high"][1:] == together["high"][:-1]) & (together["low"][1:] == together["low"][:-1])
        later = np.flatnonzero(same) + 1
        for number in np.unique(owner[later]):
            repeated[number].append(together["document"][later[owner[later] == number]])
    for number, documents in enumerate(repeated):
        repeats = np.sort(np.concatenate([np.empty(0, np.uint32), *documents]))
        write_whole(duplicates_file(directory, number), repeats.tobytes())


def _between(hashes: npt.NDArray[np.void], first: int, last: int) -> npt.NDArray[np.void]:
    """Those from `first` to below `last`."""
    high = hashes["high"]
    start = int(np.searchsorted(high, np.uint64(first)))
    stop = len(high) if last > np.iinfo(np.uint64).max else int(np.searchsorted(high, np.uint64(last)))
    return hashes[start:stop]


def _mapped(file: Path) -> npt.NDArray[np.void]:
    """What `hash_piece` wrote. An empty file cannot be mapped."""
    return np.memmap(file, dtype=_HASH, mode="r") if file.stat().st_size else np.empty(0, dtype=_HASH)
