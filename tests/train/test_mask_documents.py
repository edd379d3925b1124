"""Packed documents are to the model as if each stood alone, in every layout."""

from dataclasses import replace

import pytest
import torch
from jobs import JobRunner, SyntheticLoader, small_job
from parity import Reference, check_parity

from raytrain3d.config import JobConfig
from raytrain3d.data.micro_batch import MicroBatch
from raytrain3d.plan.params import NO_LOSS
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.train.trainer import Trainer

pytestmark = pytest.mark.dist
LENGTHS = (5, 1, 7, 3)
"""Of the documents in a sample."""


def masked(config: JobConfig) -> JobConfig:
    return replace(config, data=replace(config.data, mask_documents=True))


class GivenLoader(SyntheticLoader):
    """One micro-batch, for validation."""

    def __init__(self, config: JobConfig, batch: MicroBatch) -> None:
        super().__init__(config, make_plan(config), 0)
        self._batch = batch

    def validation(self, number: int) -> list[MicroBatch]:
        return [self._batch]


def losses(config: JobConfig, plan: Plan, rank: int, port: int, generation: int, batches: list[MicroBatch]) -> list[float]:
    """Summed loss of each micro-batch by this rank's evaluation, weights being those that the seed gives."""
    found = []
    for number, batch in enumerate(batches):
        own = replace(config, train=replace(config.train, global_batch=len(batch.samples), micro_batch=len(batch.samples)))
        trainer = Trainer(own, make_plan(own), rank, loader=GivenLoader(own, batch))  # type: ignore[arg-type]
        try:
            trainer.connect("127.0.0.1", port, 100 * generation + number)
            trainer.initialize()
            (report,) = trainer.evaluate().sets
            found.append(report.loss * report.tokens)
        finally:
            trainer.close()
    return found


def packed_and_alone() -> tuple[MicroBatch, list[MicroBatch]]:
    tokens = torch.randint(101, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    targets, starts = tokens.roll(-1, dims=1), torch.zeros_like(tokens)
    alone, first = [], 0
    for length in LENGTHS:
        own = slice(first, first + length)
        targets[0, first + length - 1] = NO_LOSS
        starts[0, own] = first
        first += length
        row, wanted = torch.zeros_like(tokens), torch.full_like(tokens, NO_LOSS)  # alone at the beginning of a row
        row[0, :length], wanted[0, :length] = tokens[0, own], targets[0, own]
        alone.append(MicroBatch(tokens=row, targets=wanted, samples=(0,)))
    return MicroBatch(tokens=tokens, targets=targets, samples=(0,), starts=starts), alone


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("mesh", [{}, {"tensor": 2, "pipeline": 2}], ids=["alone", "tensor 2, pipeline 2"])
def test_loss_of_packed_documents_is_that_of_the_documents_alone(family: str, mesh: dict[str, int],
                                                                 run_job: JobRunner) -> None:
    packed, alone = packed_and_alone()
    config = small_job(model={"family": family, "kv_heads": 8 if family == "gpt2" else 4}, mesh=mesh,
                       train={"dtype": "fp32", "micro_batch": 1, "global_batch": 1})
    found = run_job.call(losses, config, [packed, *alone])
    for together, *separate in found:
        assert together == pytest.approx(sum(separate), rel=1e-5)
    unmasked = replace(packed, starts=None)
    (other, *_), *_ = run_job.call(losses, config, [unmasked])
    assert abs(other - found[0][0]) > 1e-3 * abs(other)


@pytest.mark.parametrize("traits", [
    {"mesh": {"tensor": 2, "pipeline": 2}},
    {"mesh": {"tensor": 2, "pipeline": 2}, "train": {"sequence_parallel": True, "recompute": "selective"}},
    {"mesh": {"data": 2, "pipeline": 3}, "model": {"family": "gpt2", "kv_heads": 8}, "train": {"recompute": "full"}},
    {"mesh": {"tensor": 2}, "model": {"attention_dropout": 0.1}, "train": {"micro_batch": 2}},
], ids=["plain", "sequence parallel", "gpt2", "attention dropout"])
def test_layouts_train_alike(traits: dict[str, dict[str, object]], run_job: JobRunner, reference: Reference) -> None:
    check_parity(run_job, reference, masked(small_job(**traits)))  # type: ignore[arg-type]


def test_without_masking_attention_is_the_fused_causal_one(run_job: JobRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def spy(*tensors: torch.Tensor, is_causal: bool = False, **more: object) -> torch.Tensor:
        seen.append(is_causal and "attn_mask" not in more)
        return fused(*tensors, is_causal=is_causal, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    run_job(small_job(), 1)
    assert set(seen) == {True}
    seen.clear()
    run_job(masked(small_job()), 1)
    assert set(seen) == {False}


class PaddingLoader(SyntheticLoader):
    """No target anywhere in the second micro-batch of a step, and in the second step nowhere at all."""

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return [replace(batch, targets=torch.full_like(batch.targets, NO_LOSS)) if step == 2 or number == 1 else batch
                for number, batch in enumerate(super().micro_batches(step))]


def padded_steps(config: JobConfig, plan: Plan, rank: int, port: int, generation: int) -> list[tuple[int, float, float]]:
    trainer = Trainer(config, plan, rank, loader=PaddingLoader(config, plan, 0))  # type: ignore[arg-type]
    try:
        trainer.connect("127.0.0.1", port, generation)
        trainer.initialize()
        return [(report.tokens, report.loss, report.gradient_norm) for report in map(trainer.step, (1, 2, 3))]
    finally:
        trainer.close()


@pytest.mark.parametrize("loss_chunk", [7, None])
def test_labels_that_are_all_padding_make_no_nan(loss_chunk: int | None, run_job: JobRunner) -> None:
    for first, second, third in run_job.call(padded_steps, masked(small_job(mesh={"pipeline": 2},
                                                                            train={"loss_chunk": loss_chunk}))):
        assert second == (0, 0.0, 0.0)
        for tokens, loss, norm in (first, third):
            assert tokens > 0
            assert 0 < loss < 10
            assert 0 < norm < 100
