"""A wish to stop, from a signal or from the mailbox. Handlers only set a flag; the controller's loop reads it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequested(Exception):
    """Raised out of a wait that may be given up, when nothing needs saving."""


class StopFlag:
    """Set once; the first reason stays."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """`SIGTERM`, `SIGINT`, or who asked; absent while nobody has."""
        self.exit_code = 0
        """What the driver exits with when it stops for this: 128 + signal, 0 when asked through the mailbox."""

    def ask(self, reason: str, exit_code: int = 0) -> None:
        if self.reason is None:
            self.reason, self.exit_code = reason, exit_code

    def check(self) -> None:
        """Raises StopRequested if somebody asked."""
        if self.reason is not None:
            raise StopRequested(self.reason)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT set the flag; a second SIGINT raises KeyboardInterrupt. Enter after `ray.init`, which sets
        handlers of its own. Elsewhere than in the main thread, where Python allows no handlers, nothing is set."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number).name, 128 + number)
