"""Published runs of nanotron on H100 nodes, as jobs that a planner can time: what `benchmarks/planner.py` judges by.

Sequence length 4096, vocabulary 131072, bf16 with gradients added up in fp32, 1F1B, sequence parallelism. Ranks fill nodes
tensor first, then data, then pipeline.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, RunConfig, TrainConfig
from raytrain3d.plan.params import ModelSpec, model_spec
from raytrain3d.plan.partition import Stages

VOCABULARY, SEQUENCE = 131072, 4096
MODELS = {
    1.34: ModelConfig(vocabulary=VOCABULARY, hidden=2048, blocks=16, heads=32, feed_forward=8192, tied_embeddings=True),
    3.57: ModelConfig(vocabulary=VOCABULARY, hidden=3072, blocks=28, heads=32, feed_forward=8192, tied_embeddings=True),
    8.86: ModelConfig(vocabulary=VOCABULARY, hidden=4096, blocks=32, heads=32, feed_forward=14336),
    80.0: ModelConfig(vocabulary=VOCABULARY, hidden=8192, blocks=80, heads=64, feed_forward=28672),
}
"""By billions of parameters."""
BATCH_TOKENS = 1.05e6
HEAD_SHARE = 0.96
"""Work of the head that its splits follow, over vocabulary x hidden: the counts that measured steps of 16 stages show."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row: a layout, its measured step and memory."""

    model: float
    nodes: int
    data: int
    pipeline: int
    tensor: int
    micro_batch: int
    micro_batches: int
    zero: int
    step_s: float
    memory_gb: float
    """Of the fullest rank, in 10^9 bytes."""
    stalled: bool
    """Lost seconds to a fault of the run."""

    @property
    def group(self) -> tuple[float, int]:
        """Runs that can stand for each other."""
        return self.model, self.nodes

    @cached_property
    def job(self) -> JobConfig:
        return JobConfig(
            run=RunConfig(name="run"), data=DataConfig(path="unused"), model=MODELS[self.model],
            mesh=MeshConfig(data=self.data, pipeline=self.pipeline, tensor=self.tensor),
            train=TrainConfig(steps=1, global_batch=self.data * self.micro_batch * self.micro_batches,
                              micro_batch=self.micro_batch, sequence=SEQUENCE, dtype="bf16", sequence_parallel=True,
                              loss_chunk=None, sharding="optimizer" if self.zero else "none"))

    @cached_property
    def spec(self) -> ModelSpec:
        return model_spec(self.job.model, self.job.train, self.tensor)

    @cached_property
    def stages(self) -> Stages:
        return split_at_thresholds(MODELS[self.model], self.pipeline)


def split_at_thresholds(model: ModelConfig, num_stages: int) -> Stages:
    """nanotron's split: stage i ends with the first block that brings the work so far above (i + 1) / p of it. The last
    stages may get nothing."""
    block = 4 * model.hidden**2 + 3 * model.hidden * model.feed_forward
    costs = [0.0, *[float(block)] * model.blocks, HEAD_SHARE * model.vocabulary * model.hidden]
    counts, total = [0] * num_stages, sum(costs)
    stage = 0
    for done, _ in zip(accumulate(costs), costs, strict=True):
        counts[stage] += 1
        if done > total * (stage + 1) / num_stages and stage < num_stages - 1:
            stage += 1
    return tuple(pairwise(accumulate(counts, initial=0)))


def read_runs(path: str, stalled: Iterable[tuple[str, ...]]) -> Iterator[Run]:
    """Rows of the file with the usual batch, of models that are known."""
    faulty = set(stalled)
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            data, micro_batch, micro_batches = (int(float(row[key])) for key in ("dp", "mbs", "grad_acc"))
            tokens = data * micro_batch * micro_batches * SEQUENCE
            if float(row["model_b"]) in MODELS and abs(tokens / BATCH_TOKENS - 1) < 0.05:
                yield Run(model=float(row["model_b"]), nodes=int(float(row["nodes"])), data=data, micro_batch=micro_batch,
                          micro_batches=micro_batches, pipeline=int(float(row["pp"])), tensor=int(float(row["tp"])),
                          zero=int(row["zero"]), step_s=tokens / float(row["tok_s"]), memory_gb=float(row["mem_gb"]),
                          stalled=row_key(row) in faulty)


def read_stalled(path: str) -> Iterator[tuple[str, ...]]:
    with open(path, newline="", encoding="utf-8") as file:
        yield from map(row_key, csv.DictReader(file))


def row_key(row: dict[str, str]) -> tuple[str, ...]:
    """The same for a row of either file."""
    numbers = ("model_b", "nodes", "mbs", "grad_acc", "dp", "pp", "tp", "zero", "tok_s_gpu")
    return tuple(f"{float(row[name]):g}" for name in numbers)
