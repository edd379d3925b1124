"""The record that makes a directory of token shards a dataset; written last, by rename.

It says what the tokens are (vocabulary, tokenizer), and for each split its shards with sizes and checksums, so that
everything but the tokens themselves can be checked without opening a shard.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from raytrain3d.errors import DataError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
MANIFEST = "manifest.json"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerRecord:
    """The tokenizer that made a dataset."""

    name: str
    """`bytes`, or the name of the tokenizer file that was given."""
    fingerprint: str
    """Equal exactly for tokenizers that give equal tokens."""
    end_of_document: int
    """Token id after each document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """One shard file."""

    file: str
    """Path inside the dataset directory."""
    tokens: int
    documents: int
    """Documents that end in this shard."""
    checksum: str
    """BLAKE2b (32 bytes, hexadecimal) of the file."""
    text_bytes: int | None = None
    """UTF-8 bytes of the text of its tokens; a document in several shards counts where it ends. Absent in older data sets.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetManifest:
    """A whole dataset."""

    vocabulary: int
    """Token ids are below this."""
    tokenizer: TokenizerRecord
    train: tuple[ShardRecord, ...]
    validation: tuple[ShardRecord, ...]
    skipped: int = 0
    """Records that were left out because they are no documents."""
    bad: dict[str, int] = field(default_factory=dict)
    """Why they were left out -> how many."""
    duplicates: int = 0
    """Documents that were left out because they repeat an earlier one."""
    bigram_entropy: float | None = None
    """Conditional entropy of a token given the one before, in nats: counts of the training split with add-one
    smoothing, evaluated on the validation split. Absent for large vocabularies or an empty split."""

    def shards(self, split: Split) -> tuple[ShardRecord, ...]:
        return self.train if split == "train" else self.validation

    def tokens(self, split: Split) -> int:
        return sum(shard.tokens for shard in self.shards(split))

    def documents(self, split: Split) -> int:
        return sum(shard.documents for shard in self.shards(split))

    def bytes_per_token(self, split: Split) -> float | None:
        """UTF-8 bytes of text for each token, ends of documents included among the tokens; None when it is not known."""
        shards, tokens = self.shards(split), self.tokens(split)
        sizes = [shard.tokens - shard.documents if self.tokenizer.name == "bytes" else shard.text_bytes for shard in shards]
        known = [size for size in sizes if size is not None]
        return sum(known) / tokens if tokens and len(known) == len(shards) else None


def write_manifest(directory: Path, manifest: DatasetManifest) -> None:
    """Writes and syncs under another name, then renames: the manifest is whole or absent."""
    temporary = directory / (MANIFEST + ".partial")
    with temporary.open("w") as file:
        json.dump({"version": VERSION} | asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(directory / MANIFEST)


def read_manifest(path: str | Path, key: str = "data.path") -> DatasetManifest:
    """The manifest of the dataset at `path`, which the configuration has under `key`. DataError when there is none or it
    cannot be understood."""
    file: str | Path = Path(path) / MANIFEST
    if "://" in str(path):
        file = f"{str(path).rstrip('/')}/{MANIFEST}"
    else:
        _check_directory(Path(path), key)
    try:
        record = json.loads(_read(file))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}): prepare the data again") from None
    version = record.get("version") if isinstance(record, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise DataError(f"{file} has format version {version}, this raytrain3d reads up to {VERSION}: update raytrain3d")
    try:
        return _parse(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file} is not a dataset manifest of format version {VERSION} ({type(error).__name__}: "
                        f"{error}): prepare the data again") from None


def _read(file: str | Path) -> str | bytes:
    """Of a path, or with a string of a URI."""
    if isinstance(file, Path):
        return file.read_text()
    from raytrain3d.data.folder import read_remote

    return read_remote(file)


def _check_directory(path: Path, key: str) -> None:
    make = f"make it with `raytrain3d data prepare`, or set {key} to a prepared dataset"
    if not path.exists():
        raise DataError(f"{key} is '{path}': no such directory; {make}")
    if not path.is_dir():
        raise DataError(f"{key} is '{path}': a file, not a directory of token shards; {make}")
    if (path / MANIFEST).exists():
        return
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise DataError(f"{key} is '{path}': cannot be listed ({error.strerror})") from None
    if not names:
        raise DataError(f"{key} is '{path}': the directory is empty; {make}")
    raise DataError(f"{key} is '{path}': not a dataset, it has no {MANIFEST} (but {', '.join(names[:3])}"
                    f"{', ...' if len(names) > 3 else ''}); {make}")


def _parse(record: dict[str, Any]) -> DatasetManifest:
    if record.pop("version") != VERSION:
        raise ValueError("unknown version")
    record["tokenizer"] = TokenizerRecord(**record["tokenizer"])
    for split in SPLITS:
        record[split] = tuple(ShardRecord(**shard) for shard in record[split])
    manifest = DatasetManifest(**record)
    sizes = [shard.tokens for split in SPLITS for shard in manifest.shards(split)]
    if not all(isinstance(size, int) and size > 0 for size in [manifest.vocabulary, *sizes]):
        raise ValueError("vocabulary and shard sizes must be whole numbers above 0")
    return manifest
