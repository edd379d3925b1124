"""How people reach a running job: commands in, status out.

Every driver listens on a Unix socket in its run directory; on Ray there is a named actor too (ray_mailbox.py). Both
refuse a run name that is in use. A request is one JSON line, `{"command": "stop"}`, `{"command": "status"}` or
`{"command": "rebalance 5,5,4,2"}`; the answer is the run's status, one JSON line.
"""

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from raytrain3d.errors import ConfigError, RayTrain3DError

SOCKET = "control.sock"
ANSWER_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What a run says of itself."""

    run: str
    state: str
    """`starting`, `running`, ... as the controller's state."""
    step: int
    num_steps: int
    loss: float | None = None
    tokens_per_s: float | None = None
    seconds: float | None = None
    """Of the last step."""
    checkpoint: int | None = None
    """Step of the newest checkpoint."""
    checkpoint_age_s: float | None = None
    """Seconds since its state was copied; absent for one of an earlier process."""
    goodput: float | None = None
    """Share of the time since the first lease that went into steps which counted."""
    events: tuple[str, ...] = ()
    """The last failures and recoveries."""
    updated: float = 0.0
    """Unix time."""


class Mailbox(Protocol):
    """The driver's side."""

    def commands(self) -> list[str]:
        """Commands that have come since the last call; does not wait."""

    def publish(self, status: Status) -> None: ...

    def close(self) -> None: ...


def in_use(run: str, where: str) -> ConfigError:
    return ConfigError(f"run.name is {run!r}: a run of that name is under way ({where}). Stop it with `raytrain3d stop "
                       f"{run}`, or choose another run.name")


class SocketMailbox:
    """A Unix socket in a local run directory, served by a thread."""

    def __init__(self, directory: Path, run: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / SOCKET
        if _answers(self._path):
            raise in_use(run, f"run directory {directory}")
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        with _short_path(self._path) as path:
            self._socket.bind(path)
        self._socket.listen()
        self._commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._status = Status(run=run, state="starting", step=0, num_steps=0)
        self._thread = threading.Thread(target=self._serve, name="mailbox", daemon=True)
        self._thread.start()

    def commands(self) -> list[str]:
        return [self._commands.get_nowait() for _ in range(self._commands.qsize())]

    def publish(self, status: Status) -> None:
        self._status = status

    def close(self) -> None:
        with suppress(OSError):  # not connected: it only listens
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection, suppress(OSError, ValueError):  # a caller that leaves or sends nonsense gets no answer
                connection.settimeout(ANSWER_LIMIT_S)
                with connection.makefile("rw") as file:
                    self._answer(file)

    def _answer(self, file: Any) -> None:
        command = json.loads(file.readline())["command"]
        if command != "status":
            self._commands.put(command)
        file.write(json.dumps(asdict(self._status)) + "\n")
        file.flush()


def ask_socket(directory: Path, command: str) -> Status | None:
    """Send `command` to the run of a local run directory. None when none is under way there."""
    with socket.socket(socket.AF_UNIX) as connection:
        if not _connect(connection, directory / SOCKET):
            return None
        with connection.makefile("rw") as file:
            file.write(json.dumps({"command": command}) + "\n")
            file.flush()
            line = file.readline()
    if not line:
        raise RayTrain3DError(f"the run at {directory} does not answer")
    return status_from(json.loads(line))


def status_from(record: dict[str, Any]) -> Status:
    """A status that came as JSON."""
    return Status(**{**record, "events": tuple(record["events"])})


def ask_run(run: str, command: str, *, directory: str = "runs", address: str | None = None) -> Status:
    """Send `command` to a running job: by its run directory on this machine, else through Ray.

    run: name of the run, or path of its run directory. address: of the cluster, or the URL of its dashboard. Raises
    ConfigError when no such run is under way.
    """
    path = Path(run) if os.sep in run else Path(directory) / run
    status = ask_socket(path, command) if path.is_dir() else None
    if status is None and is_job_server(address):
        from raytrain3d.gang.jobs import ClusterJobs
        status = ClusterJobs(address).ask(path.name, command)
    elif status is None and "://" not in run:
        from raytrain3d.gang.ray_mailbox import ask_actor
        status = ask_actor(path.name, command, address)
    if status is None:
        raise ConfigError(f"no run {run!r} is under way: none answers in {path}, nor in a Ray cluster that can be "
                          "reached (give --address for another)")
    return status


def is_job_server(address: str | None) -> bool:
    """Whether it is the URL of a dashboard, through which jobs are submitted from anywhere."""
    return address is not None and address.startswith(("http://", "https://"))


def now(status: Status) -> Status:
    """`status` with the present time."""
    return Status(**(asdict(status) | {"updated": time.time()}))


def _answers(path: Path) -> bool:
    """Whether a live process listens at `path`."""
    with socket.socket(socket.AF_UNIX) as connection:
        return _connect(connection, path)


def _connect(connection: socket.socket, path: Path) -> bool:
    """Connect within the time limit of an answer. False when nobody listens at `path`."""
    connection.settimeout(ANSWER_LIMIT_S)
    try:
        with _short_path(path) as short:
            connection.connect(short)
    except OSError:
        return False
    return True


@contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """`path` by way of an open directory: a socket's address has room for about a hundred characters."""
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
