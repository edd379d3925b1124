"""Splits that others choose, by name: what measured balance is compared with.

A model's layers are embedding, blocks, head, in this order.
"""

from collections.abc import Sequence

from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.partition import Stages, split_by_cost, split_by_counts, split_evenly


def uniform(num_layers: int, num_stages: int) -> Stages:
    """Equal numbers of blocks, the first stages take the remainder; the embedding comes on top of the first stage, the head
    on top of the last (Megatron-LM without options)."""
    quotient, remainder = divmod(num_layers - 2, num_stages)
    blocks = [quotient + (stage < remainder) for stage in range(num_stages)]
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
