"""Following a submitted job to its end: its output, over connections that may drop, and its exit code."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from raytrain3d.errors import RayTrain3DError

LOST_LIMIT_S = 600.0
"""How long a cluster may stay unreachable before nobody waits for it any more."""
RETRY_S = 1.0
STOPPED = 143
"""Exit code for a job that was stopped: Ray ends it with SIGTERM and keeps no code of its own."""


class Unreachable(RayTrain3DError):
    """The cluster's job server does not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What the job server says of a job."""

    status: str
    """PENDING, RUNNING, SUCCEEDED, STOPPED or FAILED."""
    exit_code: int | None = None
    """The driver's own, once it has ended by itself."""
    message: str = ""

    @property
    def has_ended(self) -> bool:
        return self.status in ("SUCCEEDED", "STOPPED", "FAILED")

    @property
    def code(self) -> int:
        """Exit code for whoever waited: the driver's own, as far as there is one."""
        if self.exit_code is not None:
            return self.exit_code
        return {"SUCCEEDED": 0, "STOPPED": STOPPED}.get(self.status, 1)


class JobSource(Protocol):
    """One job on its server. Both raise Unreachable."""

    def state(self) -> JobState: ...

    def output(self) -> AsyncIterator[str]:
        """The driver's output from its beginning, piece by piece; ends with the job, or when the connection drops."""


def follow(job: JobSource, write: Callable[[str], None], *, limit_s: float = LOST_LIMIT_S,
           retry_s: float = RETRY_S) -> JobState:
    """Write the driver's output as it comes, each character once, until the job has ended.

    Raises Unreachable when the server has not answered for `limit_s` seconds; the job goes on without being watched.
    """
    output, answered = _Output(job, write), time.monotonic()
    while True:
        try:
            state = job.state()  # first: all that a job has written which has ended is then there to be read
            answered = time.monotonic()
            asyncio.run(output.write_new())
            if state.has_ended:
                return state
        except Unreachable:
            if time.monotonic() - answered > limit_s:
                raise
        time.sleep(retry_s)


class _Output:
    """What was written of a job's output."""

    def __init__(self, job: JobSource, write: Callable[[str], None]) -> None:
        self._job, self._write = job, write
        self._written = 0

    async def write_new(self) -> None:
        """Until the stream ends or drops. A stream begins at the beginning again each time."""
        seen = 0
        async for text in self._job.output():
            new = text[max(0, self._written - seen):]
            seen += len(text)
            if new:
                self._write(new)
                self._written += len(new)
