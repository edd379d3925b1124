from collections.abc import Callable
from itertools import product

import pytest

from raytrain3d.config import JobConfig
from raytrain3d.plan.memory import (
    activation_bytes_per_token,
    activation_memory,
    layer_state_memory,
    stage_memory,
    state_memory,
)
from raytrain3d.plan.params import flat_layout, model_spec

Job = Callable[..., JobConfig]
GB = 10**9


@pytest.mark.parametrize(("sharding", "gigabytes"), [("none", 120.0), ("optimizer", 31.4)])
def test_zero_paper(sharding: str, gigabytes: float) -> None:
    """7.5 billion parameters at d = 64 with 16-bit gradients (arXiv 1910.02054, figure 1)."""
    total = state_memory(7_500_000_000, dtype="bf16", sharding=sharding, data=64, gradient_bytes=2).total
    assert total / GB == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(("dtype", "sharding", "per_parameter"), [
    ("bf16", "none", 18), ("bf16", "optimizer", 6 + 12 / 8),
    ("fp32", "none", 16), ("fp32", "optimizer", 8 + 8 / 8),
    ("fp64", "none", 32), ("fp64", "optimizer", 16 + 16 / 8),
])
def test_bytes_of_a_parameter(dtype: str, sharding: str, per_parameter: float) -> None:
    assert state_memory(10**10, dtype=dtype, sharding=sharding, data=8).total == per_parameter * 10**10


def test_weights_of_175_billion_parameters_are_350_gigabytes() -> None:
    memory = state_memory(175 * GB, dtype="bf16", sharding="none", data=1, gradient_bytes=2)
    assert memory.weights == 350 * GB
    assert memory.gradients == 350 * GB
    assert memory.total == 2800 * GB


@pytest.mark.parametrize(("data", "tensor", "dtype", "sharding"),
                         list(product((1, 3), (1, 4), ("fp32", "bf16"), ("none", "optimizer"))))
def test_state_has_the_padding_of_the_flat_buffers(job: Job, data: int, tensor: int, dtype: str, sharding: str) -> None:
    config = job(data=data, tensor=tensor, dtype=dtype, sharding=sharding, vocabulary=300)
    for layer in model_spec(config.model, config.train, tensor).states:
        size, memory = flat_layout(layer, tensor=tensor, data=data).size, layer_state_memory(layer, config)
        own = size // data if sharding == "optimizer" else size
        assert memory.weights == size * (2 if dtype == "bf16" else 4)
        assert memory.gradients == size * 4
        assert memory.master == (own * 4 if dtype == "bf16" else 0)
        assert memory.moments == own * 8


def test_frozen_layers_have_weights_only(job: Job) -> None:
    config = job(freeze=("blocks.0",))
    memory = layer_state_memory(model_spec(config.model, config.train, 1).layers[1], config)
    assert memory.weights == memory.total > 0


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_activations_of_the_gpt3_form(job: Job, tensor: int) -> None:
    """s b h (10 + 24 / t + 5 a s / (h t)) with dropout and unfused attention (arXiv 2205.05198)."""
    hidden, heads, sequence = 12288, 96, 2048
    config = job(family="gpt2", hidden=hidden, heads=heads, feed_forward=4 * hidden, sequence=sequence, tensor=tensor,
                 dtype="bf16", dropout=0.1, attention_dropout=0.1)
    block = model_spec(config.model, config.train, tensor).layers[1]
    kept = activation_bytes_per_token(block, config.model, dtype="bf16", sequence=sequence, tensor=tensor)
    assert kept == pytest.approx(hidden * (10 + 24 / tensor + 5 * heads * sequence / (hidden * tensor)))


def test_fused_attention_drops_the_quadratic_term(job: Job) -> None:
    def kept(sequence: int) -> float:
        config = job(family="gpt2", feed_forward=256, dropout=0.1, dtype="bf16")
        block = model_spec(config.model, config.train, 1).layers[1]
        return activation_bytes_per_token(block, config.model, dtype="bf16", sequence=sequence, tensor=1)

    assert kept(32) == kept(4096) == 34 * 64


def test_activations_grow_with_micro_batches_in_flight_and_recompute_keeps_inputs(job: Job) -> None:
    hidden_bytes = 64 * 4 * 32  # one (1, 32, 64) tensor in FP32

    def activations(in_flight: int, **changes: object) -> int:
        config = job(**changes)
        spec = model_spec(config.model, config.train, 1)
        return activation_memory(config, spec, range(1, 5), in_flight).activations

    assert activations(0) == 0
    assert activations(4) == 4 * activations(1)
    kept = activations(3, recompute="full")
    assert kept - activations(2, recompute="full") == 4 * hidden_bytes
    assert kept < activations(1)
    assert activations(0, recompute="full") == 0


def test_logits_are_on_the_last_stage_and_divided_over_tensor_ranks(job: Job) -> None:
    """4 s b V / t bytes for each micro-batch in flight."""
    config = job(tensor=2, micro_batch=2, dtype="bf16")
    spec = model_spec(config.model, config.train, 2)
    assert activation_memory(config, spec, range(3), 4).logits == 0
    assert activation_memory(config, spec, range(3, 6), 3).logits == 3 * 4 * 32 * 2 * 256 // 2


def test_a_stage_holds_its_layers_and_the_tied_weight(job: Job) -> None:
    config = job(tied_embeddings=True)
    spec = model_spec(config.model, config.train, 1)
    first, middle, last = (stage_memory(config, spec, layers, 1) for layers in (range(1), range(1, 5), range(5, 6)))
    assert spec.tied is not None
    tied = layer_state_memory(spec.tied, config).weights
    assert first.weights == tied
    assert last.weights == tied + layer_state_memory(spec.layers[5], config).weights
    assert middle.weights == 4 * layer_state_memory(spec.layers[1], config).weights
