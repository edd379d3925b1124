"""Pieces of a data preparation as tasks of a Ray cluster, a CPU each."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayTaskError, WorkerCrashedError

from raytrain3d.errors import DataError, RayTrain3DError

T = TypeVar("T")
R = TypeVar("R")
IN_FLIGHT_PER_CPU = 2
POLL_S = 1.0
RETRIES = 3
"""Of a piece whose process or node was lost; doing it again is harmless."""


@dataclass(frozen=True, slots=True)
class RayTasks:
    """On the cluster that this process is connected to."""

    directory: str
    """That all nodes must see: where pieces are written."""

    def run(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Results as they come. Few more tasks than CPUs are under way, so that a driver that dies leaves little."""
        one_thread = {"env_vars": {"TOKENIZERS_PARALLELISM": "false"}}
        task: Any = ray.remote(num_cpus=1, max_retries=RETRIES, runtime_env=one_thread)(_do)
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        room = max(1, int(resources.get("CPU", 1))) * IN_FLIGHT_PER_CPU
        waiting: list[Any] = []
        left = iter(items)
        more = True
        while more or waiting:
            while more and len(waiting) < room:
                item = next(left, None)
                more = item is not None
                if more:
                    waiting.append(task.remote(function, item, self.directory))
            ready, waiting = ray.wait(waiting, timeout=POLL_S) if waiting else ([], [])
            for reference in ready:
                yield _result(reference)


def _do(function: Callable[[T], R], item: T, directory: str) -> R:
    if not os.path.isdir(directory):
        raise DataError(f"{directory} is not there on node {socket.gethostname()}: data.path must lie on a file system that "
                        "all nodes share, or prepare on one machine (without --ray)")
    return function(item)


def _result(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RayTrain3DError):
            raise cause from None
        raise
    except WorkerCrashedError as error:
        raise DataError(f"a process that prepared data was killed {RETRIES + 1} times (out of memory?): {error}") from None
