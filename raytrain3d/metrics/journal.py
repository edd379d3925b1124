"""Steps and events of a job, shown to the person and recorded in the run directory."""

from typing import Any

from raytrain3d.metrics.progress import Progress
from raytrain3d.metrics.records import Records
from raytrain3d.metrics.summary import StepSummary


class Journal:
    """Both at once, so that what was shown is what was recorded."""

    def __init__(self, progress: Progress, records: Records) -> None:
        self._progress, self._records = progress, records

    def step(self, summary: StepSummary, **values: Any) -> None:
        """values: more for the step's line of metrics.jsonl."""
        self._records.step(summary, values)
        self._progress.step(summary)

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
