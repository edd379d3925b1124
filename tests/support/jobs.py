"""Small jobs on synthetic tokens, and how to run one on any number of ranks."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from raytrain3d.checkpoint.manifest import Receipt
from raytrain3d.config import (DataConfig, JobConfig, LearningRateConfig, MeshConfig, ModelConfig, PipelineConfig,
                               RunConfig, TrainConfig)
from raytrain3d.data.micro_batch import MicroBatch
from raytrain3d.parallel.groups import serve_store
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer


def small_job(*, model: dict[str, Any] | None = None, mesh: dict[str, int] | None = None,
              pipeline: dict[str, Any] | None = None, train: dict[str, Any] | None = None) -> JobConfig:
    """Llama-shaped: 3 blocks, hidden 32, 8 heads, vocabulary 101; 4 samples of 16 tokens a step, whose loss takes several
    chunks."""
    shape: dict[str, Any] = {"vocabulary": 101, "hidden": 32, "blocks": 3, "heads": 8, "kv_heads": 4, "feed_forward": 64,
                             "initial_std": 0.1, "vocabulary_multiple": 4, **(model or {})}
    return JobConfig(
        run=RunConfig(name="test"), model=ModelConfig(**shape), mesh=MeshConfig(**(mesh or {})),
        pipeline=PipelineConfig(**(pipeline or {})), data=DataConfig(path="nowhere"),
        train=TrainConfig(**{"steps": 20, "global_batch": 4, "micro_batch": 1, "sequence": 16, "dtype": "fp64",
                             "loss_chunk": 7, **(train or {})}),
        learning_rate=LearningRateConfig(peak=3e-4, warmup=5))


@dataclass(frozen=True, kw_only=True)
class SyntheticSet:
    """What a trainer asks of a validation set."""

    name: str
    largest_share: int
    bytes_per_token: float | None = None


class SyntheticLoader:
    """Tokens as a pure function of (step, sample), with documents of unequal length padded by targets of -100. With
    `data.mask_documents` a sample is two documents, cut at a place of its own."""

    def __init__(self, config: JobConfig, plan: Plan, replica: int) -> None:
        self._config, self._replica = config, replica
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        self._share, self._first = plan.shares[self._replica], plan.first_micro_batch(self._replica)
        self.validation_sets = (SyntheticSet(name="validation", largest_share=max(plan.shares)),)

    def sample(self, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = random.Random(f"{step}/{index}")
        sequence, vocabulary = self._config.train.sequence, self._config.model.vocabulary
        tokens = torch.tensor([draw.randrange(vocabulary) for _ in range(sequence + 1)])
        targets = tokens[1:].clone()
        targets[draw.randrange(sequence // 2, sequence + 1):] = -100
        return tokens[:-1], targets

    def micro_batches(self, step: int) -> list[MicroBatch]:
        size = self._config.train.micro_batch
        found = []
        for i in range(self._first, self._first + self._share):
            samples = tuple(range(i * size, (i + 1) * size))
            tokens, targets = zip(*(self.sample(step, k) for k in samples), strict=True)
            starts = torch.stack([self._starts(step, k) for k in samples]) if self._config.data.mask_documents else None
            found.append(MicroBatch(tokens=torch.stack(tokens), targets=torch.stack(targets), samples=samples,
                                    starts=starts))
        return found

    def _starts(self, step: int, index: int) -> torch.Tensor:
        starts = torch.zeros(self._config.train.sequence, dtype=torch.int64)
        cut = random.Random(f"cut {step}/{index}").randrange(1, len(starts))
        starts[cut:] = cut
        return starts

    def validation(self, number: int) -> list[MicroBatch]:
        return self.micro_batches(0)

    def close(self) -> None:
        pass


def run_rank(config: JobConfig, plan: Plan, rank: int, port: int, generation: int, steps: int,
             before: Callable[[Trainer], None] | None, after: Callable[[Trainer], Any] | None,
             ) -> tuple[list[StepReport], Any]:
    """before(trainer), `steps` steps of one rank from fresh weights, after(trainer)."""
    trainer = Trainer(config, plan, rank, loader=SyntheticLoader(config, plan, plan.mesh.coordinate(rank).data))
    try:
        trainer.connect("127.0.0.1", port, generation)
        trainer.initialize()
        if before is not None:
            before(trainer)
        reports = [trainer.step(n) for n in range(1, steps + 1)]
        return reports, after(trainer) if after is not None else None
    finally:
        trainer.close()


def written(trainer: Trainer, directory: str, step: int) -> Receipt:
    """This rank's shard is written to `directory`."""
    trainer.save(directory, step, behind=True)
    while (receipt := trainer.save_progress().receipt) is None:
        assert not trainer.save_progress().failures, trainer.save_progress().error
        time.sleep(0.01)
    return receipt


class JobRunner:
    """Runs jobs on a pool of ranks; one rank runs in the calling process."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._store = serve_store("127.0.0.1", 0)
        self._generation = 0

    def __call__(self, config: JobConfig, steps: int = 20, *, before: Callable[[Trainer], None] | None = None,
                 after: Callable[[Trainer], Any] | None = None) -> list[tuple[list[StepReport], Any]]:
        """(reports, result of `after`) of every rank."""
        return self.call(run_rank, config, steps, before, after)

    def call(self, function: Callable[..., Any], config: JobConfig, *more: Any) -> list[Any]:
        """function(config, plan, rank, port, generation, *more) on every rank of the job."""
        plan = make_plan(config)
        self._generation += 1
        arguments = [(config, plan, rank, self._store.port, self._generation, *more) for rank in range(plan.mesh.size)]
        return [function(*arguments[0])] if plan.mesh.size == 1 else self._pool.run(function, arguments)


def unsharded(config: JobConfig) -> JobConfig:
    """The same job on one rank, one micro-batch at a time, with the loss from whole logits."""
    return replace(config, mesh=MeshConfig(), pipeline=PipelineConfig(),
                   train=replace(config.train, sharding="none", keep_gathered="op", shard_group=None, recompute="none",
                                 sequence_parallel=False, micro_batch=1, loss_chunk=None, compile="none"))
