"""What single keys of a job do to the time of its step and to the memory of its ranks."""

from dataclasses import replace
from typing import Any

import pytest

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, PipelineConfig, RunConfig, TrainConfig
from raytrain3d.plan.calibration import Calibration
from raytrain3d.plan.catalogue import NODES
from raytrain3d.plan.device_memory import Allocation, least_bytes
from raytrain3d.plan.search import Choice, Evaluator
from raytrain3d.plan.step_time import Cluster

A100 = NODES["a100"]
PLAIN = Calibration(network_step_s=0, inside_step_s=0, handover_s=0, launch_s=0)
LLAMA_8B = ModelConfig(vocabulary=128256, hidden=4096, blocks=32, heads=32, kv_heads=8, feed_forward=14336)


def evaluated(data: int = 1, pipeline: int = 1, tensor: int = 1, calibration: Calibration = PLAIN, masked: bool = False,
              stages: dict[str, Any] | None = None, **train: Any) -> Choice:
    config = JobConfig(run=RunConfig(name="test"), data=DataConfig(path="unused", mask_documents=masked), model=LLAMA_8B,
                       mesh=MeshConfig(data=data, pipeline=pipeline, tensor=tensor), pipeline=PipelineConfig(**stages or {}),
                       train=TrainConfig(steps=1, sequence=4096, dtype="bf16", **{"global_batch": 64, **train}))
    return Evaluator(cluster=Cluster(node=A100, calibration=calibration), allocation=Allocation()).evaluate(config)


def test_sums_in_bf16_send_half() -> None:
    whole, half = (evaluated(data=16, reduce_dtype=kind).step.data for kind in ("fp32", "bf16"))
    assert half == pytest.approx(whole / 2)


@pytest.mark.parametrize("sharding", ["optimizer", "gradients", "full"])
def test_one_group_of_all_replicas_is_the_default(sharding: str) -> None:
    assert evaluated(data=16, sharding=sharding, shard_group=16).step == evaluated(data=16, sharding=sharding).step


def test_shard_groups_inside_nodes_keep_gathers_off_the_network() -> None:
    """And need more memory, since each node has all of the state. With many micro-batches: sums over nodes come once a step.
    """
    wide, near = (evaluated(data=16, sharding="full", shard_group=size, global_batch=512) for size in (16, 8))
    assert near.step.data < 0.8 * wide.step.data
    assert near.needed > wide.needed
    assert near.step.update > wide.step.update, "each rank updates twice as much"


def test_shard_groups_sum_their_parts_once_a_step() -> None:
    """16 replicas in pairs, a node each: a scatter of gradients within a pair, an all-reduce of its halves over 8 ranks, a
    gather of weights within a pair. Backwards are long enough to hide what can be."""
    choice = evaluated(data=16, sharding="optimizer", shard_group=2, tensor=8, micro_batch=2)
    volume = sum(choice.timer.elements) / (A100.network_gb_s * 1e9 * PLAIN.network)
    reduced = 4 * volume * (1 / 2 + 2 * 7 / 8 / 2)
    assert choice.step.data == pytest.approx(PLAIN.exposed_reduction * reduced + 2 * volume / 2)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_optimizer_on_the_host(sharding: str) -> None:
    """The way of fp32 gradients and 16-bit weights, and the update at the speed of the host's memory."""
    here, there = (evaluated(data=8, tensor=2, sharding=sharding, offload_optimizer=away) for away in (False, True))
    own = sum(here.timer.elements) / (8 if sharding == "full" else 1)
    ways, update = own * 6 / (A100.host_gb_s * 1e9 * PLAIN.inside), own * 30 / (A100.host_memory_gb_s * 1e9 * PLAIN.memory)
    assert there.step.update == pytest.approx(PLAIN.step_s + ways + update)
    assert there.step.pipeline == here.step.pipeline
    assert there.needed < here.needed


def test_bounds_hold_with_the_optimizer_on_the_host() -> None:
    """A search must not pass over what fits only then."""
    choice = evaluated(data=8, tensor=2, offload_optimizer=True)
    config = choice.timer.config
    assert least_bytes(config, choice.timer.spec, sum(choice.timer.elements), choice.allocation) <= choice.needed


def test_activations_on_the_host() -> None:
    here, there = (evaluated(tensor=8, offload_activations=away) for away in (False, True))
    assert there.needed < 0.8 * here.needed
    away = there.memory[0].tensors.host
    assert away > 0
    ways = 2 * 64 * away / (A100.host_gb_s * 1e9 * PLAIN.inside)  # a micro-batch is in flight at a time, there are 64
    assert there.step.pipeline - here.step.pipeline == pytest.approx(ways, rel=0.01)


def test_recompute_by_stage() -> None:
    layers = {"layers": (9, 8, 8, 9)}
    none, full = (evaluated(pipeline=4, stages=layers, recompute=kind).step.pipeline for kind in ("none", "full"))
    by_stage = [evaluated(pipeline=4, stages={**layers, "recompute": kinds}).step.pipeline
                for kinds in (("none",) * 4, ("full", "none", "none", "none"), ("full",) * 4)]
    assert by_stage[0] == none and by_stage[2] == full
    assert none < by_stage[1] < full


def test_masks_of_documents_take_time_and_memory() -> None:
    """Scores are no longer computed for the causal half alone; a mask of a micro-batch is 4096 x 4096 x 2 bytes."""
    plain, masked = (evaluated(tensor=8, masked=on) for on in (False, True))
    block = 1
    times = [choice.timer.layer_times[block].compute.forward for choice in (plain, masked)]
    causal = 4 * 4096 * 4096 * 4096 / 8 / 2 / (A100.peak_flops("bf16") * PLAIN.attention)
    assert times[1] - times[0] == pytest.approx(causal)
    more = masked.memory[0].tensors.activations - plain.memory[0].tensors.activations
    repeated = 32 * 4096 * 2 * (4096 - 1024) / 8 * 2  # a copy of keys and values for each head
    assert more == pytest.approx(4096 * 4096 * 2 + repeated, rel=0.01)


def test_profiled_factors_scale_layers() -> None:
    twice = replace(PLAIN, block_forward=2.0, head_backward=3.0)
    plain, scaled = (evaluated(tensor=8, calibration=each).timer.layer_times for each in (PLAIN, twice))
    assert scaled[1].compute.forward == pytest.approx(2 * plain[1].compute.forward)
    assert scaled[1].compute.backward == pytest.approx(plain[1].compute.backward)
    assert scaled[-1].compute.backward == pytest.approx(3 * plain[-1].compute.backward)
    assert scaled[0] == plain[0]


def test_a_crowded_node_is_slower() -> None:
    """By as much as the profile says when it is full, by none with one rank on it."""
    crowded = replace(PLAIN, crowd=1.8)
    one, half, full = (evaluated(data=ranks, calibration=crowded).timer.layer_times[1].compute.forward
                       / evaluated(data=ranks).timer.layer_times[1].compute.forward for ranks in (1, 4, 16))
    assert (one, half, full) == (pytest.approx(1), pytest.approx(1 + 0.8 * 3 / 7), pytest.approx(1.8))
