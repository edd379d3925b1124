"""Metrics of a run for Prometheus: an HTTP endpoint on the driver, and the file by which Prometheus finds it.

A scrape is answered by a thread of its own from a snapshot, so the driver's loop does not wait for it.
"""

import errno
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from raytrain3d.errors import ConfigError
from raytrain3d.files import write_whole
from raytrain3d.metrics.catalogue import PREFIX, RUN
from raytrain3d.metrics.run_metrics import RunMetrics

TRIED_PORTS = 100
CLOSE_S = 0.1
"""Longest time that the server takes to notice that it is closed."""
TARGETS = ".targets.json"
"""End of the name of a service-discovery file; a prometheus.yml names all of them with `*.targets.json`."""


class _RunCollector(Collector):
    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        run = self._metrics.run
        for metric, values in self._metrics.snapshot():
            kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
            family = kind(PREFIX + metric.name, metric.help, labels=(RUN, *metric.labels))
            for labels, value in values.items():
                family.add_metric((run, *labels), value)
            yield family


def registry_of(metrics: RunMetrics) -> CollectorRegistry:
    """A registry with the run's metrics alone."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RunCollector(metrics))
    return registry


class Exporter:
    """Serves metrics at `http://ADDRESS:PORT/metrics` until it is closed. The port is `port`, or the next free one.

    directory: where `RUN.targets.json` tells Prometheus of it, as reachable at `host`; None: nowhere. Both are gone when it
    is closed, and with them the run's series. ConfigError when it cannot listen.
    """

    def __init__(self, metrics: RunMetrics, *, address: str, port: int, host: str, directory: Path | None) -> None:
        self._server = _server(registry_of(metrics), address, port)
        self.port = self._server.server_port
        self._thread = Thread(target=self._server.serve_forever, args=(CLOSE_S,), name="metrics", daemon=True)
        self._thread.start()
        self.url = f"http://{_bracketed(host)}:{self.port}/metrics"
        self._targets = None if directory is None else directory / f"{metrics.run}{TARGETS}"
        if self._targets is not None:
            target = [{"targets": [f"{_bracketed(host)}:{self.port}"], "labels": {}}]
            self._targets.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._targets, (json.dumps(target) + "\n").encode())  # read whenever it changes

    def close(self) -> None:
        if self._targets is not None:
            self._targets.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingWSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name that the base class gives it
        """Nobody wants a line for every scrape."""


def _server(registry: CollectorRegistry, address: str, first: int) -> ThreadingWSGIServer:
    kind = _Server6 if ":" in address else _Server
    for port in range(first, first + TRIED_PORTS) if first else (0,):
        try:
            return make_server(address, port, make_wsgi_app(registry), kind, _QuietHandler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise ConfigError(f"metrics.address is {address!r}: port {port} cannot be opened there ({error.strerror}); name "
                              "an address of the driver's node, such as 127.0.0.1 or 0.0.0.0") from None
    raise ConfigError(f"metrics.port is {first}: it and the next {TRIED_PORTS - 1} ports are taken on {address}; name "
                      "another one, or null for no endpoint")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
