"""The process of one local rank: `python -m raytrain3d.gang.child FD [--warm]`, where FD is its end of a socket pair. A warm
one is a spare: it loads torch before it is told which rank it is.

The main thread trains; a second one reads requests, answers asks and passes calls on. When the driver's end closes, for
whatever reason, the process ends.
"""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from raytrain3d.gang.worker import RankSettings, RankWorker, warm_up

Request = tuple[int, bool, Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""Number, whether it is a call, method of RankWorker, arguments."""


class Child:
    """Serves one worker over one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        settings: RankSettings = connection.recv()
        settings.open_log()
        self._worker = RankWorker(settings)
        self._calls: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Run calls until the driver is gone; does not return."""
        threading.Thread(target=self._listen, name="control", daemon=True).start()
        while True:
            number, _, method, arguments, keywords = self._calls.get()
            self._answer(number, self._worker.run(method, *arguments, **keywords))

    def _listen(self) -> None:
        try:
            while True:
                request: Request = self._connection.recv()
                if request[1]:
                    self._calls.put(request)
                else:
                    number, _, method, arguments, keywords = request
                    self._answer(number, method(self._worker, *arguments, **keywords))
        except (EOFError, OSError):
            pass  # the driver is gone
        finally:
            os._exit(0)

    def _answer(self, number: int, outcome: object) -> None:
        with self._sending:
            self._connection.send((number, outcome))


def main() -> None:
    # A terminal's Ctrl-C and a service manager's SIGTERM reach every process of the group. The driver decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--warm" in sys.argv[2:]:
        warm_up()
    Child(Connection(int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
