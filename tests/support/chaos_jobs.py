"""Small real jobs on local processes that end bit-equal or not, with trainers that follow a plan of faults."""

import io
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from chaos import ChaosTrainer
from safetensors import safe_open

from raytrain3d.checkpoint.store import step_directory
from raytrain3d.config import (CheckpointConfig, DataConfig, EvaluateConfig, JobConfig, MeshConfig, ModelConfig,
                               PipelineConfig, PlacementConfig, RebalanceConfig, RecoveryConfig, RunConfig, TrainConfig)
from raytrain3d.data.prepare import prepare
from raytrain3d.gang.run import run_job
from raytrain3d.gang.mailbox import ask_socket

STEPS, SAVE = 40, 6


def make_job(directory: Path, name: str, mesh: tuple[int, int, int], **train: Any) -> JobConfig:
    return JobConfig(
        run=RunConfig(name=name, directory=str(directory / name)), data=DataConfig(path=str(directory / "data")),
        model=ModelConfig(vocabulary=257, hidden=16, blocks=4, heads=2, feed_forward=32, dropout=0.1),
        mesh=MeshConfig(data=mesh[0], pipeline=mesh[1], tensor=mesh[2]), pipeline=PipelineConfig(layers=(4, 2)),
        train=TrainConfig(**{"steps": STEPS, "global_batch": 4, "sequence": 32, "lease": 4, **train}),
        evaluate=EvaluateConfig(interval=20, samples=4), checkpoint=CheckpointConfig(interval=SAVE, keep=None),
        rebalance=RebalanceConfig(mode="off"), recovery=RecoveryConfig(backoff_s=0.1),
        placement=PlacementConfig(device="cpu"))


def ask_for_a_move(config: JobConfig, counts: str) -> None:
    """As soon as the run listens and has begun."""
    directory, end = Path(config.run.directory) / config.run.name, time.monotonic() + 60
    while time.monotonic() < end:
        status = ask_socket(directory, "status") if directory.is_dir() else None
        if status is not None and status.state == "running":
            ask_socket(directory, f"rebalance {counts}")
            return
        time.sleep(0.02)


def run(config: JobConfig, *, move: bool = True) -> str:
    """What it printed."""
    output = io.StringIO()
    asking = threading.Thread(target=ask_for_a_move, args=(config, "2,4"), daemon=True)
    if move:
        asking.start()
    assert run_job(config, launcher="local", output=output, trainer=ChaosTrainer) == 0
    return output.getvalue()


def lines(config: JobConfig, name: str) -> list[dict[str, Any]]:
    path = Path(config.run.directory) / config.run.name / name
    return [json.loads(line) for line in path.read_text().splitlines()]


Outcome = tuple[list[tuple[Any, ...]], dict[str, bytes]]


def outcome(config: JobConfig) -> Outcome:
    """Numbers of every step, and every tensor of the last checkpoint."""
    numbers = [(line["step"], line["loss"], line["gradient_norm"], line["tokens"], line["learning_rate"])
               for line in lines(config, "metrics.jsonl")]
    tensors = {}
    for path in Path(step_directory(f"{config.run.directory}/{config.run.name}", STEPS)).glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            tensors |= {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 - no mapping
    return numbers, tensors


class Undisturbed:
    """Outcomes of runs in which nobody dies, by mesh; made when first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._outcomes: dict[tuple[int, int, int], Outcome] = {}
        for file in "abc":
            (directory / f"{file}.txt").write_text(f"a text of {file} that says {file * 3} " * 60)
        prepare([str(directory / "*.txt")], str(directory / "data"), "bytes", 0.3)

    def __getitem__(self, mesh: tuple[int, int, int]) -> Outcome:
        if mesh not in self._outcomes:
            config = make_job(self.directory, "still-" + "-".join(map(str, mesh)), mesh)
            Path(config.run.directory).mkdir()
            run(config, move=False)
            self._outcomes[mesh] = outcome(config)
            assert len(self._outcomes[mesh][0]) == STEPS and len(self._outcomes[mesh][1]) > 0
        return self._outcomes[mesh]


def assert_ranks_left_nothing(config: JobConfig) -> None:
    """No process that was ever a rank of the job lives or has left shared memory."""
    logs = (Path(config.run.directory) / config.run.name / "logs").glob("rank-*.log")
    ranks = {pid for path in logs for pid in re.findall(r"process (\d+) joined generation", path.read_text())}
    assert len(ranks) > config.mesh.data * config.mesh.pipeline * config.mesh.tensor, "somebody was replaced"
    assert not [pid for pid in ranks if psutil.pid_exists(int(pid))]
    assert not [path.name for path in Path("/dev/shm").iterdir() if ranks & set(re.findall(r"\d+", path.name))]
