"""Steps and events of a job, shown to the person and recorded in the run directory."""

from collections.abc import Sequence
from typing import Any

from raytrain3d.config import SlowdownConfig
from raytrain3d.metrics.progress import Progress
from raytrain3d.metrics.records import Records
from raytrain3d.metrics.summary import StepSummary


class Journal:
    """Both at once, so that what was shown is what was recorded.

    slowdowns: of `debug.slowdown`. Told where they begin and end, so that nobody takes them for the machine's.
    """

    def __init__(self, progress: Progress, records: Records, slowdowns: Sequence[SlowdownConfig] = ()) -> None:
        self._progress, self._records, self._slowdowns = progress, records, slowdowns
        self._slowed: list[SlowdownConfig] = []

    def step(self, summary: StepSummary, **values: Any) -> None:
        """values: more for the step's line of metrics.jsonl."""
        self._tell_slowdowns(summary.step)
        self._records.step(summary, values)
        self._progress.step(summary)

    def _tell_slowdowns(self, step: int) -> None:
        now = [slow for slow in self._slowdowns if slow.is_on(step)]
        for slow in (slow for slow in now if slow not in self._slowed):
            self.event("slowdown on purpose", step, f"debug.slowdown: from step {step} on {slow.subject} takes "
                       f"{slow.factor:g} times as long, on purpose")
        for slow in (slow for slow in self._slowed if slow not in now):
            self.event("end of slowdown", step, f"debug.slowdown: from step {step} on {slow.subject} is left in peace")
        self._slowed = now

    def event(self, kind: str, step: int, text: str, **values: Any) -> None:
        """`kind` and `values` are for programs that read events.jsonl, `text` for people."""
        self._records.event(kind, step, text, values)
        self._progress.say(text)

    def note(self, kind: str, step: int, text: str, **values: Any) -> None:
        """An event that is recorded only, not shown."""
        self._records.event(kind, step, text, values)

    def failure(self, step: int, text: str) -> None:
        """What ended the job. Only recorded: it is raised, too, and shown by whoever catches it."""
        self._records.event("failed", step, text, {})

    def rewind(self, step: int) -> None:
        """The run goes on after `step`."""
        self._records.rewind(step)
