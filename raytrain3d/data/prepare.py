"""Text files to a dataset: tokenized one after the other, cut into shards, and made to exist by one rename.

Memory holds one shard and one document piece, whatever the size of the text. Everything is written into a directory
beside the wanted one, which gets its name only when whole: a killed preparation leaves nothing that looks like data.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from raytrain3d.config import JobConfig
from raytrain3d.data.bigram import LARGEST_VOCABULARY, bigram_entropy
from raytrain3d.data.documents import Document, assign_splits, find_documents
from raytrain3d.data.manifest import DatasetManifest, Split, write_manifest
from raytrain3d.data.shards import SplitWriter
from raytrain3d.data.tokenizer import Tokenizer, open_tokenizer
from raytrain3d.data.tokens import Dataset
from raytrain3d.errors import DataError

SHARD_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareProgress:
    """How far a preparation is."""

    documents: int
    num_documents: int
    tokens: int


Progress = Callable[[PrepareProgress], None]


def prepare(text: Sequence[str], path: str, tokenizer: str = "bytes", validation_fraction: float = 0.05, *,
            shard_tokens: int = SHARD_TOKENS, progress: Progress | None = None) -> DatasetManifest:
    """Makes the dataset `path` (absent, or an empty directory) from the text files that the patterns `text` match.

    `tokenizer` is `bytes` or the path of a `tokenizer.json`; `shard_tokens` the most tokens in a shard; `progress` is
    called after each document. Documents that are not valid UTF-8 are skipped and counted, except with bytes.
    Raises DataError when there is nothing to read, something in the way, or the disk refuses.
    """
    target = Path(path).absolute()
    _check_target(target)
    documents = find_documents(text)
    splits = assign_splits(documents, validation_fraction)
    made = open_tokenizer(tokenizer)
    partial = target.with_name(f".{target.name}.partial-{uuid4().hex[:8]}")
    try:
        partial.mkdir(parents=True)
        manifest = _write(partial, list(zip(documents, splits, strict=True)), made, shard_tokens, progress)
        partial.rename(target)
    except OSError as error:
        raise DataError(f"data.path is '{path}': cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def prepare_if_missing(config: JobConfig, progress: Progress | None = None) -> DatasetManifest | None:
    """Prepares `data.path` from `data.text` when there is a text and no such path; None when nothing was to do."""
    data = config.data
    if not data.text or Path(data.path).exists():
        return None
    return prepare(data.text, data.path, data.tokenizer, data.validation_fraction, progress=progress)


def _check_target(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise DataError(f"data.path is '{target}': already exists, so it is not prepared again; remove it or name "
                        "another directory")


def _write(directory: Path, documents: Sequence[tuple[Document, Split]], tokenizer: Tokenizer, shard_tokens: int,
           progress: Progress | None) -> DatasetManifest:
    writers: dict[Split, SplitWriter] = {
        split: SplitWriter(directory, split, tokenizer, shard_tokens) for split in ("train", "validation")}
    skipped = 0
    for number, (document, split) in enumerate(documents, start=1):
        skipped += not _add(writers[split], document)
        if progress is not None:
            tokens = sum(writer.num_tokens for writer in writers.values())
            progress(PrepareProgress(documents=number, num_documents=len(documents), tokens=tokens))
    manifest = DatasetManifest(vocabulary=tokenizer.vocabulary, tokenizer=tokenizer.record, skipped=skipped,
                               train=writers["train"].finish(), validation=writers["validation"].finish())
    manifest = replace(manifest, bigram_entropy=_entropy(directory, manifest))
    tokenizer.save(directory)
    write_manifest(directory, manifest)
    return manifest


def _add(writer: SplitWriter, document: Document) -> bool:
    """False when the document was skipped."""
    try:
        writer.add(document.file)
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise DataError(f"{document.file} cannot be read ({error.strerror})") from None
    return True


def _entropy(directory: Path, manifest: DatasetManifest) -> float | None:
    if manifest.vocabulary > LARGEST_VOCABULARY:
        return None
    train, validation = (Dataset(directory, manifest, split) for split in ("train", "validation"))
    return bigram_entropy(train.shards(), validation.shards(), manifest.vocabulary)
