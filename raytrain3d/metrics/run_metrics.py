"""The present values of all metrics of one run. The driver's loop writes them, scrapes read them from other threads."""

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from raytrain3d.config import JobConfig
from raytrain3d.metrics.catalogue import CATALOGUE, Metric
from raytrain3d.plan.plan import Plan

CAUSES = ("deaths", "preemptions", "errors")
"""Values of a failure's `cause`."""
Values = dict[tuple[str, ...], float]
"""By label values, without the run."""


class RunMetrics:
    """Takes each record of metrics.jsonl and events.jsonl as it is written.

    Counters have a value from the start, so that the first increase is seen as one.
    """

    def __init__(self, config: JobConfig, plan: Plan) -> None:
        self.run = config.run.name
        self._lock = threading.Lock()
        self._values: dict[str, Values] = {metric.name: {} for metric in CATALOGUE}
        self._last_step = 0
        for metric in CATALOGUE:
            self._start(metric, config, plan)
        self._values["last_checkpoint_timestamp_seconds"] = {(): time.time()}

    def _start(self, metric: Metric, config: JobConfig, plan: Plan) -> None:
        values = self._values[metric.name]
        match metric.file, metric.type:
            case "plan.json", _:
                values.update(metric.read(plan))
            case "config.yaml", _:
                values.update(metric.read(config))
            case _, "counter":
                labels: dict[tuple[str, ...], list[tuple[str, ...]]] = {
                    (): [()], ("cause",): [(cause,) for cause in CAUSES],
                    ("pipeline_rank",): [(str(rank),) for rank in range(plan.mesh.pipeline)]}
                values.update(dict.fromkeys(labels[metric.labels], 0.0))

    def step(self, record: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        with self._lock:
            is_new = record["step"] > self._last_step
            self._last_step = max(self._last_step, record["step"])
            for metric in CATALOGUE:
                if metric.file != "metrics.jsonl":
                    continue
                if metric.name == "steps":
                    self._values["steps"][()] += is_new
                elif is_new or metric.name != "tokens":
                    self._take(metric, record)

    def event(self, record: Mapping[str, Any]) -> None:
        """A line of events.jsonl."""
        with self._lock:
            for metric in CATALOGUE:
                if metric.event and metric.event == record["event"]:
                    self._take(metric, record)

    def _take(self, metric: Metric, record: Mapping[str, Any]) -> None:
        values = self._values[metric.name]
        read = dict(metric.read(record))
        if metric.type == "gauge":
            values.clear()
            values.update(read)
        else:
            for labels, value in read.items():
                values[labels] = max(values[labels], value) if metric.is_sum else values.get(labels, 0.0) + value

    def snapshot(self) -> list[tuple[Metric, Values]]:
        """Metrics that have a value by now, as they are at one moment."""
        with self._lock:
            return [(metric, dict(values)) for metric in CATALOGUE if (values := self._values[metric.name])]

    def series(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """(whole name, labels, value) of the same."""
        for metric, values in self.snapshot():
            for labels, value in values.items():
                yield metric.full_name, {"run": self.run, **dict(zip(metric.labels, labels, strict=True))}, value
