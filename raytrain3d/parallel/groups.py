"""Process groups of one generation, made directly over the driver's store.

Each rank makes only the groups it belongs to, named by the plan (generation, kind, members), so that no torch-global
registry keeps references and making them does not grow with the fleet. One object owns them all: closing it drops every
reference, which is what wakes neighbours after a death. A group of one has no process group: its collectives are the
identity.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from raytrain3d.parallel.staged import Staged
from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.rank_program import channels_of


@dataclass(frozen=True, slots=True)
class Work:
    """A collective or message under way. `None` inside means that there was nothing to do."""

    handle: Any

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()


DONE = Work(None)
HOST = torch.device("cpu")

BACKLOG = 4096
"""Connections to the store that may wait: all ranks come at once."""
STAR_LIMIT_BYTES = 1 << 20
"""Up to this size a star over gloo beats its ring among more than two ranks, several times over: latency decides."""


class Group:
    """Ranks that communicate. Reductions are sums unless said otherwise; all are in place and asynchronous."""

    def __init__(self, name: str, ranks: Sequence[int], rank: int, link: "Link", *, device: str) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(rank)
        self.size = len(self.ranks)
        self._on_host, self._is_aborted = device == "cpu", False
        self._backend = link.backend(name, self.index, self.size, device) if self.size > 1 else None

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> Work:
        """Sum (or elementwise maximum) over the group, in place."""
        if self._backend is None or tensor.numel() == 0:
            return DONE
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
        return Work(self._backend.allreduce([tensor], options))

    def reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """Sum (or maximum) over the group, in place, done when this returns."""
        self.start_reduce(tensor, maximum=maximum).wait()

    def start_reduce(self, tensor: Tensor, *, maximum: bool = False) -> Work:
        """As `all_reduce`, by a star where that is faster; then it is done when this returns."""
        if self._on_host and self.size > 2 and tensor.nbytes <= STAR_LIMIT_BYTES:
            self.gather_sum(tensor, maximum=maximum)
            self.send_back(tensor)
            return DONE
        return self.all_reduce(tensor, maximum=maximum)

    def gather_sum(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """First half of a star: the first member adds all tensors to its own, in rank order."""
        if self.index > 0:
            self.send(tensor, 0).wait()
            return
        parts = [torch.empty_like(tensor) for _ in range(1, self.size)]
        works = [self.receive(part, index) for index, part in enumerate(parts, start=1)]
        for part, work in zip(parts, works, strict=True):
            work.wait()
            torch.maximum(tensor, part, out=tensor) if maximum else tensor.add_(part)

    def send_back(self, tensor: Tensor, *, got: Callable[[], None] = lambda: None) -> None:
        """Second half: every member gets the first one's tensor, in place. `got` is called when this one has it, before it
        passes it on."""
        if self.index > 0:
            self.receive(tensor, 0).wait()
            got()
            return
        got()
        for work in [self.send(tensor, index) for index in range(1, self.size)]:
            work.wait()

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Work:
        """shard = this member's part of the sum of `whole`. `shard` may be that part of `whole` itself."""
        if self._backend is None:
            return DONE
        return Work(self._backend._reduce_scatter_base(shard, whole))

    def all_gather(self, whole: Tensor, shard: Tensor) -> Work:
        """whole = the members' shards one after the other. `shard` may be this member's part of `whole`."""
        if self._backend is None:
            return DONE
        return Work(self._backend._allgather_base(whole, shard))

    def send(self, tensor: Tensor, to: int) -> Work:
        """Send to the member with index `to`. The tensor must stay as it is until the work is done."""
        assert self._backend is not None
        return Work(self._backend.send([tensor], to, 0))

    def receive(self, tensor: Tensor, sender: int) -> Work:
        assert self._backend is not None
        return Work(self._backend.recv([tensor], sender, 0))

    def exchange(self, mine: Tensor) -> Tensor:
        """What the other one of two members has. One sends first: in a communicator of NCCL an operation begins when the one
        before it is over, so two that both receive first would wait for each other."""
        theirs, other = torch.empty_like(mine), 1 - self.index
        first = self.send(mine, other) if self.index == 0 else self.receive(theirs, other)
        second = self.receive(theirs, other) if self.index == 0 else self.send(mine, other)
        first.wait()
        second.wait()
        return theirs

    def abort(self) -> None:
        """From any thread: end what is under way. Gloo ends by itself when a neighbour is gone; kernels of NCCL wait on."""
        if self._backend is not None and not self._on_host and not self._is_aborted:
            self._is_aborted = True
            self._backend.abort()

    def close(self) -> None:
        """Drop the backend. One of NCCL would wait for what is under way, so it is aborted."""
        self.abort()
        self._backend = None


class Link:
    """Makes backends over the driver's store: NCCL for device tensors of GPU ranks, gloo for all else. transport: as in
    `network.transport`."""

    def __init__(self, store: Store, generation: int, timeout_s: float, transport: str = "auto") -> None:
        self._store = PrefixStore(f"generation-{generation}", store)
        self._timeout, self._transport = timedelta(seconds=timeout_s), transport

    def backend(self, name: str, index: int, size: int, device: str) -> Any:
        store = PrefixStore(name, self._store)
        if device == "gpu" and self._transport == "auto":
            # Streams of high priority: a message that is ready goes ahead of compute that is queued.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, index, size, options)
        gloo = dist.ProcessGroupGloo(store, index, size, self._timeout)
        return Staged(gloo) if device == "gpu" else gloo


class Groups:
    """Every group of one rank in one generation. `placement`: stage -> pipeline rank that holds it; `device`: the plan's;
    `tensors_on`: where tensors are that groups of the device are for; `shard_group`: neighbouring replicas that share one
    copy of what is sharded over the data axis; `present`: replicas that have ranks, default all."""

    def __init__(self, mesh: Mesh, placement: Sequence[int], rank: int, link: Link, *, device: str,
                 tensors_on: torch.device = HOST, shard_group: int = 1, present: Sequence[int] | None = None) -> None:
        present = range(mesh.data) if present is None else present

        def make(kind: str, ranks: Sequence[int], device: str = device) -> Group:
            return Group(f"{kind}/{'-'.join(map(str, ranks))}", ranks, rank, link, device=device)

        self._make, self._rank = make, rank
        self.ring: tuple[Group, Group] | None = None
        """To the rank that keeps a copy of this one's state, and from the one whose copy this one keeps."""
        at = mesh.coordinate(rank)
        gang, pipeline = mesh.gang(at.data), mesh.group("pipeline", rank)
        self.tensor = make("tensor", mesh.group("tensor", rank))
        replicas = mesh.group("data", rank)
        self.data = make("data", [replicas[replica] for replica in present])
        first, index = at.data - at.data % shard_group, at.data % shard_group
        # In the usual case one of the two is the data group and the other this rank alone.
        self.shard = (self.data if shard_group == mesh.data
                      else make("shard", replicas[first : first + shard_group]))
        self.across = self.data if shard_group == 1 else make("across", replicas[index::shard_group])
        ends = (placement[0], placement[-1])
        self.ends = (make("ends", [pipeline[end] for end in ends])
                     if at.pipeline in ends and ends[0] != ends[1] else None)
        self.gang = make("gang", gang, "cpu")
        leaders = [mesh.gang(replica)[0] for replica in present]
        self.leaders = make("leaders", leaders, "cpu") if rank in leaders else None
        self.channels = {channel: make(f"channel/{'forward' if channel.forward else 'backward'}",
                                       (pipeline[channel.sender], pipeline[channel.receiver]))
                         for channel in channels_of(placement) if at.pipeline in (channel.sender, channel.receiver)}
        self._is_aborted = False
        self._connect(torch.zeros(1, device=tensors_on))

    def _connect(self, probe: Tensor) -> None:
        """Communicators are made by their first operation, so there is one in each, in the same global order everywhere:
        they exist before step 1."""
        for group in (self.tensor, self.data, self.shard, self.across):
            group.all_reduce(probe).wait()
        if self.ends is not None:
            self.ends.exchange(probe)
        for group in self.channels.values():
            (group.send(probe, 1) if group.index == 0 else group.receive(probe, 0)).wait()

    def make_ring(self, peers: Sequence[int]) -> tuple[Group, Group]:
        """peers: rank -> the rank that keeps a copy of its state. Always on the host."""
        client = peers.index(self._rank)
        pairs = sorted([(self._rank, peers[self._rank]), (client, self._rank)])  # in one order everywhere
        made = {pair: self._make("snapshot", pair, "cpu") for pair in pairs}
        self.ring = (made[self._rank, peers[self._rank]], made[client, self._rank])
        return self.ring

    def abort(self) -> None:
        """From any thread: another rank is lost. Whoever waits here on a device wakes, with garbage in its buffers."""
        self._is_aborted = True
        for group in self._all():
            group.abort()

    def check(self) -> None:
        """ConnectionError if the groups were aborted, so that what came through them may be garbage."""
        if self._is_aborted:
            raise ConnectionError("communicator was aborted: another rank is lost")

    def close(self) -> None:
        """Drop every reference, which closes the sockets and wakes whoever waits on this rank."""
        for group in self._all():
            group.close()
        self.channels.clear()

    def _all(self) -> list[Group]:
        groups = (self.tensor, self.data, self.shard, self.across, self.ends, self.gang, self.leaders,
                  *self.channels.values(), *(self.ring or ()))
        return [group for group in groups if group is not None]


def serve_store(host: str, port: int = 0) -> TCPStore:
    """The rendezvous store, hosted by the caller for as long as the object lives; `.port` is where it listens, at the
    address `host` alone (by itself torch would listen at all of the machine's)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    return TCPStore(host, listener.getsockname()[1], is_master=True, wait_for_workers=False,
                    master_listen_fd=listener.detach())


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A rank's connection to the driver's store."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
