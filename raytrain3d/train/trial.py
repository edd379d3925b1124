"""A trainer that needs no data: the same made-up tokens at every step. What `profile` and `tune` measure with."""

import resource
from dataclasses import replace

import torch

from raytrain3d.config import JobConfig
from raytrain3d.data.micro_batch import MicroBatch
from raytrain3d.parallel.commit import Agreement
from raytrain3d.parallel.pipeline import PipelineRun
from raytrain3d.plan.plan import Plan
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer

KIB = 1024


class MadeUpData:
    """In place of a `Loader`: random tokens, whole samples of one document, nothing to validate on."""

    validation_sets = ()

    def __init__(self, config: JobConfig, plan: Plan, replica: int) -> None:
        train = config.train
        shape = (train.micro_batch, train.sequence + 1)
        drawn = torch.randint(config.model.vocabulary, shape, generator=torch.Generator().manual_seed(train.seed))
        self._tokens, self._targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        self._starts = torch.zeros_like(self._tokens) if config.data.mask_documents else None
        self._replica = replica
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        self._share = plan.shares[self._replica]

    def micro_batches(self, step: int) -> list[MicroBatch]:
        rows = self._tokens.shape[0]
        return [MicroBatch(tokens=self._tokens, targets=self._targets, starts=self._starts,
                           samples=tuple(range(i * rows, (i + 1) * rows))) for i in range(self._share)]

    def close(self) -> None:
        pass


class TrialTrainer(Trainer):
    """Of a CPU's rank it reports the most memory that its process had, as a GPU's rank does anyway."""

    def __init__(self, config: JobConfig, plan: Plan, rank: int) -> None:
        super().__init__(config, plan, rank,
                         loader=MadeUpData(config, plan, plan.mesh.coordinate(rank).data))  # type: ignore[arg-type]

    def _report(self, n: int, agreed: Agreement, run: PipelineRun | None) -> StepReport:
        report = super()._report(n, agreed, run)
        return report if self._device.type == "cuda" else replace(report, memory_bytes=most_resident())


def most_resident() -> int:
    """Bytes of this process that were resident at a time, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
