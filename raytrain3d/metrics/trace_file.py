"""Timelines that ranks write down: `traces/rank-0003.jsonl` in the run directory, one line for each recorded step."""

import json
from pathlib import Path

from raytrain3d.train.report import StepReport

TRACES = "traces"
"""Directory of trace files inside a run directory."""


def trace_path(run_directory: Path, rank: int) -> Path:
    return run_directory / TRACES / f"rank-{rank:04d}.jsonl"


def append_trace(run_directory: Path, report: StepReport) -> None:
    """Add the timeline of a recorded step; nothing for a step without one."""
    timeline = report.timeline
    if timeline is None:
        return
    path = trace_path(run_directory, report.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"step": report.step, "rank": report.rank, "start": timeline.start, "seconds": timeline.seconds,
            "spans": timeline.spans}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
