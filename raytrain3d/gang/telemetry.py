"""Metrics of a job, published as long as it runs: an endpoint on the driver, and a copy in Ray's own metrics."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from raytrain3d.config import JobConfig
from raytrain3d.gang.launchers import Launcher
from raytrain3d.metrics.exporter import Exporter
from raytrain3d.metrics.journal import Listener
from raytrain3d.metrics.run_metrics import RunMetrics
from raytrain3d.metrics.tensorboard import TensorBoardFile
from raytrain3d.plan.plan import Plan

ANY_ADDRESS = ("0.0.0.0", "::")


@contextmanager
def published(config: JobConfig, plan: Plan, launcher: Launcher, records: Path,
              say: Callable[[str], None]) -> Iterator[Sequence[Listener]]:
    """Whoever must hear the journal's lines for it. records: where they lie. ConfigError when the endpoint cannot be
    opened."""
    wanted = config.metrics
    metrics = RunMetrics(config, plan)
    with ExitStack() as stack:
        if wanted.port is not None:
            host = launcher.address if wanted.address in ANY_ADDRESS else wanted.address
            exporter = Exporter(metrics, address=wanted.address, port=wanted.port, host=host, directory=_targets(config))
            stack.callback(exporter.close)
            say(f"metrics    {exporter.url}")
        if wanted.ray:
            stack.enter_context(launcher.copy_of(metrics))
        listeners: list[Listener] = [metrics]
        if wanted.tensorboard:
            file = TensorBoardFile(records / "tensorboard")
            stack.callback(file.close)
            listeners.append(file)
        yield listeners


def _targets(config: JobConfig) -> Path | None:
    if config.metrics.targets is not None:
        return Path(config.metrics.targets)
    return None if "://" in config.run.directory else Path(config.run.directory)
