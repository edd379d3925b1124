"""Processes with torch loaded, shared by all tests of a session: starting eight of them takes longer than most tests."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*arguments))
        except Exception:  # noqa: BLE001  a test's own error, whatever it is, goes to the test
            answer = (False, traceback.format_exc())
        connection.send(answer)


class RankPool:
    """Grows to the number of ranks asked for and ends with the test session."""

    def __init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], limit_s: float = 120) -> list[Any]:
        """function(*arguments[rank]) on every rank at once; results in rank order."""
        while len(self._workers) < len(arguments):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        workers = self._workers[: len(arguments)]
        for (_, connection), own in zip(workers, arguments, strict=True):
            connection.send((function, own))
        answers = []
        for rank, (_, connection) in enumerate(workers):
            if not connection.poll(limit_s):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer in {limit_s} s")
            answers.append(connection.recv())
        failed = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(answers) if not fine]
        if failed:
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()
