"""RMSNorm (https://arxiv.org/abs/1910.07467) that keeps its input and one number a row for the backward.

GPUs have a fused kernel that does so. On a CPU torch composes it of elementwise operations, each of which keeps what it
needs: half as much again in FP32, and more under bf16, whose rows are normed in FP32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        values = _exact(x)
        scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True).add_(epsilon))
        ctx.save_for_backward(x, weight, scale)
        return (values * scale).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = _exact(x) * scale
        weight_grad = (_exact(grad) * normed).flatten(0, -2).sum(dim=0)
        inner = _exact(grad * weight)
        x_grad = (inner - normed * (inner * normed).mean(dim=-1, keepdim=True)).mul_(scale)
        return x_grad.to(x.dtype), weight_grad, None


def _exact(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension. x: (..., width), weight: (width,) -> as x."""
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], weight, epsilon)
    return _RMSNorm.apply(x, weight, epsilon)
