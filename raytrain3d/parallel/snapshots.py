"""Copies of ranks' state in host memory: every rank keeps its own and the one of another rank, its client on a ring.

So a state that no other replica holds survives the death of its rank: all ranks go back to the step of the copies, the new
rank with the copy that its peer kept. A copy is sent by a thread while training goes on. The two newest are kept, since the
newest may not have arrived everywhere; the older one is overwritten only after all ranks know that it had.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raytrain3d.parallel.groups import Group
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.peers import KEPT

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """The state of one rank after `step`, when layers were split into `stages`."""

    step: int
    stages: Stages
    block: Tensor
    """All its buffers one after the other, in bytes."""


class Snapshots:
    """Of one rank. Its copies go to its peer, member 1 of one group; its client's come from member 0 of another one."""

    def __init__(self) -> None:
        self._own: list[Copy] = []
        self._client: list[Copy] = []
        self._ring: tuple[Group, Group] | None = None
        self._peers: tuple[int, ...] | None = None
        self._thread: threading.Thread | None = None

    def connect(self, to_peer: Group, from_client: Group, peers: tuple[int, ...]) -> None:
        """peers: of all ranks. When others than before keep copies, those of before are dropped."""
        if self._peers not in (None, peers):
            self.forget_after(-1)
        self._ring, self._peers = (to_peer, from_client), peers

    @property
    def has_peer(self) -> bool:
        return self._ring is not None

    def disconnect(self) -> None:
        """Call it after the groups were closed. A copy that was under way is lost."""
        self._ring = None
        self.wait()

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._thread is not None:
            self._thread.join()

    @property
    def at_rest(self) -> bool:
        """Nothing is under way: all copies of this rank are where they belong, or lost."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def own(self) -> dict[int, Stages]:
        """Step -> stages of the copies of this rank's state."""
        return {copy.step: copy.stages for copy in self._own}

    @property
    def client(self) -> frozenset[int]:
        """Steps of the whole copies of the client's state."""
        return frozenset(copy.step for copy in self._client)

    def take(self, step: int, stages: Stages, buffers: Sequence[Tensor]) -> None:
        """Copy `buffers`, and exchange copies behind the training. Nothing must be under way."""
        assert self._ring is not None, "connect() comes first"
        size = sum(buffer.nbytes for buffer in buffers)
        copy = Copy(step, stages, _room(self._own, size))
        _pack(buffers, copy.block)
        self._own.append(copy)
        self._thread = threading.Thread(target=self._exchange, args=(copy, *self._ring), name="snapshot", daemon=True)
        self._thread.start()

    def restore(self, step: int, buffers: Sequence[Tensor]) -> None:
        """Fill `buffers` from this rank's own copy of `step`."""
        _unpack(next(copy.block for copy in self._own if copy.step == step), buffers)

    def give_back(self, step: int) -> None:
        """Send the client's copy of `step` to the client, which has been replaced."""
        assert self._ring is not None, "connect() comes first"
        block = next(copy.block for copy in self._client if copy.step == step)
        self._ring[1].send(block, 0).wait()

    def get_back(self, step: int, stages: Stages, buffers: Sequence[Tensor]) -> None:
        """Fill `buffers` from the copy that the peer has kept."""
        assert self._ring is not None, "connect() comes first"
        block = torch.empty(sum(buffer.nbytes for buffer in buffers), dtype=torch.uint8)
        self._ring[0].receive(block, 1).wait()
        self._own.append(Copy(step, stages, block))
        _unpack(block, buffers)

    def forget_after(self, step: int) -> None:
        """Copies of later steps: the run has gone back before them."""
        self._own = [copy for copy in self._own if copy.step <= step]
        self._client = [copy for copy in self._client if copy.step <= step]

    def _exchange(self, copy: Copy, to_peer: Group, from_client: Group) -> None:
        head, theirs = torch.tensor([copy.step, copy.block.numel()]), torch.empty(2, dtype=torch.int64)
        try:
            works = [to_peer.send(head, 1), to_peer.send(copy.block, 1)]
            from_client.receive(theirs, 0).wait()
            block = _room(self._client, int(theirs[1]))
            from_client.receive(block, 0).wait()
            for work in works:
                work.wait()
        except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to; a lost rank is found elsewhere
            logger.warning("snapshot of step %d is lost: %s", copy.step, error)
            return
        self._client.append(Copy(int(theirs[0]), copy.stages, block))


def _room(copies: list[Copy], size: int) -> Tensor:
    """Memory for one more copy: that of the oldest one, which is dropped, if there are as many as are kept."""
    dropped = copies.pop(0) if len(copies) == KEPT else None
    if dropped is not None and dropped.block.numel() == size:
        return dropped.block
    return torch.empty(size, dtype=torch.uint8)


@torch.no_grad()
def _pack(buffers: Sequence[Tensor], block: Tensor) -> None:
    """One after the other; from a device, done when this returns."""
    for buffer, part in zip(buffers, block.split([buffer.nbytes for buffer in buffers]), strict=True):
        part.copy_(buffer.view(torch.uint8))


@torch.no_grad()
def _unpack(block: Tensor, buffers: Sequence[Tensor]) -> None:
    for buffer, part in zip(buffers, block.split([buffer.nbytes for buffer in buffers]), strict=True):
        buffer.view(torch.uint8).copy_(part)
