"""The micro-batches of one replica, one step ahead of training.

What a step reads comes from the sampler alone; the plan only says which part of it is this replica's share. One
background thread prepares the next step while the current one trains.
"""

from concurrent.futures import Future, ThreadPoolExecutor

from raytrain3d.config import EvaluationSetConfig, JobConfig
from raytrain3d.data.check import check_samples
from raytrain3d.data.folder import Cache
from raytrain3d.data.micro_batch import BatchReader, MicroBatch
from raytrain3d.data.mixture import Mixture
from raytrain3d.data.sampler import Sampler, deal, spread
from raytrain3d.data.tokens import Dataset
from raytrain3d.plan.plan import Plan


class ValidationSet:
    """The chosen samples of one validation set, dealt to the replicas."""

    def __init__(self, given: EvaluationSetConfig, config: JobConfig, plan: Plan) -> None:
        self.name = given.name
        self.dataset = Dataset.open(given.path, given.split, Cache.of(config.data))
        self._total = self.dataset.num_samples(config.train.sequence)
        self._chosen = min(config.evaluate.samples, self._total)
        self._num_micro_batches = -(-self._chosen // config.train.micro_batch)
        self.deal(plan)
        self.bytes_per_token = self.dataset.manifest.bytes_per_token(given.split)
        """Of its text; None when the data set does not say."""

    def deal(self, plan: Plan) -> None:
        """From now on to the replicas of `plan`."""
        shares = deal(self._num_micro_batches, len(plan.replicas))
        self.shares = dict(zip(plan.replicas, shares, strict=True))
        self.largest_share = max(map(len, shares))
        """Micro-batches of the replica with the most."""

    def rows(self, places: range) -> list[tuple[Dataset, int]]:
        """Samples from all over the split, which lies document by document: its first ones would be a few documents."""
        numbers = spread(range(places.start, min(places.stop, self._chosen)), self._chosen, self._total)
        return [(self.dataset, number) for number in numbers]


class Loader:
    """Micro-batches of one replica. Raises DataError when the data does not fit the job."""

    def __init__(self, config: JobConfig, plan: Plan, replica: int, *, tokens: bool = True, targets: bool = True) -> None:
        """tokens, targets: whether this rank needs them. For ranks on GPUs micro-batches lie in pinned memory."""
        train = config.train
        cache = Cache.of(config.data)
        self._sources = [Dataset.open(source.path, "train", cache) for source in config.data.all_sources]
        check_samples(config)
        samples = [source.num_samples(train.sequence) for source in self._sources]
        mixture = Mixture.of(config, [source.num_tokens for source in self._sources], samples)
        self._sampler = Sampler(seed=train.seed, sizes=tuple(samples), mixture=mixture, global_batch=train.global_batch)
        self._steps, self._micro_batch = train.steps, train.micro_batch
        self._read_rows = BatchReader(sequence=train.sequence, mask_documents=config.data.mask_documents, tokens=tokens,
                                      targets=targets)
        self._replica, self._pinned = replica, plan.device == "gpu"
        self._share = _share(plan, replica)
        self.validation_sets = tuple(ValidationSet(given, config, plan) for given in config.evaluation_sets)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: dict[int, Future[list[MicroBatch]]] = {}

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """This replica's share of `step` (maybe empty); steps count from 1. An error of the thread is raised here."""
        future = self._ahead.pop(step, None) or self._thread.submit(self._read, step)
        self._ahead.clear()
        if step < self._steps:
            self._ahead[step + 1] = self._thread.submit(self._read, step + 1)
        return future.result()

    def validation(self, number: int) -> list[MicroBatch]:
        """This replica's share of a validation set's samples (maybe empty), the same at every call."""
        chosen = self.validation_sets[number]
        return [self._read_rows(chosen.rows(places), places)
                for places in map(self._places, chosen.shares[self._replica])]

    def adopt(self, plan: Plan) -> None:
        """From the next step on the replicas' shares are those of `plan`."""
        self._share = _share(plan, self._replica)
        for chosen in self.validation_sets:
            chosen.deal(plan)
        self._ahead.clear()

    def close(self) -> None:
        """Ends the thread; may be called again."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> list[MicroBatch]:
        read = [self._read_rows([(self._sources[source], number) for source, number in self._sampler.samples(step, places)],
                                places) for places in map(self._places, self._share)]
        return [micro_batch.pinned() for micro_batch in read] if self._pinned else read

    def _places(self, piece: int) -> range:
        """Of a micro-batch in the global batch, or among the chosen validation samples."""
        return range(piece * self._micro_batch, (piece + 1) * self._micro_batch)


def _share(plan: Plan, replica: int) -> range:
    """Micro-batches of the global batch that are the replica's."""
    first = plan.first_micro_batch(replica)
    return range(first, first + plan.shares[replica])
