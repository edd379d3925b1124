"""Matrix products whose weight gradients go straight into the layer's gradient buffer.

Autograd would make a gradient tensor for every use of a weight and add it afterwards. Here `weight.grad` is a view of
the layer's flat buffer (FP32 under bf16 training) and the backward accumulates into it, so nothing is allocated and the
sum over micro-batches has the buffer's precision. It is also where a backward can be split in two.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        if weight.requires_grad:
            accumulate_outer(weight, grad.flatten(0, -2), x.flatten(0, -2))
        return grad @ weight if ctx.needs_input_grad[0] else None, None


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
