"""Does the data fit the job, and are the shards what the manifest says? Asked before any rank starts.

`check_data` is what the driver asks, `check_shards` runs once on each node. Whatever is wrong
becomes a DataError that names the file or key and what would be right.
"""

from dataclasses import dataclass
from pathlib import Path

from raytrain3d.config import JobConfig
from raytrain3d.data.manifest import SPLITS, DatasetManifest, ShardRecord, Split, read_manifest
from raytrain3d.data.mixture import Mixture
from raytrain3d.data.tokenizer import BYTES, TOKENIZER, fingerprint
from raytrain3d.data.tokens import checksum, open_shard, samples_of
from raytrain3d.errors import DataError

VERIFIED_BYTES = 1 << 30
"""Most bytes of data that are read and verified before every start, which takes about two seconds. Of more only the sizes
are looked at; `raytrain3d data verify` reads it all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A split of a data set that a job reads."""

    key: str
    """Of the configuration, that names it."""
    path: str
    split: Split


def parts_of(config: JobConfig) -> list[Part]:
    """What a job trains on, then what it evaluates."""
    data = config.data
    keys = ["data.path"] if data.path else [f"data.sources[{number}].path" for number in range(len(data.sources))]
    train = [Part(key=key, path=source.path, split="train") for key, source in zip(keys, data.all_sources, strict=True)]
    if config.evaluate.sets:
        keys = [f"evaluate.sets[{number}].path" for number in range(len(config.evaluate.sets))]
    return train + [Part(key=key, path=chosen.path, split=chosen.split)
                    for key, chosen in zip(keys, config.evaluation_sets, strict=True)]


def check_data(config: JobConfig) -> None:
    """Raises DataError when training cannot start on the data."""
    for path, key in _directories(config).items():
        _check_tokenizer(config, key, path, read_manifest(path, key))
    check_samples(config)
    check_shards(config)


def check_shards(config: JobConfig) -> None:
    """Raises DataError when shards are missing, or of up to 1 GiB corrupt. Asked on every node. What lies at a URI is
    fetched when it is needed, and checked then."""
    size = 0
    for path, key in _directories(config).items():
        if "://" not in path:
            manifest = read_manifest(path, key)
            size += sum(_size(Path(path), shard) for split in SPLITS for shard in manifest.shards(split))
    if size <= VERIFIED_BYTES:
        verify_shards(config)


def check_samples(config: JobConfig) -> None:
    """Raises DataError when vocabulary or sizes do not fit the job, or sources are used up too early. Reads only manifests.
    """
    manifests = {path: read_manifest(path, key) for path, key in _directories(config).items()}
    parts = parts_of(config)
    for part in parts:
        _check_part(config, part, manifests[part.path])
    trained = [manifests[part.path].tokens("train") for part in parts[:len(config.data.all_sources)]]
    Mixture.of(config, trained, [samples_of(tokens, config.train.sequence) for tokens in trained])


def _check_part(config: JobConfig, part: Part, manifest: DatasetManifest) -> None:
    given, vocabulary, sequence = f"{part.key} is '{part.path}'", config.model.vocabulary, config.train.sequence
    if manifest.vocabulary > vocabulary:
        raise DataError(f"{given}: its vocabulary has {manifest.vocabulary} token ids, but model.vocabulary is "
                        f"{vocabulary}: set it to at least {manifest.vocabulary}")
    tokens, documents = manifest.tokens(part.split), manifest.documents(part.split)
    if not samples_of(tokens, sequence):
        raise DataError(f"{given}: its {part.split} split has {tokens} tokens in {documents} documents, one sample needs "
                        f"{sequence + 1} (train.sequence + 1): prepare more text"
                        + (", raise data.validation_fraction, name others in evaluate.sets"
                           if part.split == "validation" else "") + " or lower train.sequence")


def _check_tokenizer(config: JobConfig, key: str, path: str, manifest: DatasetManifest) -> None:
    given, made = config.data.tokenizer, manifest.tokenizer
    copy = made.name if made.name == BYTES else f"{path}/{TOKENIZER}"
    right = f"{key} '{path}' was made with '{made.name}': set data.tokenizer to '{copy}'"
    if given != BYTES and not Path(given).is_file():
        raise DataError(f"data.tokenizer is '{given}': no such file; {right}")
    if fingerprint(given) != made.fingerprint:
        raise DataError(f"data.tokenizer is '{given}', but {right}, or prepare the data again into another directory")


def verify_shards(config: JobConfig) -> None:
    """Opens every local shard and reads all of it: checksum, sizes and token ids. DataError names the first bad file."""
    for path, key in _directories(config).items():
        if "://" in path:
            continue
        manifest = read_manifest(path, key)
        for split in SPLITS:
            for shard in manifest.shards(split):
                verify_shard(Path(path), shard, manifest.vocabulary)


def _directories(config: JobConfig) -> dict[str, str]:
    """Path of each data set -> the key that names it first."""
    return {part.path: part.key for part in reversed(parts_of(config))}


def _size(directory: Path, shard: ShardRecord) -> int:
    try:
        return (directory / shard.file).stat().st_size
    except OSError as error:
        raise DataError(f"{directory / shard.file} cannot be read ({error.strerror}) though the manifest lists it: "
                        "prepare the data again") from None


def verify_shard(directory: Path, shard: ShardRecord, vocabulary: int) -> None:
    """Reads all of one shard. DataError says what is wrong with it."""
    file = directory / shard.file
    try:
        found = checksum(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}) though the manifest lists it: prepare the data "
                        "again") from None
    if found != shard.checksum:
        raise DataError(f"{file} is corrupt: its checksum is {found[:12]}..., the manifest says "
                        f"{shard.checksum[:12]}...: restore the file or prepare the data again")
    largest = int(open_shard(directory, shard, vocabulary).tokens.max())
    if largest >= vocabulary:
        raise DataError(f"{file} has token id {largest}, beyond the vocabulary of {vocabulary} (valid are 0 to "
                        f"{vocabulary - 1}): prepare the data again with the right tokenizer")
