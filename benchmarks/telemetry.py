"""What seeing a run costs: parts of benchmarks/driver.py. The driver's work on a step, the copy in Ray's metrics, and
scrapes of a large run while steps go on."""

import io
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, RunConfig, TrainConfig
from raytrain3d.gang.ray_metrics import INTERVAL_S, RayCopy
from raytrain3d.metrics.expected import Expected
from raytrain3d.metrics.exporter import Exporter
from raytrain3d.metrics.journal import Journal
from raytrain3d.metrics.progress import PlainProgress
from raytrain3d.metrics.records import Records
from raytrain3d.metrics.run_metrics import RunMetrics
from raytrain3d.metrics.summary import summarize
from raytrain3d.parallel.clock import HostClock
from raytrain3d.plan.plan import make_plan
from raytrain3d.train.report import StepReport

STAGES, REPLICAS = 64, 16
SCRAPES = 20
MARKS = 100_000


def mark_seconds() -> float:
    """Of one mark on a host's clock, kept in a list as a rank keeps it."""
    clock, start = HostClock(), time.perf_counter()
    _ = [clock.mark() for _ in range(MARKS)]
    return (time.perf_counter() - start) / MARKS


class WatchedRun:
    """The driver's part in a step: reports become a line that is written, shown and exported."""

    def __init__(self, config: JobConfig, directory: Path) -> None:
        self.plan = make_plan(config)
        self.metrics = RunMetrics(config, self.plan)
        self._records, self._expected = Records(directory), Expected(config, self.plan)
        self._journal = Journal(PlainProgress(io.StringIO(), config.train.steps), self._records, (), (self.metrics,))
        self._reports = [self._report(rank) for rank in range(self.plan.mesh.size)]

    def _report(self, rank: int) -> StepReport:
        seconds = dict.fromkeys(self.plan.layers_of_rank(self.plan.mesh.coordinate(rank).pipeline), 0.01)
        return StepReport(step=0, rank=rank, loss=2.0, tokens=4096, gradient_norm=1.0, learning_rate=1e-3, seconds=0.1,
                          compute_s=0.06, data_wait_s=0.001, receive_wait_s=0.02, reduce_wait_s=0.005, commit_wait_s=0.005,
                          optimizer_s=0.005, memory_bytes=2**30, layer_forward_s=seconds, layer_backward_s=seconds)

    def step(self, number: int) -> float:
        """Seconds of it."""
        reports: Sequence[StepReport] = [replace(report, step=number) for report in self._reports]
        start = time.perf_counter()
        summary = summarize(reports, self.plan.mesh)
        self._journal.step(summary, goodput=0.9, **self._expected.values(summary, self.plan))
        return time.perf_counter() - start

    def close(self) -> None:
        self._records.close()


def driver_step_seconds(config: JobConfig, steps: int = 300) -> float:
    """Mean seconds of the driver on a step of the job."""
    with tempfile.TemporaryDirectory() as scratch:
        run = WatchedRun(config, Path(scratch))
        seconds = [run.step(number) for number in range(1, steps + 1)]
        run.close()
    return statistics.mean(seconds)


def ray_copy_share(config: JobConfig) -> float:
    """Share of a core that the copy in Ray's metrics takes. Ray must run."""
    with tempfile.TemporaryDirectory() as scratch:
        run = WatchedRun(config, Path(scratch))
        run.step(1)
        copy, seconds = RayCopy(run.metrics), []
        for _ in range(5):
            start = time.perf_counter()
            copy.copy()
            seconds.append(time.perf_counter() - start)
        run.close()
    return statistics.median(seconds) / INTERVAL_S


def scrape_figures() -> dict[str, float]:
    """Scrapes of 64 stages x 16 replicas while the driver does a step every 0.1 s: median milliseconds of one, the size of
    its text, and milliseconds of the driver's step, with scrapes beside it and without."""
    config = JobConfig(
        run=RunConfig(name="large"), data=DataConfig(path="none"), mesh=MeshConfig(data=REPLICAS, pipeline=STAGES),
        model=ModelConfig(vocabulary=256, hidden=16, blocks=STAGES, heads=2, feed_forward=32),
        train=TrainConfig(steps=10_000, global_batch=2 * REPLICAS * STAGES, sequence=16))
    with tempfile.TemporaryDirectory() as scratch:
        run = WatchedRun(config, Path(scratch))
        alone = [run.step(number) for number in range(1, 11)]
        exporter = Exporter(run.metrics, address="127.0.0.1", port=0, host="127.0.0.1", directory=None)
        beside: list[float] = []
        ended = threading.Event()

        def go_on() -> None:
            number = 10
            while not ended.wait(0.1):
                number += 1
                beside.append(run.step(number))

        loop = threading.Thread(target=go_on)
        loop.start()
        times, size = [], 0
        for _ in range(SCRAPES):
            start = time.perf_counter()
            with urllib.request.urlopen(exporter.url, timeout=30) as answer:
                size = len(answer.read())
            times.append(time.perf_counter() - start)
        ended.set()
        loop.join()
        exporter.close()
        run.close()
    return {"scrape_ms": round(1e3 * statistics.median(times), 1), "scrape_kb": round(size / 1e3, 1),
            "large_step_ms": round(1e3 * statistics.median(alone), 1),
            "large_step_ms_while_scraped": round(1e3 * statistics.median(beside), 1) if beside else 0.0}
