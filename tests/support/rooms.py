"""Local gangs that have a place or not, as files in run.directory say: a cluster that loses and gets nodes."""

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from chaos import ChaosTrainer

from raytrain3d.config import JobConfig
from raytrain3d.gang.handle import Gangs
from raytrain3d.gang.launchers import LOOPBACK, LocalLauncher, Say
from raytrain3d.gang.local import LocalGang, Spares, Started
from raytrain3d.gang.network import rank_environment
from raytrain3d.gang.stop import StopFlag
from raytrain3d.gang.worker import RankSettings
from raytrain3d.plan.plan import Plan
from raytrain3d.train.report import StepReport


class Rooms:
    """Of one job: a file for every replica without room, and one for a replica whose node goes away."""

    def __init__(self, config: JobConfig) -> None:
        self._directory = Path(config.run.directory)
        self._directory.mkdir(parents=True, exist_ok=True)

    def take(self, replica: int) -> None:
        self._file("no-room", replica).touch()

    def give(self, replica: int) -> None:
        self._file("no-room", replica).unlink()

    def has(self, replica: int) -> bool:
        return not self._file("no-room", replica).exists()

    def give_notice(self, replica: int) -> None:
        self._file("leaving", replica).touch()

    def is_leaving(self, replica: int) -> bool:
        return self._file("leaving", replica).exists()

    def pace(self, seconds: float) -> None:
        """Every step takes so much longer from now on."""
        partial = self._directory / "pace.partial"
        partial.write_text(str(seconds))
        partial.replace(self._directory / "pace")

    def _file(self, what: str, replica: int) -> Path:
        return self._directory / f"{what}-{replica}"


class PacedTrainer(ChaosTrainer):
    """Takes its time."""

    def step(self, n: int) -> StepReport:
        pace = Path(self._config.run.directory) / "pace"
        time.sleep(float(pace.read_text()) if pace.exists() else 0)
        return super().step(n)


class RoomGang(LocalGang):
    """A gang of which new processes come up only where there is room."""

    def __init__(self, settings: Sequence[RankSettings], environment: Mapping[str, str], rooms: Rooms) -> None:
        self._rooms, self._replica = rooms, settings[0].plan.mesh.coordinate(settings[0].rank).data
        super().__init__(settings, environment, Spares(0, "", environment))

    def _start(self, settings: RankSettings) -> Started:
        if self._rooms.has(self._replica):
            return super()._start(settings)
        ours, theirs = socket.socketpair()
        with theirs:  # it never answers, as an actor that waits for a node
            return subprocess.Popen(["sleep", "600"], pass_fds=[theirs.fileno()]), Connection(ours.detach())


class LocalGangs:
    """Gangs of local processes in these rooms."""

    def __init__(self, settings: Sequence[RankSettings]) -> None:
        self._settings, config = settings, settings[0].config
        self._environment, self._rooms = rank_environment(config, LOOPBACK), Rooms(config)
        self._starting: dict[int, LocalGang] = {}
        self.present: dict[int, LocalGang] = {}
        for replica in self.places():
            self.start(replica, settings[0].plan)
            self.admit(replica)
        assert len(self.present) >= config.mesh.fewest_replicas

    def lacks_place(self, replica: int) -> bool:
        return not self._rooms.has(replica)

    def drop(self, replica: int) -> None:
        gang = self._starting.pop(replica, None) or self.present.pop(replica, None)
        if gang is not None:
            gang.kill()

    def places(self) -> list[int]:
        return [replica for replica in range(self._settings[0].plan.mesh.data)
                if self._rooms.has(replica) and replica not in self.present and replica not in self._starting]

    def start(self, replica: int, plan: Plan) -> LocalGang:
        settings = [replace(self._settings[rank], plan=plan) for rank in plan.mesh.gang(replica)]
        gang = self._starting[replica] = RoomGang(settings, self._environment, self._rooms)
        return gang

    def admit(self, replica: int) -> None:
        self.present[replica] = self._starting.pop(replica)

    def leaving(self) -> Mapping[int, float]:
        return {replica: 60.0 for replica in self.present if self._rooms.is_leaving(replica)}

    def close(self) -> None:
        for gang in [*self.present.values(), *self._starting.values()]:
            gang.kill()


class RoomLauncher(LocalLauncher):
    """Local processes in rooms."""

    @contextmanager
    def gangs(self, settings: Sequence[RankSettings], stop: StopFlag, say: Say) -> Iterator[Gangs]:
        gangs = LocalGangs(settings)
        try:
            yield gangs
        finally:
            gangs.close()
