"""Matrix products whose weight gradients go straight into the layer's gradient buffer, at once or later.

Autograd would make a gradient tensor for every use of a weight and add it afterwards. Here `weight.grad` is a view of
the layer's flat buffer (FP32 under bf16 training) and the backward accumulates into it, so nothing is allocated and the
sum over micro-batches has the buffer's precision.

It is also where a backward is split in two (https://arxiv.org/abs/2401.10241): under `put_off` a linear's backward gives
the input gradient alone and keeps what the weight gradient needs; no graph is retained and none is walked twice. To a
compiler that backward is one opaque operator, so a compiled block stays one graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class WeightGradients:
    """Weight gradients put off: (weight, output gradient, input) of every linear that a backward went through."""

    def __init__(self) -> None:
        self._products: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, weight: Tensor, grad: Tensor, x: Tensor) -> None:
        self._products.append((weight, grad, x))

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add all of them to their buffers, in the order of the backward, and let go of the tensors."""
        for weight, grad, x in self._products:
            accumulate_outer(weight, grad, x)
        self._products.clear()


_put_off_to: WeightGradients | None = None
"""Not per thread: on GPUs autograd runs backwards in a thread of its own. A process trains in one thread."""


@contextmanager
def put_off() -> Iterator[WeightGradients]:
    """Backwards inside leave the weight gradients of linears to what is yielded."""
    global _put_off_to  # noqa: PLW0603 - see above
    before, _put_off_to = _put_off_to, WeightGradients()
    try:
        yield _put_off_to
    finally:
        _put_off_to = before


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # not saved: under hooks (offload) a saved tensor comes back as another one, without `grad`
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        return (_compiled_backward if torch.compiler.is_compiling() else _linear_backward)(grad, x, weight), None


def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The input gradient; the weight gradient is accumulated, put off or, for a frozen weight, nobody's."""
    if weight.requires_grad:
        if _put_off_to is None:
            accumulate_outer(weight, grad.flatten(0, -2), x.flatten(0, -2))
        else:
            _put_off_to.add(weight, grad.flatten(0, -2), x.flatten(0, -2))
    return grad @ weight


@torch.library.custom_op("raytrain3d::linear_backward", mutates_args=())
def _compiled_backward(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`_linear_backward` inside a compiled graph, whose memory is used again after the call: what is put off is copied.

    The gradient buffer is reached through `weight.grad`, which the graph does not see change; nothing in it reads it.
    """
    if weight.requires_grad and _put_off_to is not None:
        grad, x = grad.clone(), x.clone()
    return _linear_backward(grad, x, weight)


@_compiled_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


def accumulate_outer(weight: Tensor, grad: Tensor, x: Tensor) -> None:
    """weight.grad += grad^T x. grad: (tokens, out), x: (tokens, in), weight: (out, in)."""
    assert weight.grad is not None
    if weight.grad.dtype == grad.dtype:
        weight.grad.addmm_(grad.t(), x)
    else:
        weight.grad.add_(grad.t() @ x)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T. x: (..., in), weight: (out, in) -> (..., out). `weight.grad` must be allocated if it is trained."""
    return _Linear.apply(x, weight)


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
        ctx.weight, ctx.ids, ctx.mask = weight, ids, mask
        rows = torch.nn.functional.embedding(ids, weight)
        return rows if mask is None else rows.masked_fill_(mask[..., None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        weight = ctx.weight
        if ctx.mask is not None:
            grad = grad.masked_fill(ctx.mask[..., None], 0)
        weight.grad.index_add_(0, ctx.ids.flatten(), grad.flatten(0, -2).to(weight.grad.dtype))
        return None, None, None


def embedding(ids: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """Rows of `weight` by id, zero where `mask` holds. ids, mask: (...), weight: (rows, width) -> (..., width)."""
    return _Embedding.apply(weight, ids, mask)
