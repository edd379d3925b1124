"""Ranks without Ray: a process each on this machine, or the one rank of a mesh of one in a thread of the driver."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from raytrain3d.gang.failure import exit_cause
from raytrain3d.gang.handle import Leader, RankDied, settle
from raytrain3d.gang.worker import RankSettings, RankWorker
from raytrain3d.metrics.logs import close_log
from raytrain3d.plan.plan import Plan

P = ParamSpec("P")
T = TypeVar("T")
EXIT_WAIT_S = 5.0
"""Longest wait for the exit code of a process whose connection has closed."""
REFILL_S = 10.0
"""From the use of a spare process until another one is started."""


class LocalRank:
    """A rank in a process of this machine, which ends with the driver."""

    def __init__(self, settings: RankSettings, started: "Started") -> None:
        self.rank = settings.rank
        self.node = socket.gethostname()
        self.leader = Leader((self.rank,), train=lambda lease: self.call(RankWorker.train, lease),
                             reports=lambda after: self.ask(RankWorker.reports, after))
        self._process, self._connection = started
        self._waiting: dict[int, Future[Any]] = {}
        self._count = 0
        self._death: RankDied | None = None
        self._lock = threading.Lock()
        with suppress(OSError):  # it died at once: the reader says so
            self._connection.send(settings)
        self._reader = threading.Thread(target=self._read, name=f"rank {self.rank}", daemon=True)
        self._reader.start()

    @property
    def process(self) -> int:
        return self._process.pid

    def call(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._request(True, method, args, kwargs)

    def ask(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._request(False, method, args, kwargs)

    def kill(self) -> None:
        """End the process; returns when it is gone."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _request(self, is_call: bool, method: Callable[..., Any], args: tuple[Any, ...],
                 kwargs: Mapping[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._death is not None:
                future.set_exception(self._death)
                return future
            self._count += 1
            self._waiting[self._count] = future
            with suppress(OSError):  # it has just died: the reader fails the future
                self._connection.send((self._count, is_call, method, args, dict(kwargs)))
        return future

    def _read(self) -> None:
        try:
            while True:
                number, outcome = self._connection.recv()
                with self._lock:
                    future = self._waiting.pop(number)
                settle(future, outcome)
        except (EOFError, OSError):
            self._died()

    def _died(self) -> None:
        try:
            death = RankDied(exit_cause(self._process.wait(EXIT_WAIT_S)))
        except subprocess.TimeoutExpired:
            death = RankDied("it closed its connection to the driver")
        with self._lock:
            self._death, waiting = death, list(self._waiting.values())
            self._waiting.clear()
            self._connection.close()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(death)


Started = tuple[subprocess.Popen[bytes], Connection]
"""A process that waits for its settings, and our end of its connection."""


def start_process(log: str, environment: Mapping[str, str], *, warm: bool = False) -> Started:
    """log: file for what it prints. warm: it loads and tries all that training needs while it waits."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    variables = {**os.environ, **environment, "PYTHONPATH": path}
    command = [sys.executable, "-m", "raytrain3d.gang.child", str(theirs.fileno()), *(["--warm"] if warm else [])]
    with theirs, open(log, "ab") as output:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=variables, stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=output)
    return process, Connection(ours.detach())


def output_file(directory: str | None, name: str) -> str:
    """Where a process prints to."""
    if directory is None:
        return os.devnull
    Path(directory).mkdir(parents=True, exist_ok=True)
    return str(Path(directory) / name)


class Spares:
    """Processes that wait, with torch loaded, to take the place of lost ranks."""

    def __init__(self, number: int, log: str, environment: Mapping[str, str]) -> None:
        self._log, self._environment = log, environment
        self._waiting: list[Started] = []
        self._lock, self._closed = threading.Lock(), False
        self._refills: list[threading.Timer] = []
        for _ in range(number):
            self._add()

    def take(self) -> Started | None:
        """One that lives, if there is one; another one is started a little later, when the recovery is over."""
        with self._lock:
            while self._waiting:
                process, connection = self._waiting.pop(0)
                refill = threading.Timer(REFILL_S, self._add)
                refill.daemon = True
                refill.start()
                self._refills.append(refill)
                if process.poll() is None:
                    return process, connection
                connection.close()
        return None

    def close(self) -> None:
        for refill in self._refills:
            refill.cancel()
        with self._lock:
            self._closed = True
            for process, connection in self._waiting:
                process.kill()
                process.wait()
                connection.close()
            self._waiting.clear()

    def _add(self) -> None:
        with self._lock:
            if not self._closed:
                self._waiting.append(start_process(self._log, self._environment, warm=True))


class LocalGang:
    """Local processes of one replica."""

    def __init__(self, settings: Sequence[RankSettings], environment: Mapping[str, str], spares: Spares) -> None:
        self._settings, self._environment = {each.rank: each for each in settings}, environment
        self._spares = spares
        self.ranks = tuple(LocalRank(each, self._start(each)) for each in settings)

    def replace(self, rank: int, plan: Plan) -> None:
        settings = replace(self._settings[rank], plan=plan)
        self.ranks = tuple(self._new(old, settings) if old.rank == rank else old for old in self.ranks)

    def _new(self, old: LocalRank, settings: RankSettings) -> LocalRank:
        old.kill()
        return LocalRank(settings, self._spares.take() or self._start(settings))

    def _start(self, settings: RankSettings) -> Started:
        return start_process(output_file(settings.log_directory, f"rank-{settings.rank:04d}.log"), self._environment)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()


class InlineRank:
    """The only rank of a run, in a thread of the driver: for debugging."""

    def __init__(self, settings: RankSettings) -> None:
        self.rank = settings.rank
        self.node = socket.gethostname()
        self.leader = Leader((self.rank,), train=lambda lease: self.call(RankWorker.train, lease),
                             reports=lambda after: self.ask(RankWorker.reports, after))
        self._log = settings.open_log()
        self._worker = RankWorker(settings)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank 0")

    def call(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        answer: Future[T] = Future()
        self._thread.submit(lambda: settle(answer, self._worker.run(method, *args, **kwargs)))
        return answer

    def ask(self, method: Callable[Concatenate[RankWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        answer: Future[T] = Future()
        settle(answer, method(self._worker, *args, **kwargs))
        return answer

    def kill(self) -> None:
        """End after the step under way."""
        self._worker.request_stop()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._worker.close()
        close_log(self._log)


class InlineGang:
    """The gang of a mesh of one."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self.ranks = (InlineRank(settings),)

    def replace(self, rank: int, plan: Plan) -> None:
        self.kill()
        self.ranks = (InlineRank(replace(self._settings, plan=plan)),)

    def kill(self) -> None:
        self.ranks[0].kill()
