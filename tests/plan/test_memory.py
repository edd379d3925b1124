from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from raytrain3d.config import JobConfig, Recompute
from raytrain3d.plan.activations import Activations, activation_bytes_per_token, activation_memory, product_bytes_per_token
from raytrain3d.plan.memory import rank_memory
from raytrain3d.plan.state_memory import Memory, layer_state_memory, state_memory, transient_memory
from raytrain3d.plan.params import flat_layout, model_spec
from raytrain3d.plan.schedule import Kind, Op

Job = Callable[..., JobConfig]
GB = 10**9


@pytest.mark.parametrize(("sharding", "gigabytes"), [("none", 120.0), ("optimizer", 31.4), ("gradients", 16.6),
                                                     ("full", 1.9)])
def test_zero_paper(sharding: str, gigabytes: float) -> None:
    """7.5 billion parameters at d = 64 with 16-bit gradients (arXiv 1910.02054, figure 1)."""
    total = state_memory(7_500_000_000, dtype="bf16", sharding=sharding, data=64, gradient_bytes=2).total
    assert total / GB == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(("dtype", "sharding", "per_parameter"), [
    ("bf16", "none", 18), ("bf16", "optimizer", 6 + 12 / 8), ("bf16", "gradients", 2 + 16 / 8), ("bf16", "full", 18 / 8),
    ("fp32", "none", 16), ("fp32", "optimizer", 8 + 8 / 8), ("fp32", "gradients", 4 + 12 / 8), ("fp32", "full", 16 / 8),
    ("fp64", "none", 32), ("fp64", "optimizer", 16 + 16 / 8), ("fp64", "full", 32 / 8),
])
def test_bytes_of_a_parameter(dtype: str, sharding: str, per_parameter: float) -> None:
    assert state_memory(10**10, dtype=dtype, sharding=sharding, data=8).total == per_parameter * 10**10


def test_weights_of_175_billion_parameters_are_350_gigabytes() -> None:
    memory = state_memory(175 * GB, dtype="bf16", sharding="none", data=1, gradient_bytes=2)
    assert memory.weights == 350 * GB
    assert memory.gradients == 350 * GB
    assert memory.total == 2800 * GB


@pytest.mark.parametrize(("data", "tensor", "dtype", "sharding"),
                         list(product((1, 3), (1, 4), ("fp32", "bf16"), ("none", "optimizer", "gradients", "full"))))
def test_state_has_the_padding_of_the_flat_buffers(job: Job, data: int, tensor: int, dtype: str, sharding: str) -> None:
    config = job(data=data, tensor=tensor, dtype=dtype, sharding=sharding, vocabulary=300)
    for layer in model_spec(config.model, config.train, tensor).states:
        layout, memory = flat_layout(layer, tensor=tensor, data=data), layer_state_memory(layer, config)
        own = layout.size if sharding == "none" else layout.size // data
        assert memory.weights == (own if sharding == "full" else layout.size) * (2 if dtype == "bf16" else 4)
        vectors = sum(slot.size for slot in layout.vectors) if data > 1 else 0
        assert memory.gradients == (own + vectors if sharding in ("gradients", "full") else layout.size) * 4
        assert memory.master == (own * 4 if dtype == "bf16" else 0)
        assert memory.moments == own * 8


def test_state_is_shared_within_a_shard_group(job: Job) -> None:
    config = job(data=4, sharding="full", shard_group=2)
    block = model_spec(config.model, config.train, 1).layers[1]
    assert layer_state_memory(block, config).weights == flat_layout(block, tensor=1, data=4).size // 2 * 4


@pytest.mark.parametrize(("changes", "weights", "gradients"), [
    ({"sharding": "none"}, 0, 0), ({"sharding": "optimizer"}, 0, 0), ({"sharding": "gradients"}, 0, 2),
    ({"sharding": "full"}, 2, 2), ({"sharding": "full", "keep_gathered": "step"}, 4, 2),
])
def test_layers_at_work_have_memory_for_whole_weights_and_gradients(job: Job, changes: dict[str, Any], weights: int,
                                                                    gradients: int) -> None:
    """Four blocks, forward and back: the one at work and its neighbour, or all that are kept for the step."""
    config = job(data=2, **changes)
    spec = model_spec(config.model, config.train, 1)
    block = flat_layout(spec.layers[1], tensor=1, data=2).size
    found = transient_memory(config, spec, {0: range(1, 5)}, warm_up(3)).transient
    result = block // 2 if gradients else 0  # what a reduction gives, beside what it takes
    assert found == (block * (weights + gradients) + result) * 4


def test_frozen_layers_have_weights_only(job: Job) -> None:
    config = job(freeze=("blocks.0",))
    memory = layer_state_memory(model_spec(config.model, config.train, 1).layers[1], config)
    assert memory.weights == memory.total > 0


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_activations_of_the_gpt3_form(job: Job, tensor: int) -> None:
    """s b h (10 + 24 / t + 5 a s / (h t)) with dropout and unfused attention, (s b h / t) (34 + 5 a s / h) with sequence
    parallelism, 34 s b h / t with selective recompute and 2 s b h / t with full (arXiv 2205.05198)."""
    hidden, heads, sequence = 12288, 96, 2048
    config = job(family="gpt2", hidden=hidden, heads=heads, feed_forward=4 * hidden, sequence=sequence, tensor=tensor,
                 dtype="bf16", dropout=0.1, attention_dropout=0.1)
    block = model_spec(config.model, config.train, tensor).layers[1]

    def kept(sequence_parallel: bool, recompute: Recompute = "none") -> float:
        return activation_bytes_per_token(block, config.model, dtype="bf16", sequence=sequence, tensor=tensor,
                                          sequence_parallel=sequence_parallel, recompute=recompute)

    assert kept(False) == pytest.approx(hidden * (10 + 24 / tensor + 5 * heads * sequence / (hidden * tensor)))
    assert kept(True) == pytest.approx(hidden / tensor * (34 + 5 * heads * sequence / hidden))
    assert kept(True, "selective") == pytest.approx(34 * hidden / tensor)
    assert (kept(True, "full"), kept(False, "full")) == (2 * hidden / tensor, 2 * hidden)


def test_fused_attention_drops_the_quadratic_term(job: Job) -> None:
    def kept(sequence: int) -> float:
        config = job(family="gpt2", feed_forward=256, dropout=0.1, dtype="bf16")
        block = model_spec(config.model, config.train, 1).layers[1]
        return activation_bytes_per_token(block, config.model, dtype="bf16", sequence=sequence, tensor=1)

    assert kept(32) == kept(4096) == 34 * 64


def warm_up(in_flight: int) -> list[Op]:
    """`in_flight` forwards and their backwards."""
    return [Op(kind, 0, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(in_flight)]


def activations_of(job: Job, layers: range, ops: list[Op], **changes: object) -> Memory:
    config = job(**changes)
    return activation_memory(config, model_spec(config.model, config.train, config.mesh.tensor), {0: layers}, ops)


def test_activations_grow_with_micro_batches_in_flight_and_recompute_keeps_inputs(job: Job) -> None:
    hidden_bytes = 64 * 4 * 32  # one (1, 32, 64) tensor in FP32

    def activations(in_flight: int, **changes: object) -> int:
        return activations_of(job, range(1, 5), warm_up(in_flight), **changes).activations

    assert activations(0) == 0
    assert activations(4) - activations(3) == activations(2) - activations(1) > activations(1) / 2
    kept = activations(3, recompute="full")
    assert kept - activations(2, recompute="full") == 4 * hidden_bytes
    assert kept < activations(1)
    assert activations(0, recompute="full") == 0


def test_logits_are_on_the_last_stage_and_divided_over_tensor_ranks(job: Job) -> None:
    """4 s b V / t bytes for each micro-batch in flight."""
    changes = {"tensor": 2, "micro_batch": 2, "dtype": "bf16", "loss_chunk": None}
    assert activations_of(job, range(3), warm_up(4), **changes).logits == 0
    assert activations_of(job, range(3, 6), warm_up(3), **changes).logits == 3 * 4 * 32 * 2 * 256 // 2


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_loss_in_chunks_has_the_logits_of_one_chunk(job: Job, recompute: str) -> None:
    """Within a forward, however many micro-batches are in flight. 2 x 32 tokens in parts of at most 30 are three parts of at
    most 22."""
    changes = {"micro_batch": 2, "loss_chunk": 30, "recompute": recompute, "vocabulary": 2**15}
    assert activations_of(job, range(3), warm_up(4), **changes).logits == 0
    for in_flight in (1, 4):
        assert activations_of(job, range(3, 6), warm_up(in_flight), **changes).logits == 22 * 2**15 * 4


@pytest.mark.parametrize(("changes", "bytes_per_token"), [
    ({}, 4 * (2 * 64 + 192)),  # inputs of the norms; gate, up and what is made of them
    ({"recompute": "full"}, 4 * 64),
    ({"recompute": "selective"}, 4 * (2 * 64 + 192)),
    ({"attention_dropout": 0.1}, 4 * (2 * 64 + 192) + (2 * 4 + 1) * 4 * 32),
    ({"attention_dropout": 0.1, "recompute": "selective"}, 4 * (2 * 64 + 192)),
])
def test_what_a_block_keeps_beside_its_products(job: Job, changes: dict[str, object], bytes_per_token: int) -> None:
    """A llama block of hidden 64 and feed-forward 192 in FP32 until its backward; products after I, whatever was before."""
    config = job(**changes)
    block = model_spec(config.model, config.train, 1).layers[1]
    products = product_bytes_per_token(block, config.model, dtype="fp32", tensor=1)
    assert products == 4 * (4 * 64 + 4 * 64 + 3 * 192)
    kept = activation_bytes_per_token(block, config.model, dtype="fp32", sequence=32, tensor=1,
                                      recompute=config.train.recompute)
    inputs = 0 if config.train.recompute == "full" else 4 * (2 * 64 + 4 * 64 + 3 * 192)
    assert kept == inputs + bytes_per_token


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_split_backward_holds_products_until_the_weight_gradient(job: Job, recompute: str) -> None:
    """F0 I0 F1 I1 W0 W1 of four blocks: two times all products and the received activation, whatever was kept before I."""
    ops = [Op(kind, 0, i) for i in range(2) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT)]
    ops += [Op(Kind.BACKWARD_WEIGHT, 0, i) for i in range(2)]
    config = job(recompute=recompute)
    spec = model_spec(config.model, config.train, 1)
    activations = Activations(config=config, spec=spec, stages={0: range(1, 5)})
    products = product_bytes_per_token(spec.layers[1], config.model, dtype="fp32", tensor=1)
    assert activations.kept(0, Kind.BACKWARD_INPUT).total == 32 * (4 * products + 4 * 64)
    after_f, after_i = (activations.kept(0, kind).total for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT))
    held = activation_memory(config, spec, {0: range(1, 5)}, ops).total
    assert 2 * after_i <= held < after_i + max(after_f, after_i) + 1.1 * 32 * products


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_sequence_parallelism_divides_what_is_carried(job: Job, tensor: int) -> None:
    config = job(tensor=tensor, sequence_parallel=True, recompute="full", pipeline=2)
    spec = model_spec(config.model, config.train, tensor)
    kept = Activations(config=config, spec=spec, stages={0: range(1, 4)}).kept(0, Kind.FORWARD)
    assert kept.total == 3 * 32 * 64 * 4 / tensor


def test_uneven_chunks_are_counted_by_what_each_holds_at_the_peak(job: Job) -> None:
    """Stage 0 (1 block) twice, then stage 1 (3 blocks) once: neither the most micro-batches nor a mean of stages."""
    config = job()
    spec = model_spec(config.model, config.train, 1)

    def activations(ops: str) -> int:
        program = [Op(Kind(text[1]), int(text[0]), int(text[2])) for text in ops.split()]
        return activation_memory(config, spec, {0: range(1, 2), 1: range(2, 5)}, program).activations

    small, large = activations("0F0 0B0"), activations("1F0 1B0")
    assert large > 1.5 * small
    assert activations("0F0 0F1 0B0 0B1 1F0 1B0") == large
    kept = Activations(config=config, spec=spec, stages={0: range(1, 2)}).kept(0, Kind.FORWARD).total
    assert activations("0F0 1F0 1B0 0F1 0F2 0B0 0B1 0B2") == kept + large


def test_a_rank_holds_its_layers_and_the_tied_weight_once(job: Job) -> None:
    config = job(tied_embeddings=True)
    spec = model_spec(config.model, config.train, 1)

    def weights(*layers: range) -> int:
        return rank_memory(config, spec, dict(enumerate(layers)), []).weights

    assert spec.tied is not None
    tied, *_, head = (layer_state_memory(state, config).weights for state in (spec.tied, spec.layers[5]))
    block = layer_state_memory(spec.layers[1], config).weights
    assert weights(range(1)) == tied
    assert weights(range(5, 6)) == tied + head
    assert weights(range(1, 5)) == 4 * block
    assert weights(range(2), range(4, 6)) == tied + head + 2 * block


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_optimizer_state_on_the_host(job: Job, dtype: str) -> None:
    """Two moments and a master copy, 12 bytes a parameter; weights and gradients stay."""
    config, other = job(dtype=dtype, offload_optimizer=True), job(dtype=dtype)
    layer = model_spec(config.model, config.train, 1).layers[1]
    memory, stays = (layer_state_memory(layer, each) for each in (config, other))
    assert memory.total == memory.weights + memory.gradients == stays.weights + stays.gradients
    assert memory.host == 3 * stays.gradients


def test_activations_on_the_host_leave_the_inputs_of_layers(job: Job) -> None:
    """4 micro-batches of 4 blocks: 16 inputs and 4 outputs stay. In all it is what the device would keep."""
    kept = activations_of(job, range(1, 5), warm_up(4), offload_activations=True)
    whole = activations_of(job, range(1, 5), warm_up(4))
    assert kept.host > 3 * kept.total
    assert kept.total < whole.total / 2
    one = activations_of(job, range(1, 5), warm_up(1), offload_activations=True)
    assert kept.host == 4 * one.host
