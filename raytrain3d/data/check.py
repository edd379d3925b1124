"""Does the data fit the job, and are the shards what the manifest says? Asked before any rank starts.

`check_data` is what the driver asks; `verify_shards` reads every token and runs once on each node. Whatever is wrong
becomes a DataError that names the file or key and what would be right.
"""

from pathlib import Path

from raytrain3d.config import JobConfig
from raytrain3d.data.manifest import SPLITS, DatasetManifest, ShardRecord, read_manifest
from raytrain3d.data.tokenizer import fingerprint
from raytrain3d.data.tokens import checksum, open_shard
from raytrain3d.errors import DataError

DRIVER_BYTES = 1 << 30
"""Largest dataset whose every shard the driver verifies itself, about two seconds of reading. A larger one is left to
the nodes, which read in parallel."""


def check_data(config: JobConfig) -> None:
    """Raises DataError when training cannot start on `data.path`. Reads the tokens only of datasets up to 1 GiB."""
    manifest = read_manifest(config.data.path)
    check_samples(config, manifest)
    directory = Path(config.data.path)
    size = sum(_size(directory, shard) for split in SPLITS for shard in manifest.shards(split))
    if size <= DRIVER_BYTES:
        verify_shards(config)


def check_samples(config: JobConfig, manifest: DatasetManifest) -> None:
    """Raises DataError when vocabulary, tokenizer or sizes do not fit the job. Reads no shard."""
    _check_vocabulary(config, manifest)
    sequence = config.train.sequence
    for split in SPLITS:
        tokens = manifest.tokens(split)
        if tokens < sequence + 1:
            raise DataError(f"data.path is '{config.data.path}': its {split} split has {tokens} tokens in "
                            f"{manifest.documents(split)} documents, one sample needs train.sequence + 1 = "
                            f"{sequence + 1}: prepare more text, lower train.sequence"
                            + (" or raise data.validation_fraction" if split == "validation" else ""))


def _check_vocabulary(config: JobConfig, manifest: DatasetManifest) -> None:
    path, given, made = config.data.path, config.data.tokenizer, manifest.tokenizer
    if fingerprint(given) != made.fingerprint:
        raise DataError(f"data.path is '{path}': made with tokenizer '{made.name}' ({made.fingerprint[:12]}), but "
                        f"data.tokenizer is '{given}': set data.tokenizer to the one it was made with, or prepare the "
                        "data again into another directory")
    if manifest.vocabulary > config.model.vocabulary:
        raise DataError(f"data.path is '{path}': its vocabulary has {manifest.vocabulary} token ids, but "
                        f"model.vocabulary is {config.model.vocabulary}: set it to at least {manifest.vocabulary}")


def verify_shards(config: JobConfig) -> None:
    """Opens every shard and reads all of it: checksum, sizes and token ids. DataError names the first bad file."""
    directory = Path(config.data.path)
    manifest = read_manifest(directory)
    for split in SPLITS:
        for shard in manifest.shards(split):
            _verify(directory, shard, manifest.vocabulary)


def _size(directory: Path, shard: ShardRecord) -> int:
    try:
        return (directory / shard.file).stat().st_size
    except OSError as error:
        raise DataError(f"{directory / shard.file} cannot be read ({error.strerror}) though the manifest lists it: "
                        "prepare the data again") from None


def _verify(directory: Path, shard: ShardRecord, vocabulary: int) -> None:
    file = directory / shard.file
    try:
        found = checksum(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}) though the manifest lists it: prepare the data "
                        "again") from None
    if found != shard.checksum:
        raise DataError(f"{file} is corrupt: its checksum is {found[:12]}..., the manifest says "
                        f"{shard.checksum[:12]}...: restore the file or prepare the data again")
    largest = int(open_shard(directory, shard, vocabulary).max())
    if largest >= vocabulary:
        raise DataError(f"{file} has token id {largest}, beyond the vocabulary of {vocabulary} (valid are 0 to "
                        f"{vocabulary - 1}): prepare the data again with the right tokenizer")
