"""Who does the pieces of a preparation: this process, or others on this machine. (Ray tasks are in `gang/ray_tasks.py`.)"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Protocol, TypeVar

from raytrain3d.errors import DataError

T = TypeVar("T")
R = TypeVar("R")
_PR_SET_PDEATHSIG = 1


class Workers(Protocol):
    """Does a function for many items; the function and the items can be sent to other processes."""

    def run(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Results as they come, in any order. An error of one ends all."""


@dataclass(frozen=True, slots=True)
class LocalProcesses:
    """Processes on this machine; one is this process itself."""

    number: int

    def run(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        number = min(self.number, len(items))
        if number <= 1:
            yield from map(function, items)
            return
        with ProcessPoolExecutor(number, get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)) as pool:
            futures = [pool.submit(function, item) for item in items]
            try:
                for future in as_completed(futures):
                    yield future.result()
            except BrokenProcessPool:
                raise DataError("a process that prepared data was killed (out of memory?): the same command goes on where "
                                "it stopped; fewer --workers need less memory") from None
            finally:
                for future in futures:
                    future.cancel()


def _begin(parent: int) -> None:
    """Ends with its parent, however that ends, and computes in one thread: the other cores have processes of their own."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def available_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
