"""What is kept on the host changes no result: losses, norms and weights are the same to the bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import JobRunner, SyntheticLoader, small_job, written

from raytrain3d.checkpoint.store import commit, step_directory
from raytrain3d.config import JobConfig
from raytrain3d.plan.plan import Plan
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer

pytestmark = pytest.mark.dist
ON_HOST = {"offload_activations": True, "offload_optimizer": True}


def offloaded(config: JobConfig) -> JobConfig:
    return replace(config, train=replace(config.train, **ON_HOST))


def losses(reports: list[StepReport]) -> list[tuple[str, str]]:
    return [(report.loss.hex(), report.gradient_norm.hex()) for report in reports]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {f"{piece.name}/{piece.rectangle.offset}": piece.tensor.clone()
            for state in trainer.states.values() for piece in state.pieces() if piece.kind == "weight"}


def half_run(config: JobConfig, plan: Plan, rank: int, port: int, generation: int, directory: str,
             resume: bool) -> tuple[list[StepReport], Any]:
    """Steps 1-3 and a save, or a load and steps 4-6."""
    trainer = Trainer(config, plan, rank, loader=SyntheticLoader(config, plan, 0))  # type: ignore[arg-type]
    try:
        trainer.connect("127.0.0.1", port, generation)
        if resume:
            trainer.load(directory)
            return [trainer.step(n) for n in range(4, 7)], None
        trainer.initialize()
        return [trainer.step(n) for n in range(1, 4)], written(trainer, directory, 3)
    finally:
        trainer.close()


@pytest.mark.parametrize(("schedule", "train", "model"), [
    ("1f1b", {"dtype": "fp32"}, {"dropout": 0.1, "attention_dropout": 0.1}),
    ("zb_h1", {"dtype": "bf16", "sharding": "optimizer"}, {"tied_embeddings": True, "freeze": ("blocks.1",)}),
    ("gpipe", {"dtype": "fp32", "loss_chunk": None}, {"family": "gpt2", "kv_heads": 8}),
], ids=["dropout", "bf16-split-sharded-tied-frozen", "gpt2"])
def test_bits_are_those_of_the_device(run_job: JobRunner, schedule: str, train: dict[str, Any],
                                      model: dict[str, Any]) -> None:
    config = small_job(mesh={"data": 2, "pipeline": 2}, pipeline={"schedule": schedule}, train=train, model=model)
    for (reports, buffers), (same_reports, same_buffers) in zip(
            run_job(config, 4, after=weights), run_job(offloaded(config), 4, after=weights), strict=True):
        assert losses(reports) == losses(same_reports)
        assert all(torch.equal(values, same_buffers[name]) for name, values in buffers.items())


@pytest.mark.parametrize("first_on_host", [False, True])
def test_a_resume_may_bring_state_to_the_host_and_back(run_job: JobRunner, tmp_path: Path, first_on_host: bool) -> None:
    config = small_job(train={"dtype": "fp32"})
    early, late = (config, offloaded(config)) if not first_on_host else (offloaded(config), config)
    directory = step_directory(str(tmp_path), 3)
    first = run_job.call(half_run, early, directory, False)
    commit(directory, 3, [receipt for _, receipt in first], config=early)
    second = run_job.call(half_run, late, directory, True)
    assert losses(first[0][0] + second[0][0]) == losses(run_job(config, 6)[0][0])
