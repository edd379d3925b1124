"""Splits of layers over stages by name: what `pipeline.partition` may ask for, and what a plan compares its own split with.

A model's layers are embedding, blocks, head, in this order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.balance import best_stages
from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.params import ModelSpec
from raytrain3d.plan.partition import Stages, counts_of, split_by_cost, split_by_counts, split_evenly, split_over_ranks
from raytrain3d.plan.workload import Simulator, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedSplit:
    """One of the splits that a plan compares."""

    name: str
    """`uniform`, `torchtitan`, `pipedream`, or `best`: least simulated step time."""
    layers: tuple[int, ...]
    """Of each stage."""
    gain: float
    """Simulated step time of `uniform` over its own."""


def partition(config: JobConfig, spec: ModelSpec, workload: Workload) -> Stages:
    """Stages as `pipeline.layers` or else `pipeline.partition` wants them. workload: a step of the replica with the most
    micro-batches."""
    if config.pipeline.layers is not None:
        return split_by_counts(config.pipeline.layers, workload.num_layers)
    match config.pipeline.partition:
        case "uniform":
            return uniform(workload.num_layers, workload.num_stages)
        case "parameters":
            return split_over_ranks(_parameters(spec), workload.placement)
        case "pipedream":
            return pipedream(workload.costs, workload.num_stages)
        case "flops" | "measured":
            return best(workload)


def compared(workload: Workload) -> tuple[NamedSplit, ...]:
    """What others would choose for a step, and the best split there is."""
    layers, stages, time = workload.num_layers, workload.num_stages, Simulator(workload).time
    splits = {"uniform": uniform(layers, stages), "torchtitan": torchtitan(layers, stages),
              "pipedream": pipedream(workload.costs, stages), "best": best(workload)}
    return tuple(NamedSplit(name=name, layers=counts_of(split), gain=time(splits["uniform"]) / time(split))
                 for name, split in splits.items())


def uniform(num_layers: int, num_stages: int) -> Stages:
    """Equal numbers of blocks, the first stages take the remainder; the embedding comes on top of the first stage, the head
    on top of the last (Megatron-LM without options). With fewer blocks than stages embedding and head count as blocks."""
    if num_layers - 2 < num_stages:
        return split_evenly(num_layers, num_stages)
    blocks = list(counts_of(split_evenly(num_layers - 2, num_stages)))
    blocks[0] += 1
    blocks[-1] += 1
    return split_by_counts(blocks, num_layers)


def torchtitan(num_layers: int, num_stages: int) -> Stages:
    """torchtitan's default: embedding and head count as one block each (`pipeline_parallel_first_stage_less_layers` and
    `..._last_stage_less_layers` are 1), and this number of layers is divided evenly, the first stages take the remainder."""
    return split_evenly(num_layers, num_stages)


def pipedream(costs: Sequence[LayerCost], num_stages: int) -> Stages:
    """The least time of the slowest stage, forward and backward together: PipeDream's partitioner
    (https://arxiv.org/abs/1806.03377) without replicated stages and with messages taken as free."""
    return split_by_cost([cost.total for cost in costs], num_stages)


@lru_cache(maxsize=16)
def best(workload: Workload) -> Stages:
    """The least simulated step time among splits that fit; among all if none fits, since the plan says then what is too
    large."""
    try:
        return best_stages(workload)
    except PlanError:
        return best_stages(replace(workload, excess=None))


def _parameters(spec: ModelSpec) -> list[int]:
    """By layer; both ends hold a tied weight."""
    tied = spec.tied.num_parameters if spec.tied is not None else 0
    return [layer.num_parameters + (tied if layer.kind != "block" else 0) for layer in spec.layers]
