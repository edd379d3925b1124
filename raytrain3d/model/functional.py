"""Matrix products whose weight gradients go straight into the layer's gradient buffer, at once or later.

Autograd would make a gradient tensor for every use of a weight and add it afterwards. Here `weight.grad` is a view of
the layer's flat buffer (FP32 under bf16 training) and the backward accumulates into it, so nothing is allocated and the
sum over micro-batches has the buffer's precision.

Linears that read the same input are one function: what ranks that divide them do to their input and output (`Seam`) then
goes on while weight gradients are computed, and of a divided sequence only a part is kept.

It is also where a backward is split in two (https://arxiv.org/abs/2401.10241): under `put_off` a linear's backward gives
the input gradient alone and keeps what the weight gradient needs; no graph is retained and none is walked twice. To a
compiler that backward is one opaque operator, so a compiled block stays one graph.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


class Seam(Protocol):
    """Where ranks that divide a matrix meet: what an activation goes through there, and its gradient on the way back.

    Both begin something and return how to wait for its result, so that other work can be done meanwhile. A sum may be made
    in place. All ranks call them in the same order. `parallel/collectives.py` has those of several ranks.
    """

    @property
    def idle(self) -> bool:
        """Nothing happens here: a rank has the matrix for itself."""

    @property
    def name(self) -> str:
        """Seams of one name do the same. A compiled graph, which can hold no seam, has its name."""

    def length(self, sequence: int) -> int:
        """Positions of a sequence that leave the forward when so many enter it."""

    def __call__(self, x: Tensor) -> Tensor:
        """The forward, with the backward as its gradient."""

    def start_forward(self, x: Tensor) -> Callable[[], Tensor]: ...

    def start_backward(self, grad: Tensor) -> Callable[[], Tensor]: ...


class Idle:
    """The seam of one rank."""

    idle = True
    name = "idle"

    def length(self, sequence: int) -> int:
        return sequence

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def start_forward(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x

    def start_backward(self, grad: Tensor) -> Callable[[], Tensor]:
        return lambda: grad


IDLE = Idle()
_seams: dict[str, Seam] = {IDLE.name: IDLE}
"""By name, for compiled graphs."""


def remember_seams(seams: Iterable[Seam]) -> None:
    """Compiled graphs that have their names go through these from now on."""
    _seams.update({seam.name: seam for seam in seams})


def _name(seam: Seam) -> str:
    return IDLE.name if seam.idle else seam.name


@dataclass(frozen=True, slots=True)
class Product:
    """What the weight gradients of linears with one input wait for. Parts of a sequence stay parts until then."""

    weights: Sequence[Tensor]
    grads: Sequence[Tensor]
    """Of what came out behind `reduce`."""
    x: Tensor
    """What went in before `enter`."""
    enter: Seam
    reduce: Seam

    def accumulate(self) -> None:
        x = self.enter.start_forward(self.x)().flatten(0, -2)
        for weight, grad in zip(self.weights, self.grads, strict=True):
            accumulate_outer(weight, self.reduce.start_backward(grad)().flatten(0, -2), x)


class WeightGradients:
    """Weight gradients put off, of every linear that a backward went through."""

    def __init__(self) -> None:
        self._products: list[Product] = []

    def add(self, product: Product) -> None:
        self._products.append(product)

    def kept(self) -> list[Tensor]:
        """The tensors that they need."""
        return [tensor for product in self._products for tensor in (*product.grads, product.x)]

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add all of them to their buffers, in the order of the backward, and let go of the tensors."""
        for product in self._products:
            product.accumulate()
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


class _Linears(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # Not named one by one: by their number torch.compile would take a call with two weights for one without ctx.
        x, enter, reduce, *weights = inputs
        ctx.save_for_backward(x)
        ctx.weights, ctx.seams = weights, (enter, reduce)  # a saved weight may come back as another tensor, without `grad`
        if torch.compiler.is_compiling() and not (enter.idle and reduce.idle):
            length = reduce.length(enter.length(x.shape[-2]))
            return tuple(_compiled_forward(x, list(weights), _name(enter), _name(reduce), length))
        return tuple(_linears_forward(x, weights, enter, reduce))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weights, (enter, reduce) = ctx.saved_tensors, ctx.weights, ctx.seams
        if torch.compiler.is_compiling():
            grad = _compiled_backward(list(grads), x, list(weights), _name(enter), _name(reduce))
        else:
            # Detached: the input's history would keep what came before alive as long as the product waits.
            grad = _linears_backward(Product(weights, grads, x.detach(), enter, reduce))
        return grad, None, None, *(None for _ in weights)


def _linears_forward(x: Tensor, weights: Sequence[Tensor], enter: Seam, reduce: Seam) -> list[Tensor]:
    whole = enter.start_forward(x)()
    return [reduce.start_forward(whole @ weight.t())() for weight in weights]


def _linears_backward(product: Product) -> Tensor:
    """The input gradient; weight gradients are put off or accumulated, the latter while seams are busy."""
    weights, enter = product.weights, product.enter
    now = weights[0].requires_grad and _put_off_to is None
    gathering = enter.start_forward(product.x) if now else None
    wholes = [product.reduce.start_backward(grad)() for grad in product.grads]
    grads = [whole.flatten(0, -2) for whole in wholes]
    grad = grads[0] @ weights[0]
    for more, weight in zip(grads[1:], weights[1:], strict=True):
        grad.addmm_(more, weight)
    reducing = enter.start_backward(grad.view(*wholes[0].shape[:-1], -1))
    if gathering is not None:
        x = gathering().flatten(0, -2)
        for each, weight in zip(grads, weights, strict=True):
            accumulate_outer(weight, each, x)
    elif weights[0].requires_grad and _put_off_to is not None:
        _put_off_to.add(product)
    return reducing()


@torch.library.custom_op("raytrain3d::linears_forward", mutates_args=())
def _compiled_forward(x: Tensor, weights: list[Tensor], enter: str, reduce: str, length: int) -> list[Tensor]:
    """`_linears_forward` in a compiled graph, where ranks meet. length: positions of a sequence that come out."""
    return _linears_forward(x, weights, _seams[enter], _seams[reduce])


@_compiled_forward.register_fake
def _(x: Tensor, weights: list[Tensor], enter: str, reduce: str, length: int) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-2], length, weight.shape[0])) for weight in weights]


@torch.library.custom_op("raytrain3d::linears_backward", mutates_args=())
def _compiled_backward(grads: list[Tensor], x: Tensor, weights: list[Tensor], enter: str, reduce: str) -> Tensor:
    """`_linears_backward` in a compiled graph, whose memory is used again after the call: what is put off is copied.

    Gradient buffers are reached through `weight.grad`, which the graph does not see change; nothing in it reads them.
    """
    if weights[0].requires_grad and _put_off_to is not None:
        grads, x = [grad.clone() for grad in grads], x.clone()
    return _linears_backward(Product(weights, grads, x, _seams[enter], _seams[reduce]))


@_compiled_backward.register_fake
def _(grads: list[Tensor], x: Tensor, weights: list[Tensor], enter: str, reduce: str) -> Tensor:
    return torch.empty_like(x)


def accumulate_outer(weight: Tensor, grad: Tensor, x: Tensor) -> None:
    """weight.grad += grad^T x. grad: (tokens, out), x: (tokens, in), weight: (out, in)."""
    assert weight.grad is not None
    if weight.grad.dtype == grad.dtype:
        weight.grad.addmm_(grad.t(), x)
    else:
        weight.grad.add_(grad.t() @ x)


def linears(x: Tensor, weights: Sequence[Tensor], *, enter: Seam = IDLE, reduce: Seam = IDLE) -> tuple[Tensor, ...]:
    """reduce(enter(x) @ weight^T) for each weight. x: (..., in), weights: (out, in) -> (..., out) each.

    Of the input only what is before `enter` is kept for the backward, which enters again. `weight.grad` must be allocated
    if it is trained; all weights are, or none.
    """
    return _Linears.apply(x, enter, reduce, *weights)


def linear(x: Tensor, weight: Tensor, *, reduce: Seam = IDLE) -> Tensor:
    """As `linears`, with one weight."""
    return linears(x, [weight], reduce=reduce)[0]


class _Again(Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.function(*tensors)
        return None, *torch.autograd.grad(out, tensors, grad)


def again(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """function(*tensors), of which only the tensors are kept: the backward computes it again. A function without
    parameters, the same whenever it is called."""
    if torch.compiler.is_compiling():
        return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
    return _Again.apply(function, *tensors)


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, mask: Tensor | None, reduce: Seam) -> Tensor:
        ctx.weight, ctx.ids, ctx.mask, ctx.reduce = weight, ids, mask, reduce
        rows = torch.nn.functional.embedding(ids, weight)
        return reduce.start_forward(rows if mask is None else rows.masked_fill_(mask[..., None], 0))()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        weight, grad = ctx.weight, ctx.reduce.start_backward(grad)()
        if ctx.mask is not None:
            grad = grad.masked_fill(ctx.mask[..., None], 0)
        weight.grad.index_add_(0, ctx.ids.flatten(), grad.flatten(0, -2).to(weight.grad.dtype))
        return None, None, None, None


def embedding(ids: Tensor, weight: Tensor, mask: Tensor | None = None, *, reduce: Seam = IDLE) -> Tensor:
    """reduce(rows of `weight` by id, zero where `mask` holds). ids, mask: (...), weight: (rows, width) -> (..., width)."""
    return _Embedding.apply(weight, ids, mask, reduce)
