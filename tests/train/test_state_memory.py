"""Measured bytes of weights, gradients and optimizer state of a rank against the formulas of FACTS (ZeRO) and the plan."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from jobs import JobRunner, small_job
from parity import SHARDINGS
from torch import Tensor

from raytrain3d.config import JobConfig, RecoveryConfig
from raytrain3d.parallel import gradients, weights
from raytrain3d.parallel.layer_state import LayerState
from raytrain3d.parallel.migrate import moving_buffers
from raytrain3d.plan.state_memory import layer_state_memory
from raytrain3d.plan.params import model_spec
from raytrain3d.plan.plan import make_plan
from raytrain3d.train.holding import Holding

LEVELS = ("none", "optimizer", "gradients", "full")
SHAPE = {"hidden": 256, "blocks": 2, "heads": 4, "kv_heads": 4, "feed_forward": 704, "vocabulary": 512}
BYTES: dict[tuple[str, str], Callable[[int], float]] = {
    ("bf16", "none"): lambda d: 18, ("bf16", "optimizer"): lambda d: 6 + 12 / d,
    ("bf16", "gradients"): lambda d: 2 + 16 / d, ("bf16", "full"): lambda d: 18 / d,
    ("fp32", "none"): lambda d: 16, ("fp32", "optimizer"): lambda d: 8 + 8 / d,
    ("fp32", "gradients"): lambda d: 4 + 12 / d, ("fp32", "full"): lambda d: 16 / d,
}
"""A parameter's, over d replicas."""


def tensors_of(state: LayerState) -> Iterator[Tensor]:
    """Every tensor that can be reached from it."""
    yield from (value for value in vars(state).values() if isinstance(value, Tensor))
    for parameter in state.parameters.values():
        yield from (each for each in (parameter, parameter.grad) if each is not None)


def measured_bytes(states: dict[int, LayerState]) -> int:
    """Of all memory behind the states, each storage once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
                for state in states.values() for tensor in tensors_of(state)}
    return sum(storages.values())


@pytest.mark.parametrize(("dtype", "sharding", "data"), list(product(("fp32", "bf16"), LEVELS, (1, 2, 4))))
def test_state_has_the_bytes_that_zero_says(dtype: str, sharding: str, data: int) -> None:
    """Within 2 %, once the padding of the flat buffers is taken off; the plan knows them to the byte."""
    config = small_job(model=SHAPE, mesh={"data": data}, train={"dtype": dtype, "sharding": sharding})
    spec = model_spec(config.model, config.train, 1)
    planned = sum(layer_state_memory(layer, config).total for layer in spec.states)
    for rank in range(data):
        states = one_rank(config, rank).states
        found = measured_bytes(states)
        assert found == planned
        padded = sum(state.layout.size for state in states.values())
        padding = BYTES[dtype, sharding](data) * (padded - spec.num_parameters)
        assert padding <= 0.02 * found
        assert found - padding == pytest.approx(BYTES[dtype, sharding](data) * spec.num_parameters, rel=0.02)


@pytest.mark.parametrize(("dtype", "train"), [
    ("fp32", {}), ("bf16", {}), ("bf16", {"offload_optimizer": True}), ("bf16", SHARDINGS["full"])])
def test_the_plan_counts_snapshots(dtype: str, train: dict[str, Any]) -> None:
    """Two copies of the own state, two of the client's, which is thought to be the largest."""
    config = small_job(model=SHAPE, mesh={"data": 2, "pipeline": 2}, train={"dtype": dtype, **train})
    without, plan = make_plan(config), make_plan(replace(config, recovery=RecoveryConfig(snapshot_interval=5)))
    copied = [sum(buffer.nbytes for state in one_rank(config, rank).states.values() for buffer in moving_buffers(state))
              for rank in (0, 1)]
    assert copied[0] != copied[1]
    for estimate, bare, own in zip(plan.estimates, without.estimates, copied, strict=True):
        assert estimate.memory.snapshots == 2 * (own + max(copied))
        assert (bare.memory.snapshots, bare.memory.total) == (0, estimate.memory.total)


def watch(trainer: Any) -> None:
    """Note the most memory of the states, looking whenever something is about to be let go."""
    trainer.most, trainer.release = 0, gradients.release

    def look(tensor: Tensor) -> None:
        trainer.most = max(trainer.most, measured_bytes(trainer.states))
        trainer.release(tensor)

    gradients.release = weights.release = look


def between_steps_and_at_most(trainer: Any) -> tuple[int, int]:
    gradients.release = weights.release = trainer.release
    return measured_bytes(trainer.states), trainer.most


@pytest.mark.dist
@pytest.mark.parametrize(("sharding", "schedule"), [("gradients", "zb_h1"), ("full", "1f1b"), ("full_step", "zb_h1")])
def test_whole_buffers_have_memory_only_while_layers_are_at_work(sharding: str, schedule: str, run_job: JobRunner) -> None:
    """The plan also counts the result of a reduction under way, which is no state's."""
    config = small_job(model={**SHAPE, "hidden": 64, "feed_forward": 176, "blocks": 4, "tied_embeddings": True},
                       mesh={"data": 2, "pipeline": 2}, pipeline={"schedule": schedule},
                       train={"dtype": "bf16", "global_batch": 6, **SHARDINGS[sharding]})
    plan = make_plan(config)
    for rank, (_, (between, most)) in enumerate(run_job(config, 2, before=watch, after=between_steps_and_at_most)):
        memory = plan.estimates[plan.mesh.coordinate(rank).pipeline].memory
        kept = memory.weights + memory.gradients + memory.master + memory.moments
        assert between == kept
        result = max(state.own_gradient.nbytes for state in one_rank(config, rank).states.values())
        assert kept + memory.transient - result <= most <= kept + memory.transient


def one_rank(config: JobConfig, rank: int) -> Holding:
    plan = make_plan(config)
    return Holding(config, model_spec(config.model, config.train, 1), plan, plan.mesh.coordinate(rank), torch.device("cpu"))
