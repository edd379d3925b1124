"""What the ranks of a job run in: Ray actors, local processes, or the driver itself. Ray is imported only if wanted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from raytrain3d.config import JobConfig
from raytrain3d.errors import ConfigError
from raytrain3d.gang.handle import FixedGangs, Gangs
from raytrain3d.gang.local import InlineGang, LocalGang, Spares, output_file
from raytrain3d.gang.mailbox import Mailbox
from raytrain3d.gang.network import rank_environment
from raytrain3d.gang.stop import StopFlag
from raytrain3d.gang.worker import RankSettings
from raytrain3d.metrics.run_metrics import RunMetrics

LOOPBACK = "127.0.0.1"
Say = Callable[[str], None]


class Launcher(Protocol):
    """Starts gangs."""

    @property
    def num_gpus(self) -> int:
        """GPUs that there are."""

    @property
    def address(self) -> str:
        """Address of the driver's node that ranks can reach."""

    def mailbox(self, run: str) -> AbstractContextManager[Sequence[Mailbox]]:
        """Mailboxes beside the one in the run directory. ConfigError when the run's name is in use."""

    def copy_of(self, metrics: RunMetrics) -> AbstractContextManager[None]:
        """Inside, the metrics are copied to those of what ranks run in, if it has any."""

    def gangs(self, settings: Sequence[RankSettings], stop: StopFlag,
              say: Say) -> AbstractContextManager[Gangs]:
        """The gangs of all ranks (`settings` in rank order), or of as many replicas as there is room for, if the mesh
        allows; nothing of them is left on leaving."""


class LocalLauncher:
    """A process per rank on this machine."""

    address = LOOPBACK

    @property
    def num_gpus(self) -> int:
        import torch
        return torch.cuda.device_count()

    @contextmanager
    def mailbox(self, run: str) -> Iterator[Sequence[Mailbox]]:
        yield ()

    def copy_of(self, metrics: RunMetrics) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def gangs(self, settings: Sequence[RankSettings], stop: StopFlag, say: Say) -> Iterator[Gangs]:
        plan = settings[0].plan
        environment = rank_environment(settings[0].config, LOOPBACK)
        gangs: list[LocalGang] = []
        log = output_file(settings[0].log_directory, "spares.log")
        spares = Spares(settings[0].config.recovery.spares, log, environment)
        try:
            gangs += [LocalGang([settings[rank] for rank in plan.mesh.gang(replica)], environment, spares)
                      for replica in range(plan.mesh.data)]
            yield FixedGangs(gangs)
        finally:
            spares.close()
            for gang in gangs:
                gang.kill()


class InlineLauncher(LocalLauncher):
    """The only rank in a thread of the driver."""

    @contextmanager
    def gangs(self, settings: Sequence[RankSettings], stop: StopFlag, say: Say) -> Iterator[Gangs]:
        if len(settings) > 1:
            raise ConfigError(f"--launcher inline runs one rank, the mesh has {len(settings)}: set mesh.data, "
                              "mesh.pipeline and mesh.tensor to 1, or use --launcher local")
        gang = InlineGang(settings[0])
        try:
            yield FixedGangs([gang])
        finally:
            gang.kill()


@contextmanager
def ray_launcher(config: JobConfig, address: str | None, say: Say) -> Iterator[Launcher]:
    """Connected to Ray inside."""
    try:
        from raytrain3d.gang import ray_launcher as implementation
    except ModuleNotFoundError as error:
        raise ConfigError(f"--launcher ray needs Ray, which is not installed here ({error}): install "
                          "'ray[default]', or use --launcher local") from None
    with implementation.connected(config, address, say):
        yield implementation.RayLauncher()


@contextmanager
def open_launcher(name: str, config: JobConfig, address: str | None, say: Say) -> Iterator[Launcher]:
    """The launcher called `name`: ray, local or inline."""
    match name:
        case "ray":
            with ray_launcher(config, address, say) as launcher:
                yield launcher
        case "local":
            yield LocalLauncher()
        case "inline":
            yield InlineLauncher()
        case _:
            raise ConfigError(f"--launcher is {name!r}: valid are ray, local and inline")

