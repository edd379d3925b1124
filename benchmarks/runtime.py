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
from raytrain3d.parallel.groups import Group, Groups, Link, join_store
from raytrain3d.parallel.pipeline import Feed, PipelineRun, Stage
from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.program import Channel
from raytrain3d.plan.rank_program import RankProgram

PINGS, PAUSE_S = 50, 0.010


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
        return PipelineRun(stages, mail, feed, put_off=put_off, clock=HostClock())

    def hop_s(self) -> float | None:
        """Seconds of one message to a rank that has waited for it: half a round trip from rank 0 to rank 1 and back, after
        a pause. None on the other ranks, which call it too."""
        if self.rank > 1:
            return None
        forth = self._groups.channels[Channel(sender=0, receiver=1, forward=True)]
        back = self._groups.channels[Channel(sender=1, receiver=0, forward=False)]
        times = [self._ping(forth, back) if self.rank == 0 else self._answer(forth, back) for _ in range(PINGS)]
        return statistics.median(times) / 2 if self.rank == 0 else None

    def _ping(self, forth: Group, back: Group) -> float:
        time.sleep(PAUSE_S)
        start = time.perf_counter()
        forth.send(self._message, 1).wait()
        back.receive(self._message, 0).wait()
        return time.perf_counter() - start

    def _answer(self, forth: Group, back: Group) -> float:
        forth.receive(self._message, 0).wait()
        back.send(self._message, 1).wait()
        return 0.0
