import math
from collections.abc import Callable
from itertools import pairwise, product

import pytest

from raytrain3d.config import JobConfig
from raytrain3d.plan.params import ALIGNMENT, LayerSpec, ModelSpec, Rectangle, flat_layout, local_rectangle, model_spec

Job = Callable[..., JobConfig]
SHAPES = {
    "llama": {},
    "llama tied": {"tied_embeddings": True},
    "grouped": {"heads": 8, "kv_heads": 2, "qk_norm": True, "qkv_bias": True},
    "gpt2": {"family": "gpt2"},
    "gpt2 tied": {"family": "gpt2", "tied_embeddings": True},
    "odd sizes": {"vocabulary": 1000, "hidden": 52, "heads": 8, "head_size": 10, "feed_forward": 88},
}


def manifest(job: Job, tensor: int, **changes: object) -> ModelSpec:
    config = job(tensor=tensor, **changes)
    return model_spec(config.model, config.train, tensor)


def names(layer: LayerSpec) -> list[str]:
    return [param.name for param in layer.params]


def test_llama_layers(job: Job) -> None:
    spec = manifest(job, 1)
    assert [layer.name for layer in spec.layers] == ["embedding", *(f"blocks.{i}" for i in range(4)), "head"]
    assert [layer.index for layer in spec.layers] == list(range(6))
    assert names(spec.layers[1]) == [
        "attention_norm.weight", "attention.query.weight", "attention.key.weight", "attention.value.weight",
        "attention.output.weight", "mlp_norm.weight", "mlp.gate.weight", "mlp.up.weight", "mlp.down.weight"]
    assert names(spec.layers[0]) == ["tokens.weight"]
    assert names(spec.layers[-1]) == ["norm.weight", "output.weight"]
    assert spec.tied is None


def test_gpt2_has_positions_and_biases(job: Job) -> None:
    spec = manifest(job, 1, family="gpt2", positions=40)
    assert names(spec.layers[0]) == ["tokens.weight", "positions.weight"]
    assert spec.layers[0].params[1].shape == (40, 64)
    biases = [param for param in spec.layers[1].params if param.name.endswith("bias")]
    assert len(biases) == 8
    assert all(not param.decay and param.initial == "zeros" for param in biases)


def test_columns_are_split_for_inputs_and_rows_for_outputs(job: Job) -> None:
    split = {param.name: param.split for param in manifest(job, 2, family="gpt2").layers[1].params}
    assert split["attention.query.weight"] == split["mlp.up.weight"] == 0
    assert split["attention.query.bias"] == split["mlp.up.bias"] == 0
    assert split["attention.output.weight"] == split["mlp.down.weight"] == 1
    assert split["attention.output.bias"] is split["mlp.down.bias"] is split["mlp_norm.weight"] is None


def test_tied_weight_is_a_state_of_both_ends_and_counted_once(job: Job) -> None:
    tied, untied = manifest(job, 1, tied_embeddings=True), manifest(job, 1)
    assert tied.tied is not None
    assert untied.num_parameters - tied.num_parameters == 256 * 64
    held = [[state.name for state in tied.states_of(layers)] for layers in (range(2), range(2, 4), range(4, 6))]
    assert held == [["embedding", "blocks.0", "tied"], ["blocks.1", "blocks.2"], ["blocks.3", "head", "tied"]]
    assert [state.name for state in tied.states_of(range(6))].count("tied") == 1
    # The multiplication with the shared weight is the head's all the same.
    assert tied.layers[-1].matmul_parameters == untied.layers[-1].matmul_parameters == 256 * 64


@pytest.mark.parametrize(("tensor", "split", "partial"), [
    (1, 0, False), (2, 0, False), (4, None, True), (8, None, True)])
def test_key_and_value_are_replicated_beyond_their_heads(job: Job, tensor: int, split: int | None,
                                                         partial: bool) -> None:
    block = manifest(job, tensor, heads=8, kv_heads=2, qkv_bias=True).layers[1]
    for param in block.params:
        if param.name.split(".")[1] in ("key", "value"):
            assert (param.split, param.partial) == (split, partial), param.name


@pytest.mark.parametrize("tensor", [1, 2])
def test_head_norms_have_partial_gradients_on_several_tensor_ranks(job: Job, tensor: int) -> None:
    params = {param.name: param for param in manifest(job, tensor, qk_norm=True).layers[1].params}
    assert params["attention.query_norm.weight"].shape == (16,)
    assert params["attention.key_norm.weight"].partial is (tensor > 1)


def test_known_parameter_counts(job: Job) -> None:
    llama = manifest(job, 1, vocabulary=128256, hidden=4096, blocks=32, heads=32, kv_heads=8, feed_forward=14336)
    assert llama.num_parameters == 8_030_261_248  # Llama-3.1-8B
    gpt2 = manifest(job, 1, family="gpt2", vocabulary=50257, hidden=768, blocks=12, heads=12, feed_forward=3072,
                    sequence=1024, tied_embeddings=True)
    assert gpt2.num_parameters == 124_439_808


@pytest.mark.parametrize(("shape", "tensor"), list(product(SHAPES, (1, 2, 4, 8))))
def test_tensor_ranks_hold_every_element_once(job: Job, shape: str, tensor: int) -> None:
    changes = {"heads": 8, **SHAPES[shape]}
    for layer in manifest(job, tensor, **changes).states:
        for param in layer.params:
            boxes = [local_rectangle(param, tensor, at) for at in range(tensor)]
            if param.split is None:
                assert all(box == Rectangle(offset=(0,) * len(param.shape), shape=param.shape) for box in boxes)
                continue
            assert sum(box.size for box in boxes) == param.size
            assert all(a.intersect(b) is None for i, a in enumerate(boxes) for b in boxes[:i])
            assert all(o + n <= whole for box in boxes
                       for o, n, whole in zip(box.offset, box.shape, param.shape, strict=True))
            local = param.local_shape(tensor)
            assert all(n <= room for box in boxes for n, room in zip(box.shape, local, strict=True))


def test_vocabulary_padding_may_leave_a_rank_without_rows(job: Job) -> None:
    table = manifest(job, 4, vocabulary=130).layers[0].params[0]
    assert table.local_shape(4) == (64, 64)
    assert [local_rectangle(table, 4, at).shape[0] for at in range(4)] == [64, 64, 2, 0]


@pytest.mark.parametrize(("shape", "tensor", "data", "decay_all"), list(product(SHAPES, (1, 4), (1, 3), (False, True))))
def test_flat_layout(job: Job, shape: str, tensor: int, data: int, decay_all: bool) -> None:
    changes = {"heads": 8, **SHAPES[shape]}
    for layer in manifest(job, tensor, **changes).states:
        layout = flat_layout(layer, tensor=tensor, data=data, decay_all=decay_all)
        assert sorted(slot.param.name for slot in layout.slots) == sorted(names(layer))
        assert layout.size % data == 0
        assert layout.size % ALIGNMENT == 0
        assert all(slot.start % ALIGNMENT == 0 for slot in layout.slots)
        assert all(a.stop <= b.start for a, b in pairwise(layout.slots))
        assert not layout.slots or layout.slots[-1].stop <= layout.size
        assert layout.size - sum(math.prod(s.shape) for s in layout.slots) < ALIGNMENT * (len(layout.slots) + data)
        for slot in layout.slots:
            def inside(run: tuple[int, int], start: int = slot.start, stop: int = slot.stop) -> bool:
                return run[0] <= start and stop <= run[1]

            assert any(map(inside, layout.decay_runs)) == (slot.param.decay or decay_all), slot.param.name
            assert inside(layout.partial_run) == slot.param.partial, slot.param.name
            assert inside(layout.shared_run) == (slot.param.split is None), slot.param.name


def test_rectangles_intersect_and_index() -> None:
    outer, inner = Rectangle(offset=(2, 4), shape=(6, 8)), Rectangle(offset=(4, 0), shape=(8, 6))
    both = outer.intersect(inner)
    assert both == Rectangle(offset=(4, 4), shape=(4, 2))
    assert both == inner.intersect(outer)
    assert both.within(outer) == (slice(2, 6), slice(0, 2))
    assert outer.intersect(Rectangle(offset=(8, 4), shape=(1, 1))) is None


@pytest.mark.parametrize(("changes", "blocks"), [
    ({"vocabulary": 128256, "hidden": 4096, "heads": 32, "kv_heads": 8, "feed_forward": 14336}, 2.2),
    ({"vocabulary": 128256, "hidden": 2048, "heads": 32, "kv_heads": 8, "feed_forward": 8192}, 3.8),
])
def test_the_head_costs_several_blocks(job: Job, changes: dict[str, int], blocks: float) -> None:
    """Llama-3.1-8B and 3.2-1B at 4096 tokens."""
    layers = manifest(job, 1, **changes).layers
    ratio = layers[-1].forward_flops(4096) / layers[1].forward_flops(4096)
    assert ratio == pytest.approx(blocks, abs=0.05)
    assert layers[0].forward_flops(4096) == 0
