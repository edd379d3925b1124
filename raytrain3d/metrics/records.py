"""JSON lines of a run directory: metrics.jsonl has a line per step, events.jsonl one per event."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raytrain3d.metrics.summary import StepSummary


class Records:
    """Appends to both files; what was appended is seen by readers at once."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._metrics_path = directory / "metrics.jsonl"
        self._metrics = self._metrics_path.open("a", buffering=1)
        self._events = (directory / "events.jsonl").open("a", buffering=1)

    def rewind(self, step: int) -> None:
        """The run goes on after `step`: lines of later steps, which a resumed run does again, are dropped."""
        self._metrics.close()
        kept = [line for line in self._metrics_path.read_text().splitlines() if _step_of(line) <= step]
        temporary = self._metrics_path.with_suffix(".partial")
        temporary.write_text("".join(line + "\n" for line in kept))
        temporary.replace(self._metrics_path)
        self._metrics = self._metrics_path.open("a", buffering=1)

    def step(self, summary: StepSummary, values: Mapping[str, Any] | None = None) -> None:
        _append(self._metrics, {"time": time.time()} | summary.to_record() | dict(values or {}))

    def event(self, kind: str, step: int, text: str, values: dict[str, Any]) -> None:
        _append(self._events, {"time": time.time(), "event": kind, "step": step, "text": text} | values)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


def _append(file: Any, record: dict[str, Any]) -> None:
    file.write(json.dumps(record) + "\n")


def _step_of(line: str) -> float:
    """Infinite for what is not whole: the last line of a run that was killed."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
