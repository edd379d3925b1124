"""How well a token can be told from the one before alone: a number that a trained model has to beat."""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from raytrain3d.data.tokens import Tokens

LARGEST_VOCABULARY = 1024
"""Above this the table of counts is too sparse to mean much, and large."""
_CHUNK = 1 << 20


def bigram_entropy(train: Iterable[Tokens], validation: Iterable[Tokens], vocabulary: int) -> float | None:
    """Conditional entropy of a token given the one before, in nats: probabilities from counts of `train` with add-one
    smoothing over the vocabulary, mean over the pairs of `validation`. None when there is no pair in either."""
    counts, asked = count_pairs(train, vocabulary), count_pairs(validation, vocabulary)
    if not counts.any() or not asked.any():
        return None
    log_probability = np.log(counts + 1.0) - np.log(counts.sum(axis=1, keepdims=True) + float(vocabulary))
    return float(-(asked * log_probability).sum() / asked.sum())


def count_pairs(shards: Iterable[Tokens], vocabulary: int) -> npt.NDArray[np.int64]:
    """How often each token follows each other one in a stream, (vocabulary, vocabulary), [before, after]."""
    counts = np.zeros(vocabulary * vocabulary, dtype=np.int64)
    before = np.empty(0, dtype=np.int64)
    for chunk in _chunks(shards):
        stream = np.concatenate([before, chunk.astype(np.int64)])
        counts += np.bincount(stream[:-1] * vocabulary + stream[1:], minlength=len(counts))
        before = stream[-1:]
    return counts.reshape(vocabulary, vocabulary)


def _chunks(shards: Iterable[Tokens]) -> Iterator[Tokens]:
    for shard in shards:
        for first in range(0, len(shard), _CHUNK):
            yield shard[first:first + _CHUNK]
