"""A run's metrics in Ray's own, which every node's agent exports: a cluster that is scraped already has them.

Ray takes some 0.1 ms for a value, so they are copied every few seconds by a thread; Ray itself sends them every ten. It puts
`ray_` before each name, and adds `_total` to counters itself.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ray.util.metrics import Counter, Gauge

from raytrain3d.metrics.catalogue import CATALOGUE, PREFIX, RUN, Metric
from raytrain3d.metrics.run_metrics import RunMetrics

INTERVAL_S = 5.0


class RayCopy:
    """Copies when told. Ray knows counters only by what they increase, so what was copied last is kept."""

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics
        self._copied: dict[tuple[str, tuple[str, ...]], float] = {}
        self._gauges = {m.name: Gauge(PREFIX + m.name, m.help, _tags(m)) for m in CATALOGUE if m.type == "gauge"}
        self._counters = {m.name: Counter(PREFIX + m.name, m.help, _tags(m)) for m in CATALOGUE if m.type == "counter"}

    def copy(self) -> None:
        for metric, values in self._metrics.snapshot():
            for labels, value in values.items():
                tags = dict(zip(_tags(metric), (self._metrics.run, *labels), strict=True))
                if metric.type == "gauge":
                    self._gauges[metric.name].set(value, tags)
                    continue
                before = self._copied.get((metric.name, labels))
                self._copied[metric.name, labels] = value
                if before is None or value > before:
                    self._counters[metric.name].inc(value - (before or 0.0), tags)


def _tags(metric: Metric) -> tuple[str, ...]:
    return (RUN, *metric.labels)


@contextmanager
def ray_copy_of(metrics: RunMetrics) -> Iterator[None]:
    """Copied inside, and once more at the end."""
    copy, ended = RayCopy(metrics), threading.Event()

    def keep_copying() -> None:
        while not ended.wait(INTERVAL_S):
            copy.copy()

    thread = threading.Thread(target=keep_copying, name="ray-metrics", daemon=True)
    copy.copy()
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        copy.copy()
