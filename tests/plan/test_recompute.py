"""Recompute by layer and stage: which kind, what it costs, and that splits, simulations and estimates know it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from raytrain3d.config import JobConfig
from raytrain3d.plan.balance import best_stages, slowest_stage_least
from raytrain3d.plan.cost import LayerCost
from raytrain3d.plan.layout import rank_costs
from raytrain3d.plan.params import ModelSpec, model_spec
from raytrain3d.plan.plan import make_plan
from raytrain3d.plan.recompute import describe, recompute_kind, repeated_share
from raytrain3d.plan.workload import Workload, step_time

Job = Callable[..., JobConfig]


def spec_of(config: JobConfig) -> ModelSpec:
    return model_spec(config.model, config.train, config.mesh.tensor)


def kinds(config: JobConfig, stage: int = 0) -> str:
    """First letters, by layer."""
    return "".join(recompute_kind(config, layer, stage)[0] for layer in spec_of(config).layers)


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, "nnnnnn"), ({"recompute": "full"}, "nffffn"), ({"recompute": "selective"}, "nssssn"),
    ({"recompute": "full", "recompute_every": 2}, "nfnfnn"), ({"recompute": "full", "recompute_every": 3}, "nfnnfn")])
def test_blocks_of_a_job(job: Job, changes: dict[str, object], expected: str) -> None:
    assert kinds(job(**changes)) == expected


def test_stages_have_their_own_kind(job: Job) -> None:
    base = job(pipeline=3, recompute_every=2)
    config = replace(base, pipeline=replace(base.pipeline, recompute=("full", "selective", "none")))
    assert [kinds(config, stage) for stage in range(3)] == ["nfnfnn", "nsnsnn", "nnnnnn"]
    assert describe(config) == "full | selective | none by stage, one block of 2"
    assert "recompute full | selective | none by stage, one block of 2" in make_plan(config).table()


def test_share_of_the_forward_that_is_computed_again(job: Job) -> None:
    """Selective: 2 s^2 h of 2 s (4 h^2 + 3 h f) + 2 s^2 h FLOPs, of causal attention."""
    def share(recompute: str) -> float:
        config = job(recompute=recompute, hidden=64, feed_forward=192, sequence=32)
        return repeated_share(config, spec_of(config).layers[1], 0)

    weights = 4 * 64**2 + 3 * 64 * 192
    assert (share("none"), share("full")) == (0, 1)
    assert share("selective") == pytest.approx(32 * 64 / (weights + 32 * 64))


def test_cost_of_a_stage_follows_its_kind(job: Job) -> None:
    base = job(pipeline=2, layers=(3, 3))
    config = replace(base, pipeline=replace(base.pipeline, recompute=("full", "none")))
    plain, ours = (rank_costs(each, spec_of(each), ((0, 3), (3, 6))) for each in (base, config))
    embedding = base.train.sequence * base.model.hidden * base.train.micro_batch
    assert ours[0].backward_input == pytest.approx(plain[0].backward_input + plain[0].forward - embedding)
    assert (ours[0].forward, ours[0].backward_weight, ours[1]) == (plain[0].forward, plain[0].backward_weight, plain[1])


def test_split_by_flops_gives_stages_that_recompute_fewer_layers(job: Job) -> None:
    """A block costs 4 forwards on the first stage and 3 on the second: 6 and 8 blocks are even."""
    base = job(pipeline=2, blocks=14, vocabulary=4)
    config = replace(base, pipeline=replace(base.pipeline, recompute=("full", "none")))
    assert make_plan(base).stages == ((0, 8), (8, 16))
    assert make_plan(config).stages == ((0, 7), (7, 16))


def test_best_split_of_a_workload_knows_where_a_forward_is_repeated() -> None:
    block = LayerCost(forward=1.0, backward_input=1.0, backward_weight=1.0)
    plain = Workload(schedule="1f1b", num_ranks=2, shares=(8,), costs=(block,) * 14, slowdowns=((1.0, 1.0),))
    first = replace(plain, repeated=lambda stage, layer: 1.0 if stage == 0 else 0.0)
    assert best_stages(plain) == slowest_stage_least(plain) == ((0, 7), (7, 14))
    assert best_stages(first) == slowest_stage_least(first) == ((0, 6), (6, 14))
    as_long = replace(plain, costs=(block,) * 16)
    assert step_time(first, ((0, 6), (6, 14))) == pytest.approx(step_time(as_long, ((0, 8), (8, 16))))
