"""The divided cross-entropy, whole and in chunks, against torch's."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raytrain3d.model.loss import Rows, cross_entropy, loss_and_gradient, projected_cross_entropy
from raytrain3d.plan.params import NO_LOSS


def test_equals_torch_with_ignored_targets() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    same = logits.detach().clone().requires_grad_()
    targets = torch.tensor([3, NO_LOSS, 10, 0, NO_LOSS, 7])
    loss = cross_entropy(logits, targets, Rows(vocabulary=11))
    expected = torch.nn.functional.cross_entropy(same, targets, reduction="sum")
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad, same.grad)


def test_padding_rows_get_no_probability() -> None:
    logits = torch.zeros(1, 8, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([2]), Rows(vocabulary=5))
    torch.testing.assert_close(loss, torch.tensor(5.0).log())
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[0, 5:].tolist() == [0.0, 0.0, 0.0]


def test_all_targets_ignored_is_zero_and_has_zero_gradient() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.full((3,), NO_LOSS), Rows(vocabulary=5))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_divided_vocabulary_gives_the_same_loss() -> None:
    """Two halves, with the reductions that two ranks would do."""
    torch.manual_seed(1)
    logits, targets = torch.randn(4, 10, dtype=torch.float64), torch.tensor([0, 4, 5, 9])
    halves = (logits[:, :5], logits[:, 5:])
    largest = torch.maximum(*(half.amax(dim=1) for half in halves))
    partial: list[Tensor] = []
    for first, half in zip((0, 5), halves, strict=True):
        cross_entropy(half, targets, Rows(first=first, vocabulary=10, maximum=lambda _: largest,
                                          total=lambda sums: partial.append(sums) or sums))
    sums = partial[0] + partial[1]
    loss = cross_entropy(halves[0], targets, Rows(vocabulary=10, maximum=lambda _: largest, total=lambda _: sums))
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))


def projected(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weight with an empty gradient, targets) of 10 tokens, hidden 4, vocabulary 11."""
    torch.manual_seed(2)
    x = torch.randn(10, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 4, dtype=dtype, requires_grad=True)
    weight.grad_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    weight.grad = torch.zeros(weight.shape, dtype=weight.grad_dtype)
    return x, weight, torch.tensor([3, NO_LOSS, 10, 0, NO_LOSS, 7, 7, 1, 2, 10])


@pytest.mark.parametrize("chunk", [1, 3, 10, 4096])
def test_chunks_give_loss_and_gradients_of_the_whole(chunk: int) -> None:
    x, weight, targets = projected()
    same, same_weight = (tensor.detach().clone().requires_grad_() for tensor in (x, weight))
    loss = projected_cross_entropy(x, weight, targets, Rows(vocabulary=11), chunk=chunk)
    expected = torch.nn.functional.cross_entropy(same @ same_weight.t(), targets, reduction="sum")
    loss.backward()
    expected.backward()
    torch.testing.assert_close((loss, x.grad, weight.grad), (expected, same.grad, same_weight.grad))


def test_what_a_compiler_gets_has_the_same_loss_and_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([3, NO_LOSS, 8, 0, NO_LOSS, 7])
    expected = cross_entropy(logits, targets, Rows(vocabulary=9))
    expected.backward()
    loss, gradient = loss_and_gradient(logits.detach(), targets, 9)
    torch.testing.assert_close((loss, gradient), (expected.detach(), logits.grad))
    assert not gradient[:, 9:].any(), "padding rows"


@pytest.mark.parametrize("compiled", [None, loss_and_gradient])
def test_bf16_makes_its_losses_in_fp32(compiled: Any) -> None:
    x, weight, targets = projected(torch.bfloat16)
    loss = projected_cross_entropy(x, weight, targets, Rows(vocabulary=11), chunk=4, compiled=compiled)
    logits = (x @ weight.t()).detach().float()
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_without_gradients_nothing_is_added() -> None:
    """As in the first forward under recompute, and in evaluation."""
    x, weight, targets = projected()
    with torch.no_grad():
        loss = projected_cross_entropy(x, weight, targets, Rows(vocabulary=11), chunk=3)
    assert not loss.requires_grad
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_frozen_weight_gets_no_gradient_and_the_input_does() -> None:
    x, weight, targets = projected()
    same = x.detach().clone().requires_grad_()
    projected_cross_entropy(x, weight.detach(), targets, Rows(vocabulary=11), chunk=3).backward()
    torch.nn.functional.cross_entropy(same @ weight.detach().t(), targets, reduction="sum").backward()
    torch.testing.assert_close(x.grad, same.grad)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of any tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_is_as_large_as_the_logits() -> None:
    x, weight = torch.randn(64, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    with LargestTensor() as largest:
        projected_cross_entropy(x, weight, torch.zeros(64, dtype=torch.int64), Rows(vocabulary=100), chunk=10).backward()
    assert largest.elements == 10 * 100
