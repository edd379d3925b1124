"""How many failures a run survives, and how long it waits before it tries again. Pure."""

from typing import Literal

from raytrain3d.config import RecoveryConfig
from raytrain3d.plan.table import counted

LONGEST_WAIT_S = 60.0
Cause = Literal["deaths", "preemptions", "errors"]
"""Keys of the configuration section `recovery`."""


class Budget:
    """Failures of one run, each cause counted apart."""

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._times: dict[Cause, list[float]] = {"deaths": [], "preemptions": [], "errors": []}
        self._in_a_row, self._step = 0, -1

    def spend(self, cause: Cause, step: int, now: float) -> str | None:
        """Count a failure after `step` was done; `now` in seconds. Returns why the run ends, if it does."""
        config = self._config
        limit = {"deaths": config.deaths, "preemptions": config.preemptions, "errors": config.errors}[cause]
        times = self._times[cause] = [t for t in self._times[cause] if now - t < self._config.window_s] + [now]
        self._in_a_row = self._in_a_row + 1 if step == self._step else 1
        self._step = step
        if len(times) <= limit:
            return None
        return (f"recovery.{cause} is {limit}: {counted(len(times), 'failure')} of this kind within "
                f"{self._config.window_s:g} s end the run")

    @property
    def wait_s(self) -> float:
        """Before the next try: nothing at first, then longer with every failure without a step between."""
        tries = self._in_a_row - 2
        return min(self._config.backoff_s * 2.0**tries, LONGEST_WAIT_S) if tries >= 0 else 0.0
