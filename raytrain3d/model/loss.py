"""Cross-entropy over a vocabulary that may be divided between ranks.

With the logits of rows [first, first + rows) only, a token's loss is log(sum over all rows of exp) minus its target's
logit. Two reductions over ranks give both: the largest logit, then the sums. Logits are never gathered. The reductions
are handed in, so that this file knows nothing of ranks; without them it is the ordinary loss.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from raytrain3d.plan.params import NO_LOSS

Reduction = Callable[[Tensor], Tensor]


def unchanged(x: Tensor) -> Tensor:
    """The reduction over one rank."""
    return x


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, vocabulary: int, maximum: Reduction,
                total: Reduction) -> Tensor:
        values = logits.float() if logits.dtype == torch.bfloat16 else logits.clone()
        values[:, max(0, vocabulary - first):] = -torch.inf  # padding rows get no probability
        local = targets - first
        here = (local >= 0) & (local < values.shape[1])
        local = torch.where(here, local, 0)
        values -= maximum(values.amax(dim=1))[:, None]
        target = torch.where(here, values.gather(1, local[:, None])[:, 0], 0)
        values.exp_()
        sums = total(torch.stack((values.sum(dim=1), target)))
        counted = targets != NO_LOSS
        ctx.save_for_backward(values.div_(sums[0][:, None]), local, here, counted)
        ctx.dtype = logits.dtype
        return torch.where(counted, sums[0].log() - sums[1], 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, here, counted = ctx.saved_tensors
        gradient = probabilities.scatter_add(1, local[:, None], -here.to(probabilities.dtype)[:, None])
        gradient *= (grad * counted)[:, None]
        return gradient.to(ctx.dtype), None, None, None, None, None


def cross_entropy(logits: Tensor, targets: Tensor, *, first: int = 0, vocabulary: int,
                  maximum: Reduction = unchanged, total: Reduction = unchanged) -> Tensor:
    """Sum of the losses of all positions whose target is not NO_LOSS, in nats.

    logits: (tokens, rows) for vocabulary rows [first, first + rows); targets: (tokens,) of global ids. `maximum` and
    `total` reduce a tensor over the ranks that hold the other rows.
    """
    return _CrossEntropy.apply(logits, targets, first, vocabulary, maximum, total)
