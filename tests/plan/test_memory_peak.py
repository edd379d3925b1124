"""Peak of activations of a rank, as the allocator sees it, against `plan/memory.py`: every schedule and recompute kind.

Each rank's program runs alone in this process with stand-ins for its neighbours. torch's profiler reports what the CPU
allocator gives out and takes back; the most that is out at a time is the peak, temporaries included.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from live_memory import peak_bytes
from torch import Tensor, nn

from raytrain3d.config import JobConfig
from raytrain3d.model.dropout import DropoutKeys
from raytrain3d.model.functional import put_off
from raytrain3d.model.packing import Packing, packing
from raytrain3d.model.transformer import Head, Layer, build_layers
from raytrain3d.parallel.clock import HostClock
from raytrain3d.parallel.pipeline import Feed, PipelineRun, Stage
from raytrain3d.plan.activations import activation_memory
from raytrain3d.plan.params import LayerSpec, model_spec
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.plan.program import programs_for
from raytrain3d.plan.rank_program import rank_program_for
from raytrain3d.plan.recompute import recompute_kind
from raytrain3d.plan.schedule import SCHEDULES, Op

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Post:
    """Brings messages of the right shape and loses what is sent."""

    def __init__(self, config: JobConfig) -> None:
        self._shape = (config.train.micro_batch, config.train.sequence, config.model.hidden)
        self._dtype = DTYPES[config.train.dtype]

    def receive(self, op: Op) -> Tensor:
        return torch.ones(self._shape, dtype=self._dtype)

    def send(self, op: Op, tensor: Tensor) -> None:
        pass

    def release(self, tensor: Tensor) -> None:
        pass

    def finish(self) -> None:
        pass


def bound(layer: Layer, spec: LayerSpec, dtype: torch.dtype) -> Layer:
    """`layer` with parameters of its own, gradients allocated."""
    parameters = {param.name: nn.Parameter(torch.zeros(param.shape, dtype=dtype)) for param in spec.params}
    for parameter in parameters.values():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros(parameter.shape)
    layer.bind(parameters)
    return layer


def stages_of(config: JobConfig, plan: Plan, rank: int) -> dict[int, Stage]:
    spec, last = model_spec(config.model, config.train, 1), len(plan.stages) - 1

    def stage(number: int) -> Stage:
        layers = build_layers(config.model, plan.layers_of(number))
        kinds = {index: recompute_kind(config, spec.layers[index], number) for index in layers}
        for index, layer in layers.items():
            bound(layer, spec.layers[index], DTYPES[config.train.dtype])
            layer.recompute_attention = kinds[index] == "selective"
            if isinstance(layer, Head):
                layer.loss_chunk = config.train.loss_chunk
        return Stage(layers, is_first=number == 0, is_last=number == last,
                     recompute=frozenset(index for index, kind in kinds.items() if kind == "full"))

    return {number: stage(number) for number in plan.stages_of(rank)}


def measured_over_estimate(config: JobConfig, rank: int) -> float:
    plan, train = make_plan(config), config.train
    tokens = torch.zeros(train.micro_batch, train.sequence, dtype=torch.int64)
    keys = DropoutKeys(seed=1, step=1, samples=tuple(range(train.micro_batch)))

    @lru_cache(maxsize=1)
    def documents(i: int) -> Packing | None:
        return packing(tokens, DTYPES[train.dtype]) if config.data.mask_documents else None

    def arguments(i: int, layer: int) -> tuple[Any, ...]:
        return (tokens,) if layer == plan.num_layers - 1 else (keys, documents(i))

    feed = Feed(tokens=lambda i: tokens, arguments=arguments)
    pipeline = (plan.schedule, plan.mesh.pipeline, train.num_micro_batches, plan.chunks)
    program, stages = rank_program_for(*pipeline, rank), stages_of(config, plan, rank)

    def work() -> None:
        PipelineRun(stages, Post(config), feed, put_off=put_off,  # type: ignore[arg-type]
                    clock=HostClock(), offload=train.offload_activations).execute(program)

    estimate = activation_memory(config, model_spec(config.model, train, 1), {s: plan.layers_of(s) for s in stages},
                                 programs_for(*pipeline).ops[rank])
    return peak_bytes(work) / (estimate.total + estimate.host)  # on a CPU the host's memory is the same


def check(config: JobConfig) -> None:
    torch.set_num_threads(1)
    ratios = [measured_over_estimate(config, rank) for rank in range(config.mesh.pipeline)]
    assert 0.9 <= min(ratios) <= max(ratios) <= 1.1, ratios


def small(job: Callable[..., JobConfig], schedule: str, changes: Mapping[str, Any]) -> JobConfig:
    return job(**{"schedule": schedule, "pipeline": 2, "blocks": 10, "vocabulary": 64, "global_batch": 8, "micro_batch": 2,
                  "sequence": 128, "feed_forward": 172, **changes})


KINDS = ("none", "selective", "full")
DROPOUT = {"family": "gpt2", "dropout": 0.1, "attention_dropout": 0.1}


@pytest.mark.parametrize(("schedule", "recompute"), list(zip(SCHEDULES, KINDS * 2, strict=True)))
def test_a_kind_of_every_schedule(job: Callable[..., JobConfig], schedule: str, recompute: str) -> None:
    check(small(job, schedule, {"recompute": recompute}))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", [{}, {"dtype": "bf16"}, {"family": "gpt2"}, DROPOUT, {"kv_heads": 2, "qk_norm": True}],
                         ids=str)
def test_every_schedule_and_kind(job: Callable[..., JobConfig], model: Mapping[str, Any], schedule: str,
                                 recompute: str) -> None:
    check(small(job, schedule, {**model, "recompute": recompute}))


@pytest.mark.parametrize("changes", [{**DROPOUT, "recompute": "selective"}, {"dtype": "bf16"}, {"recompute_every": 2}],
                         ids=str)
def test_stages_of_their_own_kind(job: Callable[..., JobConfig], changes: Mapping[str, Any]) -> None:
    base = small(job, "zb_h1", changes)
    check(replace(base, pipeline=replace(base.pipeline, recompute=("full", base.train.recompute))))


@pytest.mark.parametrize("changes", [
    {"loss_chunk": 100}, {"loss_chunk": 100, "dtype": "bf16"}, {"loss_chunk": None}, {"loss_chunk": None, "dtype": "bf16"},
], ids=str)
def test_logits_that_are_most_of_it(job: Callable[..., JobConfig], changes: Mapping[str, Any]) -> None:
    check(small(job, "1f1b", {"vocabulary": 4096, **changes}))


@pytest.mark.parametrize(("schedule", "changes"), [
    ("1f1b", {}), ("gpipe", {"recompute": "full"}), ("zb_v", {"recompute": "selective"}), ("1f1b", {"kv_heads": 2}),
], ids=str)
def test_masks_of_documents(job: Callable[..., JobConfig], schedule: str, changes: Mapping[str, Any]) -> None:
    config = small(job, schedule, changes)
    check(replace(config, data=replace(config.data, mask_documents=True)))


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "none"), ("gpipe", "full")])
def test_activations_on_the_host(job: Callable[..., JobConfig], schedule: str, recompute: str) -> None:
    """Together with those that stay on the device."""
    check(small(job, schedule, {"recompute": recompute, "offload_activations": True}))
