"""Documents told apart in a micro-batch: where each begins, and no loss from one to the next."""

from pathlib import Path

import numpy as np
import pytest

from raytrain3d.data.manifest import DatasetManifest, ShardRecord, TokenizerRecord, write_manifest
from raytrain3d.data.micro_batch import BatchReader
from raytrain3d.data.tokens import Dataset, write_shard
from raytrain3d.plan.params import NO_LOSS

SEQUENCE = 8


@pytest.fixture
def lengths() -> list[int]:
    """Tokens of the documents, ends included: some fill samples exactly, some are longer than a shard, some are empty."""
    return [3, 8, 1, 1, 37, 7, 1, 16, 8, 5, 90, 2]


@pytest.fixture
def stream(tmp_path: Path, lengths: list[int]) -> Dataset:
    """Shards of 20 tokens; tokens of document n are n, its end is 99."""
    tokens = np.concatenate([np.array([number] * (length - 1) + [99]) for number, length in enumerate(lengths)])
    begins = {int(end) for end in np.cumsum([0, *lengths])}
    shards: list[ShardRecord] = []
    for first in range(0, len(tokens), 20):
        part = tokens[first:first + 20].astype(np.uint8)
        inside = sorted({0, len(part)} | {begin - first for begin in begins if first < begin < first + len(part)})
        shards.append(write_shard(tmp_path / f"train-{first:05d}.arrow", part, inside, int((part == 99).sum())))
    write_manifest(tmp_path, DatasetManifest(
        vocabulary=100, tokenizer=TokenizerRecord(name="none", fingerprint="none", end_of_document=99), train=tuple(shards),
        validation=()))
    return Dataset.open(str(tmp_path), "train")


def test_starts_and_targets_against_a_plain_loop(stream: Dataset, lengths: list[int]) -> None:
    begins = {int(end) for end in np.cumsum([0, *lengths])}
    read, plain = (BatchReader(sequence=SEQUENCE, mask_documents=masked) for masked in (True, False))
    for number in range(stream.num_samples(SEQUENCE)):
        masked, whole, first = read([(stream, number)], (0,)), plain([(stream, number)], (0,)), number * SEQUENCE
        start = 0
        assert masked.starts is not None
        for place in range(SEQUENCE):
            start = place if first + place in begins else start
            assert masked.starts[0, place] == start
            crosses = first + place + 1 in begins
            assert masked.targets[0, place] == (NO_LOSS if crosses else whole.targets[0, place])
        assert masked.tokens.equal(whole.tokens)
        assert whole.starts is None


def test_ranks_read_only_what_they_need(stream: Dataset) -> None:
    whole = BatchReader(sequence=SEQUENCE, mask_documents=True)([(stream, 3)], (0, 1))
    middle = BatchReader(sequence=SEQUENCE, mask_documents=True, tokens=False, targets=False)([(stream, 3)], (0, 1))
    last = BatchReader(sequence=SEQUENCE, mask_documents=True, tokens=False)([(stream, 3)], (0, 1))
    assert middle.tokens.shape == middle.targets.shape == last.tokens.shape == (2, 0)
    assert last.targets.equal(whole.targets)
    for part in (middle, last):
        assert part.starts is not None
        assert whole.starts is not None
        assert part.starts.equal(whole.starts)


def test_padding_has_no_loss() -> None:
    padding = BatchReader(sequence=SEQUENCE, mask_documents=True)([], (4, 5))
    assert padding.num_loss_tokens == 0
    assert padding.starts is not None
    assert not padding.starts.any()
    assert padding.tokens.shape == (2, SEQUENCE)
