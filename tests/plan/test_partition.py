import random
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise, product

import pytest

from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.partition import (
    Stages,
    split_by_cost,
    split_by_counts,
    split_evenly,
    split_over_ranks,
)
from raytrain3d.plan.plan import make_plan

Job = Callable[..., JobConfig]


def stages_of(config: JobConfig) -> Stages:
    return make_plan(config).stages


def counts(stages: Stages) -> list[int]:
    return [end - first for first, end in stages]


def slowest(stages: Stages, costs: list[float]) -> float:
    return max(sum(costs[first:end]) for first, end in stages)


def every_split(num_layers: int, num_stages: int) -> list[Stages]:
    return [tuple(pairwise((0, *cuts, num_layers))) for cuts in combinations(range(1, num_layers), num_stages - 1)]


@pytest.mark.parametrize("seed", range(40))
def test_slowest_stage_is_the_least_of_all_splits(seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.choice((0.0, 0.1, 1.0, draw.random(), 10 * draw.random())) for _ in range(draw.randint(1, 10))]
    for num_stages in range(1, len(costs) + 1):
        found = split_by_cost(costs, num_stages)
        assert found in every_split(len(costs), num_stages)
        least = min(slowest(split, costs) for split in every_split(len(costs), num_stages))
        assert slowest(found, costs) == pytest.approx(least)


@pytest.mark.parametrize(("blocks", "num_stages", "how"),
                         list(product((6, 28, 30), (1, 2, 3, 4, 8), ("flops", "parameters", "pipedream", "uniform"))))
def test_no_layer_is_lost(job: Job, blocks: int, num_stages: int, how: str) -> None:
    stages = stages_of(job(blocks=blocks, pipeline=num_stages, partition=how))
    assert [layer for first, end in stages for layer in range(first, end)] == list(range(blocks + 2))
    assert min(counts(stages)) >= 1


def test_thirty_layers_on_four_stages() -> None:
    assert counts(split_evenly(30, 4)) == [8, 8, 7, 7]
    assert sorted(counts(split_by_cost([1.0] * 30, 4))) == [7, 7, 8, 8]


def test_a_costly_head_gets_a_stage_with_fewer_blocks(job: Job) -> None:
    """Llama-3.2-1B: the head costs 3.8 blocks."""
    config = job(vocabulary=128256, hidden=2048, blocks=16, heads=32, kv_heads=8, feed_forward=8192, sequence=4096,
                 pipeline=4)
    assert counts(stages_of(config)) == [6, 5, 5, 2]


def test_equal_splits_go_to_fewer_layers_on_early_stages() -> None:
    assert counts(split_by_cost([1.0] * 7, 3)) == [2, 2, 3]
    # Sums of 0.1 round differently by place; equal layers must count as equal all the same.
    assert counts(split_by_cost([0.1] * 7, 3)) == [2, 2, 3]


def test_among_splits_of_one_slowest_stage_the_rest_is_even() -> None:
    assert split_by_cost([4, 1, 1, 1, 1], 3) == ((0, 1), (1, 3), (3, 5))


IN_A_V, ROUND_ROBIN = (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2)


def loads(stages: Stages, costs: list[float], placement: Sequence[int]) -> list[float]:
    return [sum(sum(costs[first:end]) for (first, end), at in zip(stages, placement, strict=True) if at == rank)
            for rank in range(max(placement) + 1)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("placement", [IN_A_V, ROUND_ROBIN])
def test_ranks_of_several_stages_are_evened_out(seed: int, placement: tuple[int, ...]) -> None:
    """Never worse than the split by stages, and at most one layer above the best of all splits."""
    draw = random.Random(seed)
    costs = [draw.choice((0.1, 1.0, 1.0, 1.0, 3 * draw.random())) for _ in range(draw.randint(6, 11))]
    found = split_over_ranks(costs, placement)
    assert found in every_split(len(costs), len(placement))
    slowest_rank = max(loads(found, costs, placement))
    best = min(max(loads(split, costs, placement)) for split in every_split(len(costs), len(placement)))
    assert slowest_rank <= max(loads(split_by_cost(costs, len(placement)), costs, placement)) + 1e-9
    assert best - 1e-9 <= slowest_rank < best + max(costs)


def test_one_stage_for_each_rank_is_split_by_cost() -> None:
    draw = random.Random(1)
    for num_stages in (1, 2, 3, 5):
        costs = [draw.random() for _ in range(9)]
        assert split_over_ranks(costs, range(num_stages)) == split_by_cost(costs, num_stages)


def test_rank_that_holds_both_ends_gets_a_costly_head_and_the_embedding_alone() -> None:
    """A head of 5 blocks, in a V over 4 ranks, where the slowest stage alone would put 2 blocks beside it."""
    costs, placement = [0.01, *[1.0] * 14, 5.0], (0, 1, 2, 3, 3, 2, 1, 0)
    found = split_over_ranks(costs, placement)
    assert (counts(found)[0], counts(found)[-1]) == (1, 1)
    assert sorted(loads(found, costs, placement)) == [4.0, 5.0, 5.0, 5.01]
    assert max(loads(split_by_cost(costs, 8), costs, placement)) > 7


def test_chunks_of_a_job_are_evened_out(job: Job) -> None:
    """6 blocks on 2 ranks: 3 each, with the embedding and a light head on the rank of both ends."""
    stages = stages_of(job(blocks=6, pipeline=2, vocabulary=8, schedule="zb_v"))
    assert counts(stages)[0] + counts(stages)[3] == 5


def test_scale_does_not_matter() -> None:
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    assert split_by_cost(costs, 3) == split_by_cost([cost * 1e-7 for cost in costs], 3)


def test_layers_without_cost_still_fill_every_stage() -> None:
    assert counts(split_by_cost([0.0] * 4, 3)) == [1, 1, 2]


def test_a_large_model_is_split_in_moderate_time() -> None:
    assert len(split_by_cost([1.0] * 130, 64)) == 64


def test_given_layers_are_taken(job: Job) -> None:
    assert stages_of(job(pipeline=3, layers=(1, 4, 1))) == ((0, 1), (1, 5), (5, 6))


def test_parameters_count_a_tied_weight_on_both_ends(job: Job) -> None:
    config = job(vocabulary=4096, pipeline=3, partition="parameters", tied_embeddings=True)
    assert counts(stages_of(config)) == [1, 4, 1]


@pytest.mark.parametrize("bad", [(2, 2), (3, 0, 1), (), (5, -1)])
def test_counts_must_hold_all_layers(bad: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="do not hold 5 layers"):
        split_by_counts(bad, 5)


def test_more_stages_than_layers() -> None:
    with pytest.raises(PlanError, match="3 layers cannot be split over 4 stages"):
        split_by_cost([1.0] * 3, 4)


def test_negative_cost() -> None:
    with pytest.raises(PlanError, match="at least 0, one is -1"):
        split_by_cost([1.0, -1.0], 1)
