"""What is measured of a short job comes out of the model again."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from raytrain3d.config import JobConfig
from raytrain3d.plan.catalogue import NODES
from raytrain3d.plan.collectives import Group
from raytrain3d.plan.profile import LARGE_BYTES, LayerSeconds, Measured, Profile, calibrated, profiled_job
from raytrain3d.plan.search import Evaluator
from raytrain3d.plan.step_time import Cluster, StepTimer

Job = Callable[..., JobConfig]
CPU = NODES["cpu"]
ALONE = Measured(layers={"embedding": LayerSeconds(forward=1e-4, backward=3e-4),
                         "block": LayerSeconds(forward=0.010, backward=0.021),
                         "head": LayerSeconds(forward=0.04, backward=1e-5)},
                 optimizer_s=0.05, rest_s=0.003, memory_bytes=400_000_000)
LINKS = {"data all-reduce latency_ms": 0.4, "data all-reduce MB/s": 800.0, "channel 0->1 activations latency_ms": 0.3,
         "channel 0->1 activations MB/s": 500.0}


def slower(factor: float) -> Measured:
    layers = {kind: LayerSeconds(forward=factor * each.forward, backward=factor * each.backward)
              for kind, each in ALONE.layers.items()}
    return replace(ALONE, layers=layers, rest_s=0.005)


def timer_of(profile: Profile, config: JobConfig) -> StepTimer:
    cluster = Cluster(node=CPU, calibration=profile.calibration)
    return Evaluator(cluster=cluster, allocation=profile.allocation).timer(config)


def test_layers_are_as_long_as_measured(job: Job) -> None:
    config = job(blocks=6)
    profile = calibrated(config, CPU, ALONE, None, {}, on_cpu=True)
    times = timer_of(profile, config).layer_times
    for layer, kind in ((0, "embedding"), (1, "block"), (6, "block"), (7, "head")):
        assert times[layer].compute.forward == pytest.approx(ALONE.layers[kind].forward)
        assert times[layer].compute.backward == pytest.approx(ALONE.layers[kind].backward)
        assert times[layer].launch.total == 0


def test_tensor_collectives_are_not_part_of_it(job: Job) -> None:
    config = job(tensor=2)
    links = {name.replace("data", "tensor"): value for name, value in LINKS.items()}
    time = timer_of(calibrated(config, CPU, ALONE, None, links, on_cpu=True), config).layer_times[1]
    assert (time.compute + time.tensor).forward == pytest.approx(0.010)
    assert time.tensor.forward > 0


def test_a_step_of_one_rank_is_what_was_measured(job: Job) -> None:
    config = profiled_job(job())
    step = timer_of(calibrated(config, CPU, ALONE, None, {}, on_cpu=True), config).time(((0, 4),))
    layers = 4 * (4e-4 + 2 * 0.031 + 0.04001)
    assert step.total == pytest.approx(layers + ALONE.optimizer_s + ALONE.rest_s)


def test_links_are_as_fast_as_measured(job: Job) -> None:
    config = job(data=2)
    timer = timer_of(calibrated(config, CPU, ALONE, slower(1.5), LINKS, on_cpu=True), config)
    pair = Group(size=2, per_node=2)
    assert timer.links.all_reduce_s(LARGE_BYTES, pair) == pytest.approx(LARGE_BYTES / 800e6)
    assert timer.links.all_reduce_s(0, pair) == pytest.approx(0.4e-3)
    size = 32 * 64 * 4
    assert timer.links.message_s(size, crosses=False) == pytest.approx(0.3e-3 + size / 500e6)


def test_ranks_side_by_side_are_slower(job: Job) -> None:
    profile = calibrated(job(), CPU, ALONE, slower(1.5), LINKS, on_cpu=True)
    assert profile.calibration.crowd == pytest.approx(1.5)
    assert profile.calibration.step_s == 0.005
    pair = timer_of(profile, job(data=2)).layer_times[1].compute
    assert pair.forward == pytest.approx(0.015)


def test_memory_is_what_was_measured(job: Job) -> None:
    """Tensors, and what a process has beside them; a GPU's allocator does not see that, so margins stay."""
    config = profiled_job(job())
    profile = calibrated(config, CPU, ALONE, None, {}, on_cpu=True)
    cluster = Cluster(node=CPU, calibration=profile.calibration)
    choice = Evaluator(cluster=cluster, allocation=profile.allocation).evaluate(config)
    assert choice.needed == pytest.approx(ALONE.memory_bytes)
    assert calibrated(config, CPU, ALONE, None, {}, on_cpu=False).allocation == Profile().allocation


def test_profiled_job_has_the_shapes_of_the_job(job: Job) -> None:
    config = job(blocks=20, pipeline=4, tensor=2, data=2, micro_batch=2, global_batch=16, sharding="full", recompute="full")
    short = profiled_job(config, data=3)
    assert (short.mesh.replicas, short.mesh.pipeline, short.mesh.tensor) == (3, 1, 2)
    assert short.train.num_micro_batches == 3 * 4 and short.train.micro_batch == 2
    assert replace(short.model, blocks=20) == config.model
    assert (short.train.sharding, short.train.recompute) == ("none", "none")
