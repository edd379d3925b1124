"""The activation estimate against what autograd keeps of the model as it is, and what put-off weight gradients keep."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from raytrain3d.config import JobConfig
from raytrain3d.model.functional import put_off
from raytrain3d.model.transformer import Layer, build_layers
from raytrain3d.plan.activations import activation_bytes_per_token
from raytrain3d.plan.params import LayerSpec, model_spec

BATCH, SEQUENCE = 2, 128


def bound(layer: Layer, spec: LayerSpec) -> Layer:
    """`layer` with parameters of its own, gradients allocated."""
    parameters = {param.name: nn.Parameter(torch.zeros(param.shape)) for param in spec.params}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    layer.bind(parameters)
    return layer


def kept_bytes(layer: Layer, x: Tensor) -> int:
    """Bytes of all storages that a forward saves for its backward, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, None)
    return sum(tensor.untyped_storage().nbytes() for at, tensor in saved.items() if at not in parameters)


@pytest.mark.parametrize(("changes", "most"), [
    ({"family": "gpt2"}, 1.02),
    ({}, 1.15),  # RMSNorm on a CPU keeps its normed values
    ({"kv_heads": 2}, 1.15),
])
def test_block(job: Callable[..., JobConfig], changes: dict[str, object], most: float) -> None:
    config = job(hidden=128, heads=8, feed_forward=352, sequence=SEQUENCE, **changes)
    spec = model_spec(config.model, config.train, 1).layers[1]
    layer = bound(build_layers(config.model, range(1, 2))[1], spec)
    x = torch.randn(BATCH, SEQUENCE, 128, requires_grad=True)
    estimate = activation_bytes_per_token(spec, config.model, dtype="fp32", sequence=SEQUENCE, tensor=1)
    assert 1 <= kept_bytes(layer, x) / (BATCH * SEQUENCE * estimate) <= most


@pytest.mark.parametrize("changes", [{"family": "gpt2"}, {}, {"kv_heads": 2}])
def test_put_off_weight_gradients_of_a_block_keep_no_more_than_its_activations(
        job: Callable[..., JobConfig], changes: dict[str, object]) -> None:
    """And not so much less that counting all of it until W would be wrong by far."""
    config = job(hidden=128, heads=8, feed_forward=352, sequence=SEQUENCE, **changes)
    spec = model_spec(config.model, config.train, 1).layers[1]
    layer = bound(build_layers(config.model, range(1, 2))[1], spec)
    out = layer(torch.randn(BATCH, SEQUENCE, 128, requires_grad=True), None)
    with put_off() as owed:
        torch.autograd.backward(out, torch.ones_like(out))
    kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in owed.kept()}
    estimate = activation_bytes_per_token(spec, config.model, dtype="fp32", sequence=SEQUENCE, tensor=1)
    assert 0.7 <= sum(kept.values()) / (BATCH * SEQUENCE * estimate) <= 1
