"""Writes the shards of one rank, one after another, in a thread of its own.

A shard that cannot be written is tried again until it is written or called off: a full disk or a store that is away must
not end a run. Beside training the thread has the lowest priority, and where the training needs the same cores it also rests
in between, since a priority is only good against threads of the same process group.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence

import torch

from raytrain3d.checkpoint.layout import Piece
from raytrain3d.checkpoint.manifest import Receipt
from raytrain3d.checkpoint.progress import SaveProgress
from raytrain3d.checkpoint.store import write_shard

logger = logging.getLogger(__name__)
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""Before a shard is tried again; each wait is twice as long as the one before."""
LOWEST_PRIORITY = 19
SHARE_OF_CORE = 0.1
"""Most that writing takes of a core on which a rank computes."""


class _CalledOff(Exception):
    pass


class ShardWriter:
    """At most one shard at a time."""

    def __init__(self, rank: int, share: float = 1.0) -> None:
        """share: of a core, that writing behind the training may take."""
        self._rank, self._share = rank, share
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._progress: SaveProgress | None = None
        self._called_off, self._in_haste = threading.Event(), threading.Event()
        self._rested = 0.0
        """Processor time of the thread when it last rested."""

    def start(self, directory: str, step: int, pieces: Sequence[Piece], *, behind: bool) -> None:
        """Begin to write `pieces`, whose values must stay as they are until the receipt is there. behind: training goes on
        meanwhile."""
        self.call_off()
        self._called_off.clear()
        self._in_haste.clear()
        if not behind:
            self.hurry()
        self._set(step, 0.0)
        self._thread = threading.Thread(target=self._run, args=(directory, step, pieces, behind), name="save",
                                        daemon=True)
        self._thread.start()

    @property
    def progress(self) -> SaveProgress:
        """Of the shard begun last; from any thread."""
        with self._lock:
            assert self._progress is not None, "start() comes first"
            return self._progress

    def hurry(self) -> None:
        """Nothing trains meanwhile: take a whole core."""
        self._in_haste.set()

    def call_off(self) -> None:
        """Leave a shard that is not written yet; returns when nothing is written any more."""
        self.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Leave a shard that is not written yet, without waiting for the storage."""
        self._called_off.set()
        self.hurry()

    def _run(self, directory: str, step: int, pieces: Sequence[Piece], behind: bool) -> None:
        torch.set_num_threads(1)
        if behind:
            _lower_priority()
        start, failures, self._rested = time.perf_counter(), 0, time.thread_time()
        while not self._called_off.is_set():
            error = self._try(directory, step, pieces, start, failures)
            if error is None:
                return
            failures += 1
            logger.warning("step %d, try %d: %s", step, failures, error)
            self._set(step, time.perf_counter() - start, failures=failures, error=error)
            self._called_off.wait(min(FIRST_WAIT_S * 2 ** (failures - 1), LONGEST_WAIT_S))

    def _try(self, directory: str, step: int, pieces: Sequence[Piece], start: float, failures: int) -> str | None:
        """Why it failed, if it did."""
        try:
            receipt = write_shard(directory, self._rank, pieces, step=step, before_block=self._give_way)
        except _CalledOff:
            return None
        except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to, and the driver must hear of it
            return str(error) or repr(error)
        self._set(step, time.perf_counter() - start, failures=failures, receipt=receipt)
        return None

    def _give_way(self) -> None:
        """Before every block: rest in proportion to what was computed since the last rest."""
        if not self._in_haste.is_set():
            worked = time.thread_time() - self._rested
            self._in_haste.wait(worked * (1 / self._share - 1))
            self._rested = time.thread_time()
        if self._called_off.is_set():
            raise _CalledOff

    def _set(self, step: int, seconds: float, *, failures: int = 0, error: str | None = None,
             receipt: Receipt | None = None) -> None:
        with self._lock:
            self._progress = SaveProgress(step=step, receipt=receipt, seconds=seconds, failures=failures, error=error)


def _lower_priority() -> None:
    """Of the calling thread alone, where the system can do that."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
