"""Jobs for the driver's tests: real data and configuration, fake trainers, and a driver in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from fake_trainer import FakeTrainer

from raytrain3d.config import (CheckpointConfig, DataConfig, EvaluateConfig, JobConfig, MeshConfig, ModelConfig,
                               PlacementConfig, RebalanceConfig, RecoveryConfig, RunConfig, TrainConfig)
from raytrain3d.data.prepare import prepare
from raytrain3d.gang.run import run_job
from raytrain3d.load import dump, load

SUPPORT = Path(__file__).parent


def fake_job(directory: Path, *, name: str = "job", steps: int = 12, mesh: tuple[int, int, int] = (1, 2, 1),
             hundredths: int = 2, **sections: Any) -> JobConfig:
    """A job on `mesh` whose steps take `hundredths` of a second, which the first failure ends. sections: keys of evaluate,
    checkpoint and recovery."""
    data = directory / "data"
    if not data.exists():
        for file in "ab":
            (directory / f"{file}.txt").write_text(f"some text {file} " * 30)
        prepare([str(directory / "*.txt")], str(data), "bytes", 0.5)
    return JobConfig(
        run=RunConfig(name=name, directory=str(directory / "runs")), data=DataConfig(path=str(data)),
        model=ModelConfig(vocabulary=257, hidden=8, blocks=2, heads=2, feed_forward=16),
        mesh=MeshConfig(data=mesh[0], pipeline=mesh[1], tensor=mesh[2]),
        train=TrainConfig(steps=steps, global_batch=4, sequence=16, seed=hundredths, lease=50),
        evaluate=EvaluateConfig(interval=sections.get("evaluate")),
        checkpoint=CheckpointConfig(interval=sections.get("checkpoint"), resume=sections.get("resume", True)),
        rebalance=RebalanceConfig(mode="off"),
        recovery=RecoveryConfig(deaths=sections.get("deaths", 0), errors=sections.get("errors", 0), backoff_s=0.1,
                                spares=sections.get("spares", 0)),
        placement=PlacementConfig(device="cpu", cpus_per_rank=sections.get("cpus_per_rank", 0.2),
                                  wait_s=sections.get("wait_s", 60)))


def with_steps(config: JobConfig, steps: int) -> JobConfig:
    return replace(config, train=replace(config.train, steps=steps))


class Driver:
    """A driver in its own process."""

    def __init__(self, config: JobConfig, launcher: str, address: str | None = None) -> None:
        directory = Path(config.run.directory)
        directory.mkdir(parents=True, exist_ok=True)
        file, self._output = directory / f"{config.run.name}.yaml", directory / f"{config.run.name}.out"
        file.write_text(dump(config))
        path = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1]), os.environ.get("PYTHONPATH", "")])
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(file), launcher, *([address] if address else [])],
                stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path})

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str, limit_s: float = 40) -> None:
        """Until it has printed `text`."""
        wait_until(lambda: text in self.output, limit_s, lambda: f"{text!r} is not in\n{self.output}")

    def ranks(self) -> list[psutil.Process]:
        """Processes of its local ranks, in rank order."""
        return sorted((child for child in psutil.Process(self.process.pid).children()
                       if "raytrain3d.gang.child" in child.cmdline()), key=lambda child: child.pid)

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def wait_until(true: Callable[[], bool], limit_s: float, otherwise: Callable[[], str] = lambda: "") -> float:
    """Seconds until true() holds; fails after `limit_s`."""
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < limit_s, otherwise()
        time.sleep(0.05)
    return time.monotonic() - start


if __name__ == "__main__":
    sys.exit(run_job(load(sys.argv[1]), launcher=sys.argv[2], address=sys.argv[3] if len(sys.argv) > 3 else None,
                     trainer=FakeTrainer))
