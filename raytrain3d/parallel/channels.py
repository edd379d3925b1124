"""Point-to-point traffic of a pipeline rank: sends that never block compute, receives posted ahead.

A channel is a two-rank group that carries messages of one direction, first in first out. Its receives are posted in the
order of the program, at most two at a time (NCCL runs a communicator's operations in issue order, so more would not
overlap): the next one just before the wait for one, so that posting it takes no time of the compute that waits.
On GPUs each channel's operations run on the communicator's own stream: posting orders them after what made or last read
the buffer, waiting orders later compute after them, and the host goes on.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raytrain3d.parallel.groups import Group, Work
from raytrain3d.plan.program import Channel
from raytrain3d.plan.rank_program import RankProgram
from raytrain3d.plan.schedule import Op


class Buffers:
    """Tensors of one shape for received messages, used again and again: their number is what the schedule needs."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._free: list[Tensor] = []
        self.made = 0

    def take(self) -> Tensor:
        """A tensor with any content."""
        if self._free:
            return self._free.pop()
        self.made += 1
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def give_back(self, tensor: Tensor) -> None:
        """Nothing reads `tensor` any more."""
        self._free.append(tensor)


class Inbox:
    """Receives of one channel for one run of a program."""

    def __init__(self, group: Group, ops: Sequence[Op], buffers: Buffers) -> None:
        self._group, self._coming, self._buffers = group, deque(ops), buffers
        self._posted: deque[tuple[Op, Tensor, Work]] = deque()
        self._post()

    def _post(self) -> None:
        if self._coming:
            tensor = self._buffers.take()
            self._posted.append((self._coming.popleft(), tensor, self._group.receive(tensor, 0)))

    def take(self, op: Op) -> Tensor:
        """The message of `op`, which must be the next on this channel."""
        expected, tensor, work = self._posted.popleft()
        assert expected == op, f"program asks for {op}, the channel brings {expected}"
        self._post()
        work.wait()
        return tensor


class Mail:
    """All channels of one rank during one run of its program. Messages are activations or their gradients, all of the
    buffers' shape: (batch, seq, hidden)."""

    def __init__(self, channels: Mapping[Channel, Group], program: RankProgram, buffers: Buffers) -> None:
        self._groups = {op: channels[channel] for op, channel in program.channels.items()}
        self._inboxes = {op: inbox for channel, ops in program.arrivals.items()
                         for inbox in [Inbox(channels[channel], ops, buffers)] for op in ops}
        self._delivered, self._buffers = program.delivered, buffers
        self._sent: dict[Op, tuple[Tensor, Work]] = {}

    def send(self, op: Op, tensor: Tensor) -> None:
        """Start sending; the tensor is kept until it left."""
        self._sent[op] = (tensor, self._groups[op].send(tensor, 1))

    def receive(self, op: Op) -> Tensor:
        """Wait for the message of `op`. The tensor is one of the buffers: hand it to `release` when it was read."""
        tensor = self._inboxes[op].take(op)
        for send in self._delivered.get(op, ()):
            self._sent.pop(send)[1].wait()
        return tensor

    def release(self, tensor: Tensor) -> None:
        """A received message was read for the last time."""
        self._buffers.give_back(tensor)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for _, work in self._sent.values():
            work.wait()
        self._sent.clear()
