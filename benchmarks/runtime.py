"""Our pipeline runtime on one rank, below Ray and below the trainer: groups, and runs of a program over stages."""

import statistics
import time
from collections.abc import Iterable, Mapping

import torch
from common import TIMEOUT_S, Place
from torch.distributed import PrefixStore

from raytrain3d.model.functional import put_off
from raytrain3d.parallel.channels import Buffers, Mail
from raytrain3d.parallel.clock import HostClock
from raytrain3d.parallel.groups import Groups, Link, join_store
from raytrain3d.parallel.pipeline import Feed, PipelineRun, Stage
from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.program import Channel
from raytrain3d.plan.rank_program import RankProgram

PINGS = 200


class Runtime:
    """For schedules of one placement (stage -> rank). Messages are of `shape`: (batch, seq, hidden)."""

    def __init__(self, place: Place, placement: tuple[int, ...], shape: tuple[int, ...],
                 dtype: torch.dtype = torch.float32) -> None:
        store = PrefixStore(f"placement-{'-'.join(map(str, placement))}", join_store("127.0.0.1", place.port, TIMEOUT_S))
        self._groups = Groups(Mesh(pipeline=place.num_ranks), placement, place.rank, Link(store, 0, TIMEOUT_S), device="cpu")
        self._buffers = Buffers(shape, dtype, torch.device("cpu"))
        self._message = torch.zeros(shape, dtype=dtype)
        self.rank = place.rank

    @staticmethod
    def for_all(place: Place, placements: Iterable[tuple[int, ...]], shape: tuple[int, ...],
                dtype: torch.dtype = torch.float32) -> dict[tuple[int, ...], "Runtime"]:
        """One for each placement. A process makes only one runtime of a placement: its groups are named by it."""
        return {placement: Runtime(place, placement, shape, dtype) for placement in sorted(set(placements))}

    def prepare(self, program: RankProgram, stages: Mapping[int, Stage], feed: Feed) -> PipelineRun:
        """A run of this rank's program, with its first receives posted."""
        mail = Mail(self._groups.channels, program, self._buffers)
        return PipelineRun(stages, mail, feed, recompute=False, put_off=put_off, layer_done=lambda layer: None,
                           clock=HostClock())

    def hop_s(self) -> float | None:
        """Seconds of one message, half a round trip between ranks 0 and 1; None on the other ranks."""
        if self.rank > 1:
            return None
        forth = self._groups.channels[Channel(sender=0, receiver=1, forward=True)]
        back = self._groups.channels[Channel(sender=1, receiver=0, forward=False)]
        tensor, times = self._message, []
        for _ in range(PINGS):
            start = time.perf_counter()
            if self.rank == 0:
                forth.send(tensor, 1).wait()
                back.receive(tensor, 0).wait()
            else:
                forth.receive(tensor, 0).wait()
                back.send(tensor, 1).wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times) / 2
