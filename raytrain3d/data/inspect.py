"""What is in a data set: counts, lengths, the commonest tokens, beginnings of some documents, and whether it is whole."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raytrain3d.data.check import verify_shard
from raytrain3d.data.manifest import SPLITS, DatasetManifest, Split, read_manifest
from raytrain3d.data.tokenizer import BYTES, TOKENIZER, Tokenizer, open_tokenizer
from raytrain3d.data.tokens import Dataset
from raytrain3d.errors import DataError

Counts = npt.NDArray[np.int64]
COUNTED_TOKENS = 1 << 24
"""Most tokens that the histograms count, from the beginning of a split."""
COMMONEST, SAMPLE_TOKENS = 10, 60


def dataset_table(path: str, *, samples: int, shards: bool = False) -> str:
    """Text for people; `samples` documents of each split are decoded, `shards` lists every file with its checksum. Reads at
    most COUNTED_TOKENS of a split."""
    return "\n".join(_lines(path, samples, shards))


def _lines(path: str, samples: int, shards: bool) -> Iterator[str]:
    manifest = read_manifest(path, "PATH")
    tokenizer = open_tokenizer(BYTES if manifest.tokenizer.name == BYTES else f"{path}/{TOKENIZER}")
    yield f"data set    {path}"
    yield f"tokenizer   {manifest.tokenizer.name}, vocabulary {manifest.vocabulary:,}"
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in manifest.bad.items())
    why = f" ({reasons})" if reasons else ""
    yield f"left out    {manifest.skipped:,} bad records{why}, {manifest.duplicates:,} duplicates"
    yield f"checksum    {_fingerprint(manifest)} (of all shards' checksums)"
    for split in SPLITS:
        if manifest.tokens(split):
            yield ""
            yield from _split_lines(Dataset.open(path, split), manifest, split, tokenizer, samples)
        if shards:
            yield from (f"  {shard.file}  {shard.tokens:,} tokens  {shard.checksum}" for shard in manifest.shards(split))


def _split_lines(dataset: Dataset, manifest: DatasetManifest, split: Split, tokenizer: Tokenizer,
                 samples: int) -> Iterator[str]:
    tokens, documents = manifest.tokens(split), manifest.documents(split)
    ratio = manifest.bytes_per_token(split)
    yield (f"{split}: {tokens:,} tokens in {documents:,} documents and {len(manifest.shards(split)):,} shards, "
           f"{tokens / documents:,.0f} tokens a document" + ("" if ratio is None else f", {ratio:.2f} bytes a token"))
    counts, lengths, counted = _histograms(dataset, manifest.vocabulary)
    where = "" if counted == tokens else f" (of the first {counted:,} tokens)"
    yield f"  documents by length{where}: " + ", ".join(
        f"{count:,} up to {1 << power:,}" for power, count in enumerate(lengths) if count)
    yield f"  {np.count_nonzero(counts):,} of {manifest.vocabulary:,} ids occur{where}; the commonest:"
    for token in np.argsort(-counts, kind="stable")[:COMMONEST]:
        if counts[token]:
            end = token == manifest.tokenizer.end_of_document
            text = "(end of a document)" if end else repr(tokenizer.decode([int(token)]))
            yield f"    {token:>7}  {counts[token] / counted:7.2%}  {text}"
    for number in range(min(samples, dataset.num_rows)):
        row = number * dataset.num_rows // min(samples, dataset.num_rows)
        yield f"  document {row:,}: {tokenizer.decode(dataset.row(row)[:SAMPLE_TOKENS].tolist())!r}"


def _histograms(dataset: Dataset, vocabulary: int) -> tuple[Counts, Counts, int]:
    """(count of each id, number of rows of up to 2 ** n tokens by n, tokens counted)."""
    counts, lengths, counted = np.zeros(vocabulary, dtype=np.int64), np.zeros(64, dtype=np.int64), 0
    for shard in dataset.mapped():
        part = shard.tokens[:COUNTED_TOKENS - counted]
        counts += np.bincount(part, minlength=vocabulary)
        sizes = np.diff(shard.offsets[shard.offsets <= len(part)])
        lengths += np.bincount(np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64), minlength=64)
        counted += len(part)
        if counted == COUNTED_TOKENS:
            break
    return counts, lengths, counted


def _fingerprint(manifest: DatasetManifest) -> str:
    checksums = [shard.checksum for split in SPLITS for shard in manifest.shards(split)]
    return hashlib.sha256("\n".join(checksums).encode()).hexdigest()


def damage(path: str) -> Iterator[str]:
    """What is wrong with each shard that is not whole. Reads everything."""
    manifest = read_manifest(path, "PATH")
    for split in SPLITS:
        for shard in manifest.shards(split):
            try:
                verify_shard(Path(path), shard, manifest.vocabulary)
            except DataError as error:
                yield str(error)
