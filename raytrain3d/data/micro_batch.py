"""Samples that go through the pipeline together, read from the mapped shards straight into the batch.

A rank reads what it needs: the first stage tokens, the last one targets, and with documents told apart every stage where
they begin, for which offsets are enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from raytrain3d.data.tokens import Dataset
from raytrain3d.plan.params import NO_LOSS


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples that go through the pipeline together. What a rank does not need is empty, (batch, 0)."""

    tokens: torch.Tensor
    """(batch, seq), int64."""
    targets: torch.Tensor
    """(batch, seq), int64: the token after each, or NO_LOSS."""
    samples: tuple[int, ...]
    """Index of each row inside the global batch of the step (or among the chosen validation samples), whatever the
    layout."""
    starts: torch.Tensor | None = None
    """(batch, seq), int64: the place in the row where the token's document begins, 0 if before the row. Absent where
    documents are not told apart."""

    @property
    def num_loss_tokens(self) -> int:
        return int((self.targets != NO_LOSS).sum())

    def pinned(self) -> "MicroBatch":
        """A copy in memory that a GPU reads by itself."""
        starts = None if self.starts is None else self.starts.pin_memory()
        return replace(self, tokens=self.tokens.pin_memory(), targets=self.targets.pin_memory(), starts=starts)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReader:
    """How samples become micro-batches on one rank."""

    sequence: int
    mask_documents: bool
    tokens: bool = True
    """Whether this rank needs tokens."""
    targets: bool = True
    """Whether this rank needs targets."""

    def __call__(self, rows: Sequence[tuple[Dataset, int]], samples: Sequence[int]) -> MicroBatch:
        """The given samples, (data set, number), as the first rows; rows left over (`samples` is longer) are padding without
        loss."""
        shape = len(samples), self.sequence
        tokens = np.empty(shape if self.tokens else (len(samples), 0), dtype=np.int64)
        targets = np.empty(shape if self.targets else (len(samples), 0), dtype=np.int64)
        tokens[len(rows):], targets[len(rows):] = 0, NO_LOSS
        starts = np.zeros(shape, dtype=np.int64) if self.mask_documents else None
        for row, (dataset, number) in enumerate(rows):
            if self.tokens or self.targets:
                sample = dataset.sample(number, self.sequence)
            if self.tokens:
                tokens[row] = sample[:-1]
            if self.targets:
                targets[row] = sample[1:]
            if starts is not None:
                self._mark(dataset.document_starts(number, self.sequence), starts[row], targets[row])
        return MicroBatch(tokens=torch.from_numpy(tokens), targets=torch.from_numpy(targets), samples=tuple(samples),
                          starts=None if starts is None else torch.from_numpy(starts))

    def _mark(self, begins: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """begins: places in the sample where documents begin. No document is predicted from the one before."""
        if self.targets:
            targets[begins[begins > 0] - 1] = NO_LOSS
        inside = begins[begins < self.sequence]
        starts[inside] = inside
        np.maximum.accumulate(starts, out=starts)
