import runpy
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from raytrain3d.errors import PlanError
from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.splits import pipedream, torchtitan, uniform

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "partition.py"))


def split(*counts: int) -> Stages:
    return tuple(pairwise(accumulate(counts, initial=0)))


def test_uniform_divides_the_blocks() -> None:
    assert uniform(34, 8) == split(5, 4, 4, 4, 4, 4, 4, 5)
    assert uniform(30, 8) == split(5, 4, 4, 4, 3, 3, 3, 4)
    assert uniform(5, 1) == split(5)
    with pytest.raises(PlanError, match=r"stages of \[2, 1, 0, 1\] layers do not hold 4 layers"):
        uniform(4, 4)


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
    workload = BENCHMARK["workload_of"](BENCHMARK["MODELS"][model], 8)
    gains = BENCHMARK["gains_of"](workload, BENCHMARK["splits_of"](workload))
    assert gains["best"] == pytest.approx(gain, abs=0.02)
    assert gains["best"] >= max(gains.values())
