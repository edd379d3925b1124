"""Shards on disk and the stream of tokens read from them."""

from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from raytrain3d.data.documents import assign_splits, find_inputs
from raytrain3d.data.manifest import SPLITS, DatasetManifest, Split
from raytrain3d.data.tokens import Dataset, token_type


def _stream(corpus: Path, split: Split) -> list[int]:
    return [token for document in _documents(corpus, split) for token in document]


def _documents(corpus: Path, split: Split) -> list[list[int]]:
    inputs = find_inputs([f"{corpus}/**/*.txt"])
    splits = assign_splits([each.name for each in inputs], 0.2)
    return [[*Path(each.location).read_bytes(), 256] for each, own in zip(inputs, splits, strict=True)
            if own == split and each.size]


@pytest.mark.parametrize(("vocabulary", "kind"), [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"),
                                                  (65537, "uint32")])
def test_smallest_type(vocabulary: int, kind: str) -> None:
    assert token_type(vocabulary) == np.dtype(kind)


@pytest.mark.parametrize("split", SPLITS)
def test_samples_are_the_documents_one_after_the_other(
        corpus: Path, dataset: tuple[Path, DatasetManifest], split: Split) -> None:
    stream, opened = _stream(corpus, split), Dataset.open(str(dataset[0]), split)
    assert opened.num_tokens == len(stream) > 500
    for sequence in (1, 16, 499, 777):
        assert opened.num_samples(sequence) == (len(stream) - 1) // sequence
        for index in range(opened.num_samples(sequence)):
            expected = stream[index * sequence:index * sequence + sequence + 1]
            assert opened.sample(index, sequence).tolist() == expected


def test_sample_outside_is_an_error(dataset: tuple[Path, DatasetManifest]) -> None:
    opened = Dataset.open(str(dataset[0]), "train")
    for index in (-1, opened.num_samples(16)):
        with pytest.raises(IndexError):
            opened.sample(index, 16)


def test_a_sample_inside_a_shard_is_a_view_of_the_file(dataset: tuple[Path, DatasetManifest]) -> None:
    opened = Dataset.open(str(dataset[0]), "train")
    assert np.shares_memory(opened.sample(0, 16), next(opened.shards()))
    assert not opened.sample(0, 16).flags.writeable


def test_shards_are_bounded_arrow_files_with_a_row_per_document(
        corpus: Path, dataset: tuple[Path, DatasetManifest]) -> None:
    path, manifest = dataset
    rows: list[list[int]] = []
    for shard in manifest.train:
        column = pa.ipc.open_file(str(path / shard.file)).read_all().column("tokens")
        assert column.type == pa.list_(pa.uint16())
        assert shard.tokens <= 500
        pieces = column.to_pylist()
        assert shard.tokens == sum(map(len, pieces))
        assert shard.documents == sum(piece[-1] == 256 for piece in pieces)
        if rows and rows[-1][-1] != 256:
            rows[-1] += pieces.pop(0)
        rows += pieces
    assert rows == _documents(corpus, "train")
