"""A run directory as reports read it: the lines of metrics.jsonl and events.jsonl, the plan, the configuration."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytrain3d.errors import ConfigError
from raytrain3d.metrics.records import EVENTS, METRICS, Record
from raytrain3d.metrics.trace import read_plan
from raytrain3d.plan.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """Of one run, with at least one step."""

    directory: Path
    plan: Plan
    """As it is by now: its split is the last one."""
    steps: tuple[Record, ...]
    """By step, each once."""
    events: tuple[Record, ...]
    """In the order of time."""

    def of_kind(self, *kinds: str) -> list[Record]:
        """Events of these kinds."""
        return [event for event in self.events if event["event"] in kinds]

    def layer_seconds(self, steps: tuple[Record, ...]) -> list[tuple[float, float]]:
        """(forward, backward) seconds of a step by layer, means over `steps`."""
        layers = range(self.plan.num_layers)
        return [(_mean(steps, layer, "forward"), _mean(steps, layer, "backward") + _mean(steps, layer, "weight"))
                for layer in layers]

    def splits(self) -> list[tuple[tuple[int, ...], tuple[Record, ...]]]:
        """(layers of each stage, steps done under it), for each time that the split changed."""
        found: list[tuple[tuple[int, ...], list[Record]]] = []
        for record in self.steps:
            stages = tuple(record["stages"])
            if not found or found[-1][0] != stages:
                found.append((stages, []))
            found[-1][1].append(record)
        return [(stages, tuple(records)) for stages, records in found]


def read_run(directory: Path) -> RunFiles:
    """ConfigError when it is no run directory, or no step was done yet."""
    plan = read_plan(directory)
    steps = {record["step"]: record for record in _lines(directory / METRICS) if "stages" in record}
    if not steps:
        raise ConfigError(f"{str(directory / METRICS)!r} has no step that a report can be made of: let the run do one first")
    return RunFiles(directory=directory, plan=plan, steps=tuple(steps[step] for step in sorted(steps)),
                    events=tuple(_lines(directory / EVENTS)))


def _lines(path: Path) -> Iterator[Record]:
    """Whole lines; the last one of a run that was killed may not be."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            record: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            yield record


def _mean(steps: tuple[Record, ...], layer: int, kind: str) -> float:
    """Of the steps that have measured it; 0 if none has."""
    values = [each[f"layer_{kind}_s"][str(layer)] for each in steps if str(layer) in each[f"layer_{kind}_s"]]
    return sum(values) / len(values) if values else 0.0
