"""Steps and events of a job, shown to the person and recorded in the run directory."""

from collections.abc import Sequence
from typing import Any, Protocol

from raytrain3d.config import SlowdownConfig
from raytrain3d.metrics.progress import Progress
from raytrain3d.metrics.records import Record, Records
from raytrain3d.metrics.summary import StepSummary


class Listener(Protocol):
    """Gets every line of metrics.jsonl and events.jsonl as it was written."""

    def step(self, record: Record) -> None: ...

    def event(self, record: Record) -> None: ...


class Journal:
    """All at once, so that what was shown and exported is what was recorded.

    slowdowns: of `debug.slowdown`. Told where they begin and end, so that nobody takes them for the machine's.
    """

    def __init__(self, progress: Progress, records: Records, slowdowns: Sequence[SlowdownConfig] = (),
                 listeners: Sequence[Listener] = ()) -> None:
        self._progress, self._records, self._slowdowns, self._listeners = progress, records, slowdowns, listeners
        self._slowed: list[SlowdownConfig] = []

    def step(self, summary: StepSummary, **values: Any) -> None:
        """values: more for the step's line of metrics.jsonl."""
        self._tell_slowdowns(summary.step)
        record = self._records.step(summary, values)
        for listener in self._listeners:
            listener.step(record)
        self._progress.step(summary, values.get("mfu"))

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
        self.note(kind, step, text, **values)
        self._progress.say(text)

    def note(self, kind: str, step: int, text: str, **values: Any) -> None:
        """An event that is recorded only, not shown."""
        record = self._records.event(kind, step, text, values)
        for listener in self._listeners:
            listener.event(record)

    def failure(self, step: int, text: str) -> None:
        """What ended the job. Only recorded: it is raised, too, and shown by whoever catches it."""
        self.note("failed", step, text)

    def rewind(self, step: int) -> None:
        """The run goes on after `step`."""
        self._records.rewind(step)
