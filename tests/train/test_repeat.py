"""The same run again: to the bit on the same layout, the same initial weights on every layout, and through a checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import JobRunner, SyntheticLoader, small_job, written
from parity import assemble, gradients_and_weights, keep_last_gradients

from raytrain3d.checkpoint.store import commit, step_directory
from raytrain3d.config import JobConfig
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.train.report import Origin, StepReport
from raytrain3d.train.trainer import Trainer

pytestmark = pytest.mark.dist
MESHES: list[dict[str, int]] = [{"data": 2, "pipeline": 2, "tensor": 2}, {"pipeline": 3}, {"tensor": 4}, {"data": 3}]


def losses(reports: list[StepReport]) -> list[tuple[str, str]]:
    return [(report.loss.hex(), report.gradient_norm.hex()) for report in reports]


def every_buffer(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {f"{piece.name}/{piece.kind}/{piece.rectangle.offset}": piece.tensor.clone()
            for state in trainer.states.values() for piece in state.pieces()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_runs_are_equal_to_the_bit(run_job: JobRunner, dtype: str) -> None:
    config = small_job(mesh=MESHES[0], train={"dtype": dtype, "sharding": "optimizer"}, model={"dropout": 0.1})
    first, second = (run_job(config, 8, after=every_buffer) for _ in range(2))
    for (reports, buffers), (same_reports, same_buffers) in zip(first, second, strict=True):
        assert losses(reports) == losses(same_reports)
        assert all(torch.equal(values, same_buffers[name]) for name, values in buffers.items())


DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}


@pytest.mark.parametrize(("model", "dtype"), [({}, "bf16"), ({**DROPOUT, "family": "gpt2", "kv_heads": 8}, "fp32")],
                         ids=["llama-bf16", "gpt2-dropout-fp32"])
def test_recompute_changes_no_bit(run_job: JobRunner, model: dict[str, Any], dtype: str) -> None:
    plain = small_job(mesh={"pipeline": 2, "tensor": 2}, pipeline={"layers": (3, 2)}, model=model,
                      train={"dtype": dtype, "steps": 5})
    expected = run_job(plain, 3, after=every_buffer)
    for pipeline, train in (({}, {"recompute": "selective"}), ({}, {"recompute": "full"}),
                            ({}, {"recompute": "full", "recompute_every": 2}), ({"recompute": ("full", "selective")}, {})):
        config = replace(plain, pipeline=replace(plain.pipeline, **pipeline), train=replace(plain.train, **train))
        for (reports, buffers), (same_reports, same) in zip(expected, run_job(config, 3, after=every_buffer), strict=True):
            assert losses(reports) == losses(same_reports)
            assert all(torch.equal(values, same[name]) for name, values in buffers.items())


@pytest.mark.parametrize("tied", [False, True])
def test_initial_weights_are_the_same_under_every_layout(run_job: JobRunner, tied: bool) -> None:
    config = small_job(model={"tied_embeddings": tied, "kv_heads": 2, "qk_norm": True})

    def initial(mesh: dict[str, int]) -> dict[str, torch.Tensor]:
        job = replace(config, mesh=replace(config.mesh, **mesh))
        ranks = run_job(job, 0, before=make_kept, after=gradients_and_weights)
        return assemble([box for _, (_, boxes) in ranks for box in boxes])

    alone = initial({})
    for mesh in MESHES:
        own = initial(mesh)
        assert own.keys() == alone.keys()
        assert all(torch.equal(own[name], values) for name, values in alone.items())


def make_kept(trainer: Trainer) -> None:
    keep_last_gradients(trainer)
    trainer.kept = []  # type: ignore[attr-defined]


def half_run(config: JobConfig, plan: Plan, rank: int, port: int, generation: int, directory: str,
             resume: bool) -> tuple[list[StepReport], Any]:
    """Steps 1-5 and a save, or a load and steps 6-10."""
    trainer = Trainer(config, plan, rank, loader=SyntheticLoader(config, plan, plan.mesh.coordinate(rank).data))
    trainer.connect("127.0.0.1", port, generation)
    if resume:
        trainer.load(directory)
        reports, kept = [trainer.step(n) for n in range(6, 11)], every_buffer(trainer)
    else:
        trainer.initialize()
        reports, kept = [trainer.step(n) for n in range(1, 6)], written(trainer, directory, 5)
    trainer.close()
    return reports, kept


@pytest.mark.parametrize("changes", [
    {"mesh": MESHES[0], "train": {"dtype": "bf16", "sharding": "optimizer"}, "model": {"tied_embeddings": True}},
    {"mesh": MESHES[0], "train": {"dtype": "fp32"}, "model": {"dropout": 0.1, "kv_heads": 1}},
    {"mesh": {"data": 3, "pipeline": 2}, "train": {"dtype": "fp32", "sharding": "gradients"}, "model": {}},
    {"mesh": MESHES[0], "train": {"dtype": "fp32", "sequence_parallel": True, "recompute": "selective"},
     "model": {"family": "gpt2", "kv_heads": 8, "dropout": 0.1}},
    {"mesh": MESHES[0], "train": {"dtype": "bf16", "sharding": "full", "reduce_dtype": "bf16", "sequence_parallel": True},
     "model": {}},
], ids=["bf16-sharded-tied", "fp32-dropout-kv1", "fp32-gradients-3x2", "fp32-sequence-parallel", "bf16-full"])
def test_a_resumed_run_equals_an_unbroken_one_to_the_bit(run_job: JobRunner, tmp_path: Path, changes: Any) -> None:
    config = small_job(**changes)
    unbroken = run_job(config, 10, after=every_buffer)
    directory = step_directory(str(tmp_path), 5)
    first = run_job.call(half_run, config, directory, False)
    commit(directory, 5, [receipt for _, receipt in first], config=config)
    second = run_job.call(half_run, config, directory, True)
    for (reports, buffers), (early, _), (late, same) in zip(unbroken, first, second, strict=True):
        assert losses(reports) == losses(early + late)
        assert buffers.keys() == same.keys()
        assert all(torch.equal(values, same[name]) for name, values in buffers.items())


def test_a_checkpoint_loads_under_another_layout(run_job: JobRunner, tmp_path: Path) -> None:
    """The later steps agree with the unbroken run of the first layout, within rounding."""
    config = small_job(mesh=MESHES[0], train={"sharding": "optimizer", "sequence_parallel": True},
                       model={"tied_embeddings": True})
    other = replace(config, mesh=replace(config.mesh, data=1, pipeline=3, tensor=1),
                    train=replace(config.train, sharding="none", sequence_parallel=False, recompute="full"))
    directory = step_directory(str(tmp_path), 5)
    unbroken = run_job(config, 10)
    first = run_job.call(half_run, config, directory, False)
    commit(directory, 5, [receipt for _, receipt in first], config=config)
    late = run_job.call(half_run, other, directory, True)[0][0]
    for report, expected in zip(late, unbroken[0][0][5:], strict=True):
        assert report.loss == pytest.approx(expected.loss, rel=1e-10)
        assert report.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-10)


def test_frozen_layers_stay_and_the_others_train(run_job: JobRunner) -> None:
    config = small_job(mesh={"pipeline": 2, "tensor": 2}, model={"freeze": ("embedding", "blocks.1")})
    initial, trained = (run_job(config, steps, before=make_kept, after=gradients_and_weights) for steps in (0, 3))
    before, after = (assemble([box for _, (_, boxes) in ranks for box in boxes]) for ranks in (initial, trained))
    for name, values in before.items():
        assert torch.equal(values, after[name]) == name.startswith(("embedding.", "blocks.1.")), name


def test_evaluation_is_the_same_under_every_layout(run_job: JobRunner) -> None:
    config = small_job(model={"dropout": 0.1})
    expected = run_job(config, 1, after=Trainer.evaluate)[0][1]
    for mesh in MESHES:
        job = replace(config, mesh=replace(config.mesh, **mesh), train=replace(config.train, sharding="full"))
        for _, report in run_job(job, 1, after=Trainer.evaluate):
            assert report.loss == pytest.approx(expected.loss, rel=1e-10)
            assert report.tokens == expected.tokens


def ask_one(trainer: Trainer) -> None:
    if trainer.rank == 1:
        trainer.request_stop()


def test_one_rank_asked_to_stop_stops_all_after_the_same_step(run_job: JobRunner) -> None:
    config = small_job(mesh=MESHES[0])
    for reports, _ in run_job(config, 1, before=ask_one):
        assert [report.stop for report in reports] == [True]


def poison(trainer: Trainer) -> None:
    for index in trainer.states:
        if index == 2:
            with torch.no_grad():
                trainer.states[index].kept_weights[0][0] = float("nan")


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_gradient_that_is_not_finite_changes_nothing_anywhere(sharding: str, run_job: JobRunner) -> None:
    """And who holds the layer names it: its weights went bad."""
    config = small_job(mesh={"pipeline": 2, "data": 2}, train={"sharding": sharding})
    before = run_job(config, 0, after=every_buffer)
    after = run_job(config, 1, before=poison, after=every_buffer)
    for rank, ((_, clean), (reports, buffers)) in enumerate(zip(before, after, strict=True)):
        assert reports[0].skipped
        same = [torch.equal(values, clean[name]) for name, values in buffers.items()]
        assert same.count(False) <= 1
        holds_it = rank % 2 == make_plan(config).stage_of(2)
        assert reports[0].origin == (Origin(layer="blocks.1", place="weights", op=None) if holds_it else None)
