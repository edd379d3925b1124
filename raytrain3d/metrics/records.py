"""JSON lines of a run directory: metrics.jsonl has a line per step, events.jsonl one per event."""

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raytrain3d.config import JobConfig
from raytrain3d.files import write_whole
from raytrain3d.metrics.summary import StepSummary
from raytrain3d.plan.cost import LayerCost, layer_costs
from raytrain3d.plan.measured import WINDOW
from raytrain3d.plan.params import model_spec
from raytrain3d.plan.recompute import repeated_share
from raytrain3d.plan.separate import median_cost

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
Record = dict[str, Any]
"""A line of either file."""


class Records:
    """Appends to both files; what was appended is seen by readers at once."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._metrics_path = directory / METRICS
        self._metrics = self._metrics_path.open("a", buffering=1)
        self._events = (directory / EVENTS).open("a", buffering=1)

    def rewind(self, step: int) -> None:
        """The run goes on after `step`: lines of later steps, which a resumed run does again, are dropped."""
        self._metrics.close()
        kept = [line for line in self._metrics_path.read_text().splitlines() if _step_of(line) <= step]
        write_whole(self._metrics_path, "".join(line + "\n" for line in kept).encode())
        self._metrics = self._metrics_path.open("a", buffering=1)

    def step(self, summary: StepSummary, values: Mapping[str, Any] | None = None) -> Record:
        """Returns what was written."""
        return _append(self._metrics, {"time": time.time()} | summary.to_record() | dict(values or {}))

    def event(self, kind: str, step: int, text: str, values: dict[str, Any]) -> Record:
        """Returns what was written."""
        return _append(self._events, {"time": time.time(), "event": kind, "step": step, "text": text} | values)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


def _append(file: Any, record: Record) -> Record:
    file.write(json.dumps(record) + "\n")
    return record


def _step_of(line: str) -> float:
    """Infinite for what is not whole: the last line of a run that was killed."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def measured_costs(config: JobConfig) -> tuple[LayerCost, ...] | None:
    """For pipeline.partition `measured`: seconds of a step by layer, medians of the last steps that earlier runs of this
    directory have recorded. None when there are none, or another partition is asked for.

    A backward that was measured whole is divided as FLOPs are.
    """
    path = Path(config.run.directory) / config.run.name / METRICS
    if config.pipeline.partition != "measured" or not path.is_file():
        return None
    with path.open() as file:
        steps = [costs for line in deque(file, maxlen=WINDOW) for costs in _costs(line)]
    spec = model_spec(config.model, config.train, config.mesh.tensor)
    flops = [cost.repeating(repeated_share(config, layer, 0))
             for cost, layer in zip(layer_costs(config, spec), spec.layers, strict=True)]
    seen = [[step[layer] for step in steps if layer in step] for layer in range(len(flops))]
    if not all(seen):
        return None
    return tuple(_divided(median_cost(costs), usual) for costs, usual in zip(seen, flops, strict=True))


def _costs(line: str) -> Iterator[dict[int, LayerCost]]:
    """Of a step by layer; nothing from a line that is not whole."""
    try:
        record = json.loads(line)
        forward, backward, weight = (record[f"layer_{kind}_s"] for kind in ("forward", "backward", "weight"))
        yield {int(layer): LayerCost(forward=seconds, backward_input=backward.get(layer, 0.0),
                                     backward_weight=weight.get(layer, 0.0)) for layer, seconds in forward.items()}
    except (ValueError, KeyError, TypeError):
        return


def _divided(cost: LayerCost, usual: LayerCost) -> LayerCost:
    if cost.backward_weight or not usual.backward_weight:
        return cost
    share = usual.backward_weight / usual.backward
    return LayerCost(forward=cost.forward, backward_input=(1 - share) * cost.backward, backward_weight=share * cost.backward)
