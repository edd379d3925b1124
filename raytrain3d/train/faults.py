"""Failing on purpose (`debug.faults`), for demonstrations."""

import os
import signal
import time
from collections.abc import Sequence

from raytrain3d.config import FaultConfig

FOREVER_S = 1e6


def suffer(faults: Sequence[FaultConfig], rank: int, step: int, generation: int) -> None:
    """Whatever is planned for this rank in this step. Every fault ends a generation, so the n-th one is due in the n-th."""
    for due, fault in enumerate(faults):
        if (due, fault.rank, fault.step) == (generation, rank, step):
            match fault.kind:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    time.sleep(FOREVER_S)
                case "raise":
                    raise RuntimeError("a fault on purpose (debug.faults)")
