import runpy
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from pathlib import Path

import pytest

from raytrain3d.config import JobConfig
from raytrain3d.errors import PlanError
from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.partition import Stages, counts_of
from raytrain3d.plan.plan import make_plan
from raytrain3d.plan.splits import pipedream, torchtitan, uniform

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "partition.py"))


def split(*counts: int) -> Stages:
    return tuple(pairwise(accumulate(counts, initial=0)))


def test_uniform_divides_the_blocks() -> None:
    assert uniform(34, 8) == split(5, 4, 4, 4, 4, 4, 4, 5)
    assert uniform(30, 8) == split(5, 4, 4, 4, 3, 3, 3, 4)
    assert uniform(5, 1) == split(5)
    assert uniform(5, 4) == split(2, 1, 1, 1), "too few blocks for every stage"


def test_torchtitan_counts_embedding_and_head_as_blocks() -> None:
    """Its own example: 6 blocks on 3 stages leave 1 with the head."""
    assert torchtitan(8, 3) == split(3, 3, 2)
    assert torchtitan(34, 8) == split(5, 5, 4, 4, 4, 4, 4, 4)


def test_pipedream_looks_at_the_slowest_stage() -> None:
    costs = [LayerCost(forward=cost, backward_input=cost, backward_weight=cost) for cost in (0.1, 1, 1, 1, 1, 3)]
    assert pipedream(costs, 3) == split(3, 2, 1)


@pytest.mark.parametrize(("model", "gain"), [
    ("Llama-3.1-8B", 1.24), ("Llama-3.2-1B", 1.45), ("Llama-3.2-3B", 1.50), ("Qwen3-1.7B", 1.47), ("Llama-3.1-70B", 1.03)])
def test_gain_over_uniform_on_eight_stages(model: str, gain: float) -> None:
    gains = {split.name: split.gain for split in BENCHMARK["splits_of"](BENCHMARK["MODELS"][model], 8)}
    assert gains["uniform"] == 1
    assert gains["best"] == pytest.approx(gain, abs=0.02)
    assert gains["best"] == max(gains.values())


Job = Callable[..., JobConfig]


def test_a_plan_compares_its_split_with_those_of_others(job: Job) -> None:
    plan = make_plan(job(pipeline=3, blocks=6, vocabulary=4096, partition="uniform"))
    assert [split.name for split in plan.splits] == ["uniform", "torchtitan", "pipedream", "best"]
    assert counts_of(plan.stages) == plan.splits[0].layers == (3, 2, 3)
    best = make_plan(job(pipeline=3, blocks=6, vocabulary=4096))
    assert best.splits == plan.splits
    assert counts_of(best.stages) == best.splits[-1].layers
    assert plan.splits[-1].gain == pytest.approx((1 - best.idle_share) / (1 - plan.idle_share))
    assert plan.splits[-1].gain > 1.2
    even, titan, _, most = plan.splits
    gains = f"{most.gain:.3f}x the speed of uniform, {most.gain / titan.gain:.3f}x the speed of torchtitan"
    assert f"best {','.join(map(str, most.layers))}: {gains}" in plan.table()
    assert even.gain == 1


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "interleaved"])
def test_by_flops_no_split_has_a_shorter_step(job: Job, schedule: str) -> None:
    config = job(pipeline=2, blocks=7, vocabulary=1024, schedule=schedule)
    idle = make_plan(config).idle_share
    stages = len(make_plan(config).stages)
    for cuts in combinations(range(1, 9), stages - 1):
        counts = tuple(end - first for first, end in pairwise((0, *cuts, 9)))
        given = replace(config, pipeline=replace(config.pipeline, layers=counts))
        assert make_plan(given).idle_share >= idle - 1e-9


def test_by_flops_a_split_that_fits_is_taken(job: Job) -> None:
    config = job(pipeline=3, blocks=12, vocabulary=8192, tied_embeddings=True)
    free = make_plan(config)
    most = max(estimate.memory.total for estimate in free.estimates)
    bounded = replace(config, placement=replace(config.placement, memory_per_rank_gib=(most - 1) / 2**30))
    plan = make_plan(bounded)
    assert plan.stages != free.stages
    assert max(estimate.memory.total for estimate in plan.estimates) < most
    assert plan.idle_share >= free.idle_share
    with pytest.raises(PlanError, match=r"too little for pipeline\.schedule 1f1b"):
        make_plan(replace(config, placement=replace(config.placement, memory_per_rank_gib=1e-6)))


def test_measured_costs_decide_when_there_are_some(job: Job) -> None:
    config = job(pipeline=3, blocks=6, partition="measured")
    costs = [LayerCost(forward=cost, backward_input=cost, backward_weight=cost) for cost in (0.1, 3, 3, 1, 1, 1, 1, 0.1)]
    plan = make_plan(config, measured=tuple(costs))
    assert counts_of(plan.stages) == (2, 2, 4)
    assert plan.split_by == "measured"
    fallen_back = make_plan(config)
    assert fallen_back.stages == make_plan(job(pipeline=3, blocks=6)).stages
    assert "by flops: this run directory has no measured step yet" in fallen_back.table()
