"""A rank that is killed in the middle of a move: the run ends, the plan in its directory names a whole split, and the run
resumed from its newest checkpoint is bit-equal to one that nothing happened to.

The normal run takes one moment; `pytest -m slow tests/gang/test_moves_and_deaths.py` all of them.
"""

import io
import itertools
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from raytrain3d.checkpoint.store import step_directory, steps
from raytrain3d.config import (CheckpointConfig, DataConfig, JobConfig, MeshConfig, ModelConfig, PipelineConfig,
                               PlacementConfig, RebalanceConfig, RecoveryConfig, RunConfig, TrainConfig)
from raytrain3d.data.prepare import prepare
from raytrain3d.errors import RankFailed
from raytrain3d.gang.mailbox import ask_socket
from raytrain3d.gang.run import run_job
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.plan import Plan
from raytrain3d.train.trainer import Trainer

pytestmark = pytest.mark.dist

STEPS = 60
FAULT = "die"
MOMENTS = ["source before copy", "source after copy", "target before copy", "target after copy", "source before adopt",
           "target after adopt"]


class MortalTrainer(Trainer):
    """Dies by SIGKILL at the moment that a file in run.directory names, once."""

    def _meet(self, role: str, moment: str) -> None:
        fault = Path(self._config.run.directory) / FAULT
        if fault.exists() and fault.read_text() == f"{role} {moment}":
            fault.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def copy_layer(self, layer: int, source: int, target: int) -> int:
        role = "source" if self._at.pipeline == source else "target"
        self._meet(role, "before copy")
        sent = super().copy_layer(layer, source, target)
        self._meet(role, "after copy")
        return sent

    def adopt(self, stages: Stages, shares: tuple[int, ...]) -> None:
        if stages == self._plan.stages:  # no move: at the start all ranks are told what they have
            super().adopt(stages, shares)
            return
        role = "source" if self._at.pipeline == 0 else "target"
        self._meet(role, "before adopt")
        super().adopt(stages, shares)
        self._meet(role, "after adopt")


def make_job(directory: Path, name: str) -> JobConfig:
    data = directory / "data"
    if not data.exists():
        for file in "abc":
            (directory / f"{file}.txt").write_text(f"a text of {file} that says {file * 3} " * 60)
        prepare([str(directory / "*.txt")], str(data), "bytes", 0.3)
    return JobConfig(
        run=RunConfig(name=name, directory=str(directory / name)), data=DataConfig(path=str(data)),
        model=ModelConfig(vocabulary=257, hidden=16, blocks=4, heads=2, feed_forward=32, dropout=0.1),
        mesh=MeshConfig(pipeline=2), pipeline=PipelineConfig(schedule="zb_h1", layers=(4, 2)),
        train=TrainConfig(steps=STEPS, global_batch=4, sequence=32, lease=3),
        checkpoint=CheckpointConfig(interval=6, keep=None), rebalance=RebalanceConfig(mode="off"),
        recovery=RecoveryConfig(deaths=0), placement=PlacementConfig(device="cpu"))


def ask_until_heard(config: JobConfig, counts: str) -> None:
    """Moves two layers from the first stage to the second, as soon as the run listens and has begun."""
    directory = Path(config.run.directory) / config.run.name
    end = time.monotonic() + 60
    while time.monotonic() < end:
        status = ask_socket(directory, "status") if directory.is_dir() else None
        if status is not None and status.state == "running":
            ask_socket(directory, f"rebalance {counts}")
            return
        time.sleep(0.02)


def run(config: JobConfig, counts: str | None = None) -> None:
    asking = threading.Thread(target=ask_until_heard, args=(config, counts), daemon=True) if counts else None
    if asking is not None:
        asking.start()
    run_job(config, launcher="local", output=io.StringIO(), trainer=MortalTrainer)


def contents(config: JobConfig) -> dict[str, bytes]:
    """Every tensor of the last checkpoint, whichever rank wrote it."""
    directory = Path(step_directory(f"{config.run.directory}/{config.run.name}", STEPS))
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            found |= {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 - no mapping
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    directory = tmp_path_factory.mktemp("moves")
    config = make_job(directory, "still")
    run(config)
    return directory, contents(config)


@pytest.mark.parametrize("moment", [
    pytest.param(moment, marks=[] if moment == "source before adopt" else pytest.mark.slow)
    for moment in MOMENTS])
def test_a_death_in_a_move_costs_nothing_but_time(moment: str, undisturbed: tuple[Path, dict[str, bytes]]) -> None:
    directory, wanted = undisturbed
    config = make_job(directory, moment.replace(" ", "-"))
    Path(config.run.directory).mkdir(parents=True)
    (Path(config.run.directory) / FAULT).write_text(moment)
    with pytest.raises(RankFailed, match="SIGKILL"):
        run(config, "2,4")
    plan = Plan.from_json((Path(config.run.directory) / config.run.name / "plan.json").read_text())
    assert plan.stages[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(plan.stages))
    assert plan.stages[-1][1] == 6
    assert plan.stages[0][1] in ((4,) if "copy" in moment else (3,))
    run(config)
    assert contents(config) == wanted


def test_a_moved_job_ends_as_one_that_was_not(undisturbed: tuple[Path, dict[str, bytes]]) -> None:
    directory, wanted = undisturbed
    config = make_job(directory, "moved")
    run(config, "1,5")
    plan = Plan.from_json((Path(config.run.directory) / config.run.name / "plan.json").read_text())
    assert plan.stages == ((0, 1), (1, 6))
    assert steps(f"{config.run.directory}/{config.run.name}")[-1] == STEPS
    assert contents(replace(config)) == wanted
