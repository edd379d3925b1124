"""A run's metrics in Ray's own, which every node's agent exports: a cluster that is scraped already has them.

Ray takes some 0.1 ms for a value, so they are copied every few seconds by a thread; Ray itself sends them every ten. It puts
`ray_` before each name. Counters are copied as gauges of the same name: a counter of Ray takes no zero, so that its first
increase would not be seen as one, and outlives the process that it is of.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ray.util.metrics import Gauge

from raytrain3d.metrics.catalogue import CATALOGUE, RUN
from raytrain3d.metrics.run_metrics import RunMetrics

logger = logging.getLogger(__name__)
INTERVAL_S = 5.0


class RayCopy:
    """Copies when told."""

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics
        self._gauges = {metric.name: Gauge(metric.full_name, metric.help, (RUN, *metric.labels)) for metric in CATALOGUE}

    def copy(self) -> None:
        for metric, values in self._metrics.snapshot():
            for labels, value in values.items():
                tags = dict(zip((RUN, *metric.labels), (self._metrics.run, *labels), strict=True))
                self._gauges[metric.name].set(value, tags)


@contextmanager
def ray_copy_of(metrics: RunMetrics) -> Iterator[None]:
    """Copied inside, at the beginning and at the end, too. What Ray refuses is logged: no run ends for its metrics."""
    ended = threading.Event()

    def keep_copying() -> None:
        try:
            copy = RayCopy(metrics)
            copy.copy()
            while not ended.wait(INTERVAL_S):
                copy.copy()
            copy.copy()
        except Exception:
            logger.exception("the run's metrics are no longer copied to Ray's")

    thread = threading.Thread(target=keep_copying, name="ray-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
