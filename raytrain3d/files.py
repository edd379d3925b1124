"""Files that are whole or absent, and requests to remote stores that are tried again and end in time.

No limit of a store's client holds for all of them, and a call that is stuck cannot be ended. So each is made in a thread of
its own, which is left to itself when its time is over.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
WAITS_S = (0.5, 2.0)
"""Between the tries of one request. Few, since clients of object stores try again by themselves, and a save that fails is
tried again as a whole."""
ANSWER_S = 300.0
"""Longest wait for one answer of a store."""
FLUSH_S = 1800.0
"""The same when a file that was written is closed: it may go up only then."""


class NoAnswer(TimeoutError):
    """A store did not answer in time. An OSError that is not worth another try at once."""


def write_whole(path: Path, content: bytes) -> None:
    """Under another name first, so that whoever reads `path` finds what was there before or all of `content`. Not synced to
    disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


def retried(action: Callable[[], T]) -> T:
    """What `action` returns, tried again after an OSError, but for a file that is not there and a store that hangs."""
    for wait_s in WAITS_S:
        try:
            return action()
        except (FileNotFoundError, NoAnswer):
            raise
        except OSError:
            time.sleep(wait_s)
    return action()


def in_time(action: Callable[[], T], limit_s: float) -> T:
    """What `action` returns. It may still be under way long after NoAnswer was raised, so it must touch nothing that others
    use."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
            answer.set_exception(error)

    threading.Thread(target=run, name="storage", daemon=True).start()
    if not wait([answer], limit_s).done:
        raise NoAnswer(f"the store gave no answer in {limit_s:g} s")
    return answer.result()


class Answering:
    """A pyarrow filesystem, or a file that it has opened, with the same methods, each of which ends in time. With NoAnswer a
    file is given up: it is closed when that is possible, which nobody waits for."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **keywords: Any) -> Any:
            answer = in_time(lambda: found(*arguments, **keywords), ANSWER_S)
            return Answering(answer) if name.startswith("open_") else answer
        return call

    def __enter__(self) -> "Answering":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, NoAnswer):
            threading.Thread(target=self._real.close, name="storage", daemon=True).start()
        else:
            in_time(self._real.close, FLUSH_S)
