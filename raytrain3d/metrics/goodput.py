"""Goodput: the share of wall time that went into steps which counted. The rest went into saving, evaluating, steps that had
to be done again, and recoveries."""

import time


class Goodput:
    """Of one driver's run; `begin` starts the clock."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._seconds: list[tuple[int, float]] = []
        self._useful = 0.0

    def begin(self) -> None:
        """The first lease begins; later calls do nothing."""
        if self._start is None:
            self._start = time.monotonic()

    def count(self, step: int, seconds: float) -> None:
        """A step was done."""
        self._seconds.append((step, seconds))
        self._useful += seconds

    def rewind(self, step: int) -> None:
        """The run goes on after `step`: what was done beyond it does not count."""
        while self._seconds and self._seconds[-1][0] > step:
            self._useful -= self._seconds.pop()[1]

    @property
    def share(self) -> float | None:
        """None before anything was done."""
        if self._start is None or not self._seconds:
            return None
        return min(1.0, self._useful / max(time.monotonic() - self._start, 1e-9))
