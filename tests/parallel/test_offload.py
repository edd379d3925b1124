"""Activations on the host: the same gradients to the bit, each storage once, and nothing of it left on the device."""

import torch
from torch import Tensor, nn

from raytrain3d.parallel.offload import saved_on_host


class Twice(nn.Module):
    """Saves its input, its weight, and an inner activation twice, once as a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        inner = (x @ self.weight).exp()
        return inner @ inner.transpose(0, 1)


def gradients(*, on_host: bool) -> tuple[Tensor | None, Tensor | None]:
    torch.manual_seed(0)
    layer, x = Twice(), torch.randn(4, 4, requires_grad=True)
    if on_host:
        with saved_on_host(layer, x):
            out = layer(x)
    else:
        out = layer(x)
    out.sum().backward()
    return x.grad, layer.weight.grad


def test_gradients_are_the_same_to_the_bit() -> None:
    for own, expected in zip(gradients(on_host=True), gradients(on_host=False), strict=True):
        assert own is not None
        assert expected is not None
        assert torch.equal(own, expected)
