"""The micro-batches of one replica: read, cut into tokens and targets, and one step ahead of training.

What a step reads comes from the sampler alone; the plan only says which part of it is this replica's share. One
background thread prepares the next step while the current one trains.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from raytrain3d.config import JobConfig
from raytrain3d.data.check import check_samples
from raytrain3d.data.sampler import Sampler, deal, spread
from raytrain3d.data.tokens import Dataset
from raytrain3d.plan.params import NO_LOSS
from raytrain3d.plan.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples that go through the pipeline together."""

    tokens: torch.Tensor
    """(batch, seq), int64."""
    targets: torch.Tensor
    """(batch, seq), int64: the token after each, or NO_LOSS."""
    samples: tuple[int, ...]
    """Index of each row inside the global batch of the step (or among the chosen validation samples), whatever the
    layout."""

    @property
    def num_loss_tokens(self) -> int:
        return int((self.targets != NO_LOSS).sum())


def read_micro_batch(dataset: Dataset, sequence: int, numbers: Sequence[int], samples: Sequence[int]) -> MicroBatch:
    """Samples `numbers` of `dataset` as the first rows; rows left over (`samples` is longer) are padding without loss.
    """
    tokens = np.zeros((len(samples), sequence), dtype=np.int64)
    targets = np.full((len(samples), sequence), NO_LOSS, dtype=np.int64)
    for row, number in enumerate(numbers):
        sample = dataset.sample(number, sequence)
        tokens[row], targets[row] = sample[:-1], sample[1:]
    return MicroBatch(tokens=torch.from_numpy(tokens), targets=torch.from_numpy(targets), samples=tuple(samples))


class Loader:
    """Micro-batches of one replica. Raises DataError when the data does not fit the job."""

    def __init__(self, config: JobConfig, plan: Plan, replica: int) -> None:
        train = config.train
        self._train = Dataset.open(config.data.path, "train")
        self._validation = Dataset.open(config.data.path, "validation")
        check_samples(config, self._train.manifest)
        self._sampler = Sampler(seed=train.seed, num_samples=self._train.num_samples(train.sequence),
                                global_batch=train.global_batch)
        self._steps, self._sequence, self._micro_batch = train.steps, train.sequence, train.micro_batch
        self._replica = replica
        self._share = _share(plan, replica)
        self._num_validation = min(config.evaluate.samples, self._validation.num_samples(train.sequence))
        self._deal_validation(plan)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: dict[int, Future[list[MicroBatch]]] = {}

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """This replica's share of `step` (maybe empty); steps count from 1. An error of the thread is raised here."""
        future = self._ahead.pop(step, None) or self._thread.submit(self._read, step)
        self._ahead.clear()
        if step < self._steps:
            self._ahead[step + 1] = self._thread.submit(self._read, step + 1)
        return future.result()

    def validation(self) -> list[MicroBatch]:
        """This replica's share of the validation samples (maybe empty), the same at every call."""
        return [self._read_validation(piece) for piece in self._validation_share]

    def adopt(self, plan: Plan) -> None:
        """From the next step on the replicas' shares are those of `plan`."""
        self._share = _share(plan, self._replica)
        self._deal_validation(plan)
        self._ahead.clear()

    def _deal_validation(self, plan: Plan) -> None:
        shares = deal(-(-self._num_validation // self._micro_batch), len(plan.replicas))
        self._validation_share = shares[plan.replicas.index(self._replica)]
        self.largest_validation_share = max(map(len, shares))
        """Micro-batches that `validation` gives to the replica with the most."""

    def close(self) -> None:
        """Ends the thread; may be called again."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> list[MicroBatch]:
        return [self._read_training(step, piece) for piece in self._share]

    def _read_training(self, step: int, piece: int) -> MicroBatch:
        places = self._places(piece)
        return read_micro_batch(self._train, self._sequence, self._sampler.samples(step, places), places)

    def _read_validation(self, piece: int) -> MicroBatch:
        """Samples from all over the split, which lies document by document: its first ones would be a few documents."""
        places, chosen = self._places(piece), self._num_validation
        total = self._validation.num_samples(self._sequence)
        numbers = spread(range(places.start, min(places.stop, chosen)), chosen, total)
        return read_micro_batch(self._validation, self._sequence, numbers, places)

    def _places(self, piece: int) -> range:
        return range(piece * self._micro_batch, (piece + 1) * self._micro_batch)


def _share(plan: Plan, replica: int) -> range:
    """Micro-batches of the global batch that are the replica's."""
    first = plan.first_micro_batch(replica)
    return range(first, first + plan.shares[replica])
