"""Point-to-point traffic of a pipeline rank: sends that never block compute, receives posted ahead.

A channel is a two-rank group that carries messages of one direction, first in first out. Its receives are posted at most
two ahead in the order of the program (NCCL runs a communicator's operations in issue order, so more would not overlap).
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from raytrain3d.parallel.groups import Group, Work
from raytrain3d.plan.program import Channel, Programs
from raytrain3d.plan.schedule import Op

POSTED_AHEAD = 2


class Inbox:
    """Receives of one channel for one run of a program."""

    def __init__(self, group: Group, ops: Sequence[Op], shape: tuple[int, ...], dtype: torch.dtype,
                 device: torch.device) -> None:
        self._group, self._coming = group, deque(ops)
        self._shape, self._dtype, self._device = shape, dtype, device
        self._posted: deque[tuple[Op, Tensor, Work]] = deque()
        for _ in range(POSTED_AHEAD):
            self._post()

    def _post(self) -> None:
        if self._coming:
            tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._posted.append((self._coming.popleft(), tensor, self._group.receive(tensor, 0)))

    def take(self, op: Op) -> Tensor:
        """The message of `op`, which must be the next on this channel."""
        expected, tensor, work = self._posted.popleft()
        assert expected == op, f"program asks for {op}, the channel brings {expected}"
        work.wait()
        self._post()
        return tensor


class Mail:
    """All channels of one rank during one run of its program. Messages are activations or their gradients, all of
    `shape`: (batch, seq, hidden)."""

    def __init__(self, channels: dict[Channel, Group], programs: Programs, rank: int, shape: tuple[int, ...],
                 dtype: torch.dtype, device: torch.device) -> None:
        self._channels, self._programs = channels, programs
        self._inboxes = {channel: Inbox(channels[channel], ops, shape, dtype, device)
                         for channel, ops in programs.receives(rank).items()}
        self._sent: deque[tuple[Tensor, Work]] = deque()

    def send(self, op: Op, tensor: Tensor) -> None:
        """Start sending; the tensor is kept until it left."""
        channel = self._programs.channel(op)
        assert channel is not None
        self._sent.append((tensor, self._channels[channel].send(tensor, 1)))

    def receive(self, op: Op) -> Tensor:
        channel = self._programs.channel(op)
        assert channel is not None
        return self._inboxes[channel].take(op)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._sent:
            self._sent.popleft()[1].wait()
