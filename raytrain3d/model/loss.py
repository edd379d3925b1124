"""Cross-entropy over a vocabulary that may be divided between ranks, and with the output projection in front of it.

With the logits of rows [first, first + rows) only, a token's loss is log(sum over all rows of exp) minus its target's
logit. Two reductions over ranks give both: the largest logit, then the sums. Logits are never gathered. The reductions
are handed in, so that this file knows nothing of ranks; without them it is the ordinary loss.

Logits are the largest activation there is. `projected_cross_entropy` never holds those of all tokens: it goes through
the tokens in chunks, and as a loss is a sum, whose gradient is 1, it makes the gradients of a chunk's logits on the spot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from raytrain3d.model.functional import accumulate_outer
from raytrain3d.plan.params import NO_LOSS

Reduction = Callable[[Tensor], Tensor]
LossGradient = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""As `loss_and_gradient`."""


def unchanged(x: Tensor) -> Tensor:
    """The reduction over one rank."""
    return x


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Which rows of a vocabulary are here, and how to reduce over the ranks that hold the others."""

    first: int = 0
    vocabulary: int
    """Rows on all ranks; what is held beyond them is padding, which gets no probability."""
    maximum: Reduction = unchanged
    total: Reduction = unchanged


def cross_entropy(logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
    """Sum of the losses of all positions whose target is not NO_LOSS, in nats.

    logits: (tokens, rows held here); targets: (tokens,) of global ids.
    """
    return _CrossEntropy.apply(logits, targets, rows)


def projected_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, rows: Rows, *, chunk: int,
                            compiled: LossGradient | None = None) -> Tensor:
    """`cross_entropy` of the logits x @ weight^T, which exist for at most `chunk` tokens at a time.

    x: (tokens, hidden); weight: (rows held here, hidden). With gradients enabled the forward makes all of them: it adds
    the weight's to `weight.grad`, and keeps the input's, of the size of x, for the backward. So the result must be
    differentiated exactly once, and with the gradient 1. compiled: `loss_and_gradient`, where `weight` has all rows.
    """
    return _ProjectedCrossEntropy.apply(x, weight, targets, rows, chunk, torch.is_grad_enabled(), compiled)


def loss_and_gradient(logits: Tensor, targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Sum of the losses, and the gradient of `logits`, (tokens, all rows), in their type. Written for a compiler, which
    makes three passes over the logits of it and keeps all but the result in registers; as it is it would allocate each term.
    """
    values = logits.float() if logits.dtype == torch.bfloat16 else logits
    columns = torch.arange(values.shape[1], device=values.device)
    values = torch.where(columns < vocabulary, values, -torch.inf)
    hit, counted = columns == targets[:, None], targets != NO_LOSS
    values = values - values.amax(dim=1, keepdim=True)
    exponentials = values.exp()
    sums = exponentials.sum(dim=1, keepdim=True)
    losses = torch.where(counted, sums[:, 0].log() - torch.where(hit, values, 0).sum(dim=1), 0)
    gradient = torch.where(counted[:, None], exponentials / sums - hit.to(values.dtype), 0)
    return losses.sum(), gradient.to(logits.dtype)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        values = logits.float() if logits.dtype == torch.bfloat16 else logits.clone()
        loss, sums = _losses(values, targets, rows)
        ctx.save_for_backward(values.div_(sums), targets)
        ctx.dtype, ctx.rows = logits.dtype, rows
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, targets = ctx.saved_tensors
        return _to_gradient(probabilities.clone(), targets, ctx.rows, grad).to(ctx.dtype), None, None


class _ProjectedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: Rows, chunk: int, training: bool,
                compiled: LossGradient | None) -> Tensor:
        chunks = -(-len(x) // chunk)
        x_gradient = torch.empty_like(x) if training else x
        parts = zip(x.tensor_split(chunks), targets.tensor_split(chunks), x_gradient.tensor_split(chunks), strict=True)
        losses = [_loss_of_chunk(part, weight, wanted, rows, part_gradient if training else None, compiled)
                  for part, wanted, part_gradient in parts]
        if training:
            ctx.save_for_backward(x_gradient)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x_gradient,) = ctx.saved_tensors
        return x_gradient * grad, *(None for _ in range(6))


def _loss_of_chunk(x: Tensor, weight: Tensor, targets: Tensor, rows: Rows, x_gradient: Tensor | None,
                   compiled: LossGradient | None) -> Tensor:
    """The loss of some tokens. With `x_gradient`, which it fills, the weight's gradient is added too."""
    logits = x @ weight.t()
    if x_gradient is not None and compiled is not None:
        loss, logits = compiled(logits, targets, rows.vocabulary)
    else:
        if logits.dtype == torch.bfloat16:
            logits = logits.float()
        loss, sums = _losses(logits, targets, rows)
        if x_gradient is None:
            return loss
        logits = _to_gradient(logits.div_(sums), targets, rows).to(x.dtype)
    torch.mm(logits, weight, out=x_gradient)
    if weight.requires_grad:
        accumulate_outer(weight, logits, x)
    return loss


def _losses(logits: Tensor, targets: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Sum of losses, and by token (tokens, 1) the sum of exp(logit - largest) over all rows. Leaves these exponentials in
    `logits`."""
    logits[:, max(0, rows.vocabulary - rows.first):] = -torch.inf
    local, here = _own_targets(logits, targets, rows)
    logits -= rows.maximum(logits.amax(dim=1))[:, None]
    target = torch.where(here, logits.gather(1, local[:, None])[:, 0], 0)
    logits.exp_()
    sums, target = rows.total(torch.stack((logits.sum(dim=1), target)))
    return torch.where(targets != NO_LOSS, sums.log() - target, 0).sum(), sums[:, None]


def _to_gradient(probabilities: Tensor, targets: Tensor, rows: Rows, upstream: Tensor | float = 1.0) -> Tensor:
    """Turns probabilities into the gradient of the logits, in place."""
    local, here = _own_targets(probabilities, targets, rows)
    probabilities.scatter_add_(1, local[:, None], -here.to(probabilities.dtype)[:, None])
    return probabilities.mul_(((targets != NO_LOSS) * upstream)[:, None])


def _own_targets(logits: Tensor, targets: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """(column of `logits` of each target, whether it is one of ours)"""
    local = targets - rows.first
    here = (local >= 0) & (local < logits.shape[1])
    return torch.where(here, local, 0), here
