from collections.abc import Callable

import pytest

from raytrain3d.config import JobConfig
from raytrain3d.plan.cost import (
    NO_COST,
    LayerCost,
    layer_costs,
    layer_flops,
    model_flops_per_token,
    model_flops_utilization,
    op_cost,
    stage_cost,
)
from raytrain3d.plan.params import ModelSpec, model_spec
from raytrain3d.plan.recompute import repeated_share
from raytrain3d.plan.schedule import Kind, Op

Job = Callable[..., JobConfig]
SEQUENCE, VOCABULARY = 2048, 51200

# hidden, layers, heads, GPUs, batch, TFLOP/s a GPU, % of peak (arXiv 2104.04473, table 1)
TABLE_1 = {
    "1.7": (2304, 24, 24, 32, 512, 137, 44), "3.6": (3072, 30, 32, 64, 512, 138, 44),
    "7.5": (4096, 36, 32, 128, 512, 142, 46), "18.4": (6144, 40, 48, 256, 1024, 135, 43),
    "39.1": (8192, 48, 64, 512, 1536, 138, 44), "76.1": (10240, 60, 80, 1024, 1792, 140, 45),
    "145.6": (12288, 80, 96, 1536, 2304, 148, 47), "310.1": (16384, 96, 128, 1920, 2160, 155, 50),
    "529.6": (20480, 105, 128, 2520, 2520, 163, 52), "1008.0": (25600, 128, 160, 3072, 3072, 163, 52),
}


def gpt(job: Job, hidden: int, blocks: int, heads: int) -> ModelSpec:
    config = job(family="gpt2", vocabulary=VOCABULARY, hidden=hidden, blocks=blocks, heads=heads,
                 feed_forward=4 * hidden, sequence=SEQUENCE, tied_embeddings=True)
    return model_spec(config.model, config.train, 1)


@pytest.mark.parametrize("billions", TABLE_1)
def test_flops_of_an_iteration(job: Job, billions: str) -> None:
    """96 B s L h^2 (1 + s / 6h + V / 16Lh) with blocks recomputed, 72 B s L h^2 (1 + s / 6h + V / 12Lh) without."""
    h, layers, heads, _, batch, _, _ = TABLE_1[billions]
    spec = gpt(job, h, layers, heads)
    recomputed = sum(layer_flops(layer, SEQUENCE, causal=False).repeating(layer.kind == "block").total
                     for layer in spec.layers)
    assert batch * recomputed == pytest.approx(
        96 * batch * SEQUENCE * layers * h**2 * (1 + SEQUENCE / (6 * h) + VOCABULARY / (16 * layers * h)), rel=1e-12)
    needed = batch * SEQUENCE * model_flops_per_token(spec, SEQUENCE, causal=False)
    assert needed == pytest.approx(
        72 * batch * SEQUENCE * layers * h**2 * (1 + SEQUENCE / (6 * h) + VOCABULARY / (12 * layers * h)), rel=1e-12)


@pytest.mark.parametrize("billions", TABLE_1)
def test_parameter_counts_of_table_1(job: Job, billions: str) -> None:
    hidden, layers, heads, *_ = TABLE_1[billions]
    assert gpt(job, hidden, layers, heads).num_parameters / 1e9 == pytest.approx(float(billions), abs=0.06, rel=1e-3)


@pytest.mark.parametrize("billions", TABLE_1)
def test_share_of_peak_of_table_1(billions: str) -> None:
    _, _, _, gpus, _, teraflops, percent = TABLE_1[billions]
    share = model_flops_utilization(1e9, tokens_per_s=teraflops * 1e3 * gpus, num_ranks=gpus, peak_flops=312e12)
    assert 100 * share == pytest.approx(percent, abs=0.75)


def test_backward_is_two_forwards_three_with_recompute_one_when_frozen(job: Job) -> None:
    """Input gradient and weight gradient cost a forward each; the forward again goes with the input gradient."""
    def ratios(recompute: bool, freeze: tuple[str, ...] = ()) -> tuple[float, float]:
        config = job(freeze=freeze)
        cost = layer_flops(model_spec(config.model, config.train, 1).layers[1], 32).repeating(recompute)
        assert cost.total == cost.forward + cost.backward == cost.forward + cost.backward_input + cost.backward_weight
        return cost.backward_input / cost.forward, cost.backward_weight / cost.forward

    assert (ratios(False), ratios(True), ratios(False, ("blocks.0",))) == ((1, 1), (2, 1), (1, 0))


def test_cost_of_each_kind_of_op() -> None:
    stages = (LayerCost(forward=1.0, backward_input=2.0, backward_weight=4.0), NO_COST)
    costs = {kind: op_cost(Op(kind, 0, 3), stages) for kind in Kind}
    assert costs == dict.fromkeys(Kind, 0.0) | {
        Kind.FORWARD: 1.0, Kind.BACKWARD: 6.0, Kind.BACKWARD_INPUT: 2.0, Kind.BACKWARD_WEIGHT: 4.0}


def test_embedding_costs_next_to_nothing_but_not_nothing(job: Job) -> None:
    config = job()
    costs = layer_costs(config, model_spec(config.model, config.train, 1))
    assert 0 < costs[0].total < costs[1].total / 100
    assert stage_cost(costs, range(2)).forward == costs[0].forward + costs[1].forward


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_loss_in_chunks_makes_all_gradients_of_the_head_in_its_forward(job: Job, recompute: str) -> None:
    """It costs what it costs otherwise, and is never computed again."""
    config, whole = job(recompute=recompute), job(recompute=recompute, loss_chunk=None)
    spec = model_spec(config.model, config.train, 1)
    head, other = (layer_costs(each, spec)[-1] for each in (config, whole))
    assert head.total == pytest.approx(other.total, rel=1e-2)
    assert head.backward_weight == 0
    assert head.forward == other.total
    assert repeated_share(config, spec.layers[-1], 0) == 0
