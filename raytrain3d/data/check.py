"""Does the data fit the job, and are the shards what the manifest says? Asked before any rank starts.

`check_data` is what the driver asks; `verify_shards` reads every token and runs once on each node. Whatever is wrong
becomes a DataError that names the file or key and what would be right.
"""

from pathlib import Path

from raytrain3d.config import JobConfig
from raytrain3d.data.manifest import SPLITS, DatasetManifest, ShardRecord, read_manifest
from raytrain3d.data.tokenizer import BYTES, TOKENIZER, fingerprint
from raytrain3d.data.tokens import checksum, open_shard
from raytrain3d.errors import DataError

DRIVER_BYTES = 1 << 30
"""Largest dataset whose every shard the driver verifies itself, about two seconds of reading. A larger one is left to
the nodes, which read in parallel."""


def check_data(config: JobConfig) -> None:
    """Raises DataError when training cannot start on `data.path`. Reads the tokens only of datasets up to 1 GiB."""
    directory = Path(config.data.path)
    manifest = read_manifest(directory)
    _check_tokenizer(config, manifest)
    check_samples(config, manifest)
    size = sum(_size(directory, shard) for split in SPLITS for shard in manifest.shards(split))
    if size <= DRIVER_BYTES:
        verify_shards(config)


def check_samples(config: JobConfig, manifest: DatasetManifest) -> None:
    """Raises DataError when vocabulary or sizes do not fit the job. Reads nothing."""
    path, vocabulary, sequence = config.data.path, config.model.vocabulary, config.train.sequence
    if manifest.vocabulary > vocabulary:
        raise DataError(f"data.path is '{path}': its vocabulary has {manifest.vocabulary} token ids, but "
                        f"model.vocabulary is {vocabulary}: set it to at least {manifest.vocabulary}")
    for split in SPLITS:
        tokens, documents = manifest.tokens(split), manifest.documents(split)
        if tokens < sequence + 1:
            raise DataError(f"data.path is '{path}': its {split} split has {tokens} tokens in {documents} documents, "
                            f"one sample needs {sequence + 1} (train.sequence + 1): prepare more text"
                            + (", raise data.validation_fraction" if split == "validation" else "")
                            + " or lower train.sequence")


def _check_tokenizer(config: JobConfig, manifest: DatasetManifest) -> None:
    path, given, made = config.data.path, config.data.tokenizer, manifest.tokenizer
    copy = made.name if made.name == BYTES else Path(path) / TOKENIZER
    right = f"data.path '{path}' was made with '{made.name}': set data.tokenizer to '{copy}'"
    if given != BYTES and not Path(given).is_file():
        raise DataError(f"data.tokenizer is '{given}': no such file; {right}")
    if fingerprint(given) != made.fingerprint:
        raise DataError(f"data.tokenizer is '{given}', but {right}, or prepare the data again into another directory")


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
