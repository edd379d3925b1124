"""Timelines as trace events, which Perfetto (https://ui.perfetto.dev) and chrome://tracing show: a process for each replica,
a thread for each rank."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from raytrain3d.plan.grid import parse_op

MICROSECONDS = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Track:
    """What one rank did."""

    replica: int
    rank: int
    name: str
    spans: tuple[tuple[str, float, float], ...]
    """(op, start, end), in seconds from one moment for all tracks."""


def trace_events(tracks: Iterable[Track]) -> str:
    """JSON text of a trace file."""
    events = [event for track in tracks for event in (*_names(track), *_spans(track))]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _names(track: Track) -> Iterator[dict[str, Any]]:
    for what, name in (("process_name", f"replica {track.replica}"), ("thread_name", track.name)):
        yield {"ph": "M", "name": what, "pid": track.replica, "tid": track.rank, "args": {"name": name}}


def _spans(track: Track) -> Iterator[dict[str, Any]]:
    for text, start, end in track.spans:
        op = parse_op(text)
        yield {"ph": "X", "name": text, "cat": op.kind.name.lower(), "pid": track.replica, "tid": track.rank,
               "ts": round(start * MICROSECONDS, 3), "dur": round((end - start) * MICROSECONDS, 3),
               "args": {"stage": op.stage, "micro_batch": op.micro_batch}}
