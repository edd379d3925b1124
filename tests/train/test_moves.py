"""Layers that move while a job trains change nothing: losses, norms, weights and moments are the same to the bit.

The normal run takes a few layouts; `pytest -m slow tests/train/test_moves.py` takes data 1, 2, 3 x tensor 1, 2, 4 x
pipeline 2, 3, 4 with every schedule, unsharded and with a sharded optimizer; the higher levels of sharding, and tied
embeddings, take turns.
"""

import itertools
import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from jobs import JobRunner, SyntheticLoader, small_job
from parity import SHARDINGS
from torch import Tensor

from raytrain3d.config import JobConfig, ModelConfig
from raytrain3d.model.transformer import Layer, build_layers
from raytrain3d.plan.moves import after, moves
from raytrain3d.plan.partition import Stages, split_by_counts
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.schedule import SCHEDULES
from raytrain3d.train.trainer import Trainer

pytestmark = pytest.mark.dist

STEPS = 40
CHUNKED = ("interleaved", "breadth_first", "zb_v")
Outcome = tuple[list[tuple[float, float]], dict[str, Tensor]]


def build_with_a_view(model: ModelConfig, layers: Iterable[int]) -> dict[int, Layer]:
    """As always, but layer 3 returns a transposed view: what crosses a layer border must not carry its strides along."""
    built = build_layers(model, layers)
    if 3 in built:
        forward = built[3].forward
        built[3].forward = lambda x, *more: forward(x, *more).transpose(1, 2).contiguous().transpose(1, 2)
    return built


def train_with_moves(config: JobConfig, plan: Plan, rank: int, port: int, generation: int,
                     splits: Mapping[int, Stages]) -> Outcome:
    """40 steps of one rank; after step n the layers are moved to splits[n], one layer across one border at a time."""
    replica = plan.mesh.coordinate(rank).data
    trainer = Trainer(config, plan, rank, loader=SyntheticLoader(config, plan, replica),  # type: ignore[arg-type]
                      build=build_with_a_view)
    stages, results = plan.stages, []
    try:
        trainer.connect("127.0.0.1", port, generation)
        trainer.initialize()
        for n in range(1, STEPS + 1):
            report = trainer.step(n)
            results.append((report.loss, report.gradient_norm))
            for shift in moves(stages, splits[n]) if n in splits else ():
                source, target = plan.rank_of(shift.source), plan.rank_of(shift.target)
                if source != target:
                    trainer.copy_layer(shift.layer, source, target)
                stages = after(stages, shift)
                trainer.adopt(stages, plan.shares)
        held = {f"{piece.kind} {piece.name} {piece.rectangle} {replica}": piece.tensor.clone()
                for state in trainer.states.values() for piece in state.pieces()}
        return results, held
    finally:
        trainer.close()


def random_splits(seed: int, num_layers: int, num_stages: int) -> dict[int, Stages]:
    draw = random.Random(seed)

    def split() -> Stages:
        cuts = sorted(draw.sample(range(1, num_layers), num_stages - 1))
        return split_by_counts([b - a for a, b in itertools.pairwise([0, *cuts, num_layers])], num_layers)

    return {step: split() for step in (10, 20, 30)}


def check_moves(run: JobRunner, mesh: tuple[int, int, int], schedule: str, sharding: str, *, seed: int = 0,
                model: dict[str, Any] | None = None, train: dict[str, Any] | None = None,
                recompute: tuple[str, ...] | None = None) -> None:
    """recompute: by stage."""
    data, pipeline, tensor = mesh
    shape = {"blocks": 8, "hidden": 16, "heads": 4, "feed_forward": 24, "dropout": 0.1, **(model or {})}
    config = small_job(mesh={"data": data, "pipeline": pipeline, "tensor": tensor},
                       pipeline={"schedule": schedule, "recompute": recompute}, model=shape,
                       train={"steps": STEPS, "global_batch": 2 * data + 1, "dtype": "fp32",
                              **(SHARDINGS[sharding] if data > 1 else {}), **(train or {})})
    stages = pipeline * config.pipeline.num_chunks
    splits = random_splits(seed, config.model.blocks + 2, stages)
    still = run.call(train_with_moves, config, {})
    moved = run.call(train_with_moves, config, splits)
    assert still[0][0] == moved[0][0], "losses and gradient norms"
    assert all(results == moved[0][0] for results, _ in moved)
    before, after = ({name: tensor for _, held in ranks for name, tensor in held.items()} for ranks in (still, moved))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert [set(held) for _, held in still] != [set(held) for _, held in moved], "the last split differs from the first"


CASES = [
    ((1, 2, 1), "1f1b", "none", {}),
    ((3, 2, 1), "zb_h1", "optimizer", {}),
    ((1, 2, 4), "gpipe", "none", {}),
    ((2, 3, 1), "zb_v", "optimizer", {"tied_embeddings": True}),
    ((1, 4, 2), "interleaved", "none", {"tied_embeddings": True}),
    ((1, 2, 2), "breadth_first", "none", {"family": "gpt2", "kv_heads": 4, "freeze": ("blocks.2",)}),
    ((3, 2, 1), "zb_v", "gradients", {"tied_embeddings": True}),
    ((2, 2, 2), "zb_h1", "full", {"kv_heads": 1, "freeze": ("blocks.2",)}),
    ((2, 2, 1), "interleaved", "full_step", {"tied_embeddings": True}),
]


@pytest.mark.parametrize(("mesh", "schedule", "sharding", "model"), CASES)
def test_moves_change_nothing(mesh: tuple[int, int, int], schedule: str, sharding: str, model: dict[str, Any],
                              run_job: JobRunner) -> None:
    check_moves(run_job, mesh, schedule, sharding, model=model)


def test_moves_change_nothing_between_stages_that_recompute_and_that_do_not(run_job: JobRunner) -> None:
    check_moves(run_job, (1, 3, 2), "1f1b", "none", recompute=("full", "selective", "none"),
                train={"sequence_parallel": True}, model={"attention_dropout": 0.1})


def test_moves_change_nothing_where_kernels_differ_by_size(run_job: JobRunner) -> None:
    """Hidden 256: matrix products go through blocked kernels, which small ones do not."""
    check_moves(run_job, (1, 2, 1), "zb_h1", "none", train={"sequence": 32, "dtype": "bf16"},
                model={"blocks": 4, "hidden": 256, "heads": 8, "feed_forward": 512, "vocabulary": 512})


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mesh", [(data, pipeline, tensor) for data in (1, 2, 3) for tensor in (1, 2, 4)
                                  for pipeline in (2, 3, 4) if tensor < 4 or pipeline == 2], ids=str)
def test_moves_change_nothing_anywhere(mesh: tuple[int, int, int], schedule: str, run_job: JobRunner) -> None:
    turn = sum(mesh) + list(SCHEDULES).index(schedule)
    more = ("gradients", "full", "full_step")
    for seed, sharding in enumerate(("none", "optimizer", more[turn % len(more)]) if mesh[0] > 1 else ("none",)):
        check_moves(run_job, mesh, schedule, sharding, seed=seed, model={"tied_embeddings": (turn + seed) % 2 == 0})
