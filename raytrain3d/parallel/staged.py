"""Gloo for tensors on a device, through host memory (`network.transport: gloo`).

Slow, as each message waits for the device and is copied twice. It is for what NCCL refuses: several ranks on one GPU. As it
copies whatever the device is, a CPU shows all that it does but the speed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class StagedWork:
    """An operation on copies in host memory."""

    def __init__(self, work: Any, host: Sequence[Tensor], finish: Callable[[], object] = lambda: None) -> None:
        self._work, self._host, self._finish = work, host, finish

    def wait(self) -> None:
        """Then the result is on the device."""
        self._work.wait()
        self._finish()


class Staged:
    """What `Group` asks of a backend of torch's, over one of gloo."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> StagedWork:
        (tensor,), host = tensors, _copied(tensors[0])
        return StagedWork(self._gloo.allreduce([host], options), [host], lambda: tensor.copy_(host))

    def _reduce_scatter_base(self, shard: Tensor, whole: Tensor) -> StagedWork:
        own, host = _empty(shard), _copied(whole)
        return StagedWork(self._gloo._reduce_scatter_base(own, host), [own, host], lambda: shard.copy_(own))

    def _allgather_base(self, whole: Tensor, shard: Tensor) -> StagedWork:
        all_of_it, host = _empty(whole), _copied(shard)
        return StagedWork(self._gloo._allgather_base(all_of_it, host), [all_of_it, host], lambda: whole.copy_(all_of_it))

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> StagedWork:
        host = _copied(tensors[0])
        return StagedWork(self._gloo.send([host], to, tag), [host])

    def recv(self, tensors: Sequence[Tensor], sender: int, tag: int) -> StagedWork:
        (tensor,), host = tensors, _empty(tensors[0])
        return StagedWork(self._gloo.recv([host], sender, tag), [host], lambda: tensor.copy_(host))

    def abort(self) -> None:
        """Nothing to do: gloo ends by itself when a neighbour is gone."""


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")
