"""The divided cross-entropy against torch's."""

import torch
from torch import Tensor

from raytrain3d.model.loss import cross_entropy
from raytrain3d.plan.params import NO_LOSS


def test_equals_torch_with_ignored_targets() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    same = logits.detach().clone().requires_grad_()
    targets = torch.tensor([3, NO_LOSS, 10, 0, NO_LOSS, 7])
    loss = cross_entropy(logits, targets, vocabulary=11)
    expected = torch.nn.functional.cross_entropy(same, targets, reduction="sum")
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad, same.grad)


def test_padding_rows_get_no_probability() -> None:
    logits = torch.zeros(1, 8, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([2]), vocabulary=5)
    torch.testing.assert_close(loss, torch.tensor(5.0).log())
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[0, 5:].tolist() == [0.0, 0.0, 0.0]


def test_all_targets_ignored_is_zero_and_has_zero_gradient() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.full((3,), NO_LOSS), vocabulary=5)
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
        cross_entropy(half, targets, first=first, vocabulary=10, maximum=lambda _: largest,
                      total=lambda sums: partial.append(sums) or sums)
    sums = partial[0] + partial[1]
    loss = cross_entropy(halves[0], targets, vocabulary=10, maximum=lambda _: largest, total=lambda _: sums)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
