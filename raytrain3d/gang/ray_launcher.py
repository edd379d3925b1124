"""Ranks in Ray actors, as a launcher. Call `connected` first."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from raytrain3d.gang.gang import ray_gangs
from raytrain3d.gang.handle import Gangs
from raytrain3d.gang.launchers import Say
from raytrain3d.gang.mailbox import Mailbox
from raytrain3d.gang.ray_cluster import connected, node_address
from raytrain3d.gang.ray_mailbox import RayMailbox
from raytrain3d.gang.ray_metrics import ray_copy_of
from raytrain3d.gang.ray_nodes import node_capacities
from raytrain3d.gang.stop import StopFlag
from raytrain3d.gang.worker import RankSettings
from raytrain3d.metrics.run_metrics import RunMetrics

__all__ = ["RayLauncher", "connected"]


class RayLauncher:
    """A placement group per gang, an actor per rank."""

    @property
    def num_gpus(self) -> int:
        return int(sum(node.gpus for node in node_capacities()))

    @property
    def address(self) -> str:
        return node_address()

    @contextmanager
    def mailbox(self, run: str) -> Iterator[Sequence[Mailbox]]:
        mailbox = RayMailbox(run)
        try:
            yield (mailbox,)
        finally:
            mailbox.close()

    def copy_of(self, metrics: RunMetrics) -> AbstractContextManager[None]:
        return ray_copy_of(metrics)

    def gangs(self, settings: Sequence[RankSettings], stop: StopFlag,
              say: Say) -> AbstractContextManager[Gangs]:
        return ray_gangs(settings, stop, say)
