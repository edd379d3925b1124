"""Sharding over the data axis: which levels agree to the bit, unequal shares under every schedule, tied copies, and what a
shorter type for reductions does. Parity of every level with one rank is in test_parity.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from jobs import JobRunner, SyntheticLoader, small_job
from parity import SHARDINGS, Reference, check_parity
from torch import Tensor

from raytrain3d.config import JobConfig
from raytrain3d.plan.partition import split_by_counts
from raytrain3d.plan.plan import Plan
from raytrain3d.train.trainer import Trainer

pytestmark = pytest.mark.dist


def job(sharding: str, *, per_replica: int = 1, dtype: str = "fp32", data: int = 2, **more: Mapping[str, Any]) -> JobConfig:
    train = {"dtype": dtype, "global_batch": per_replica * data, "steps": 6, **SHARDINGS[sharding], **more.pop("train", {})}
    return small_job(mesh={"data": data, **more.pop("mesh", {})}, train=train, **more)  # type: ignore[arg-type]


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """By name, kind and rectangle, as saved: every element of the model once."""
    return {f"{piece.name} {piece.kind} {piece.rectangle}": piece.tensor.clone()
            for state in trainer.states.values() for piece in state.saved_pieces()}


def outcome(run: JobRunner, config: JobConfig) -> tuple[list[tuple[str, str]], dict[str, Tensor]]:
    ranks = run(config, config.train.steps, after=state_of)
    steps = [(report.loss.hex(), report.gradient_norm.hex()) for report in ranks[0][0]]
    return steps, {name: tensor for _, held in ranks for name, tensor in held.items()}


def check_same_bits(run: JobRunner, configs: list[JobConfig]) -> None:
    (steps, held), *others = (outcome(run, config) for config in configs)
    for other_steps, other_held in others:
        assert other_steps == steps
        assert other_held.keys() == held.keys()
        assert all(torch.equal(other_held[name], tensor) for name, tensor in held.items())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_levels_agree_to_the_bit_where_replicas_have_one_micro_batch(dtype: str, run_job: JobRunner) -> None:
    """Two replicas: a sum of two does not depend on its order, and there is one sum a step."""
    check_same_bits(run_job, [job(sharding, dtype=dtype) for sharding in SHARDINGS if sharding != "hybrid"])


def test_levels_that_add_up_in_one_order_agree_to_the_bit(run_job: JobRunner) -> None:
    """Once a step: micro-batches first, replicas after. After every micro-batch: replicas first."""
    check_same_bits(run_job, [job(sharding, per_replica=3) for sharding in ("none", "optimizer")])
    check_same_bits(run_job, [job(sharding, per_replica=3) for sharding in ("gradients", "full", "full_step")])


@pytest.mark.parametrize(("schedule", "sharding"), [("gpipe", "full_step"), ("zb_h1", "full"), ("zb_v", "gradients"),
                                                    ("interleaved", "full"), ("breadth_first", "gradients")])
def test_replicas_with_fewer_micro_batches_and_none(schedule: str, sharding: str, run_job: JobRunner,
                                                    reference: Reference) -> None:
    """Shares 2, 1, 1 and 1, 1, 0."""
    for samples in (1, 2):
        check_parity(run_job, reference, job(sharding, data=3, dtype="fp64", mesh={"pipeline": 2},
                                             pipeline={"schedule": schedule}, model={"tied_embeddings": samples == 2},
                                             train={"global_batch": 4, "micro_batch": samples}))


def tied_copy(config: JobConfig, plan: Plan, rank: int, port: int, generation: int) -> Tensor:
    """The rank's shard of the tied weight, moments included, after 50 steps with a move after the 25th."""
    trainer = Trainer(config, plan, rank, loader=SyntheticLoader(config, plan, plan.mesh.coordinate(rank).data))  # type: ignore[arg-type]
    try:
        trainer.connect("127.0.0.1", port, generation)
        trainer.initialize()
        for n in range(1, 51):
            trainer.step(n)
            if n == 25:
                trainer.copy_layer(3, 1, 0)
                trainer.adopt(split_by_counts((4, 1), 5), plan.shares)
        state = trainer.states[5]
        return torch.cat([state.own_weights, state.exp_avg, state.exp_avg_sq]).clone()
    finally:
        trainer.close()


@pytest.mark.parametrize("sharding", ["optimizer", "full"])
def test_tied_copies_stay_equal_to_the_bit(sharding: str, run_job: JobRunner) -> None:
    config = job(sharding, per_replica=2, mesh={"pipeline": 2}, pipeline={"layers": (3, 2)}, train={"steps": 50},
                 model={"tied_embeddings": True})
    first, last, other_first, other_last = run_job.call(tied_copy, config)
    assert torch.equal(first, last)
    assert torch.equal(other_first, other_last)
    assert not torch.equal(first, other_first), "shards of different halves"


def test_gradients_reduced_in_bf16_are_near_and_not_equal(run_job: JobRunner) -> None:
    for sharding in ("none", "optimizer", "full"):
        exact, short = (outcome(run_job, job(sharding, per_replica=2, train={"reduce_dtype": dtype}))[0]
                        for dtype in ("fp32", "bf16"))
        for (_, norm), (_, short_norm) in zip(exact, short, strict=True):
            assert float.fromhex(short_norm) == pytest.approx(float.fromhex(norm), rel=1e-2)
            assert short_norm != norm


def test_a_group_of_replicas_trains_as_all_of_them(run_job: JobRunner, reference: Reference) -> None:
    """Four replicas that shard over two, at each level."""
    for sharding in ("optimizer", "gradients", "full"):
        check_parity(run_job, reference, job(sharding, data=4, dtype="fp64", train={"shard_group": 2}))


def lose_a_rank(config: JobConfig, plan: Plan, rank: int, port: int,
                generation: int) -> tuple[list[float], dict[str, Tensor]]:
    """Rank 1 fails between update and gather of step 3; rank 0 is lost and filled from rank 2, which has the same shard."""
    def new() -> Trainer:
        return Trainer(config, plan, rank, loader=SyntheticLoader(config, plan, plan.mesh.coordinate(rank).data))  # type: ignore[arg-type]

    def fail() -> None:
        raise ConnectionError

    trainer = new()
    trainer.connect("127.0.0.1", port, generation)
    trainer.initialize()
    losses = [trainer.step(n).loss for n in (1, 2)]
    if rank == 1:
        trainer._gather = fail  # type: ignore[method-assign]
    with suppress(ConnectionError, RuntimeError):
        trainer.step(3)
    trainer.disconnect()
    agreed, trainer._gather = trainer.standing().agreed, partial(Trainer._gather, trainer)  # type: ignore[method-assign]
    assert agreed is not None
    if rank == 0:
        trainer.close()
        trainer = new()
    try:
        trainer.connect("127.0.0.1", port, 10_000 + generation)
        trainer.recover(3, agreed[1], [(0, 2)])
        return losses + [trainer.step(n).loss for n in (4, 5)], state_of(trainer)
    finally:
        trainer.close()


@pytest.mark.parametrize("sharding", ["optimizer", "full"])
def test_a_rank_is_filled_from_another_shard_group(sharding: str, run_job: JobRunner) -> None:
    config = job(sharding, data=4, train={"shard_group": 2, "steps": 5})
    undisturbed = run_job(config, 5, after=state_of)
    for (reports, held), (losses, other_held) in zip(undisturbed, run_job.call(lose_a_rank, config), strict=True):
        assert losses == [report.loss for report in reports if report.step != 3]
        assert all(torch.equal(other_held[name], tensor) for name, tensor in held.items())
