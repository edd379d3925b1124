"""Files that are whole or absent, and requests that are tried again."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
WAITS_S = (0.5, 2.0)
"""Between the tries of one request. Few, since clients of object stores try again by themselves, and a save that fails is
tried again as a whole."""


def write_whole(path: Path, content: bytes) -> None:
    """Under another name first, so that whoever reads `path` finds what was there before or all of `content`. Not synced to
    disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


def retried(action: Callable[[], T]) -> T:
    """What `action` returns, tried again after an OSError, but for a file that is not there."""
    for wait_s in WAITS_S:
        try:
            return action()
        except FileNotFoundError:
            raise
        except OSError:
            time.sleep(wait_s)
    return action()
