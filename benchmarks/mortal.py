"""Trainers that die, for benchmarks/recovery.py: in a module of their own, which processes of ranks can import."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from raytrain3d.config import JobConfig
from raytrain3d.plan.plan import Plan
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer

DIES, VICTIM = 25, 3
"""Step in which rank VICTIM kills itself, once, if there is a file `kill` in run.directory."""


class MortalTrainer(Trainer):
    """Writes when it dies and when each of its steps ended to files in run.directory."""

    def __init__(self, config: JobConfig, plan: Plan, rank: int) -> None:
        super().__init__(config, plan, rank)
        self._place = Path(config.run.directory)
        self._ends = (self._place / f"ends-{rank}.txt").open("a", buffering=1)

    def step(self, n: int) -> StepReport:
        kill = self._place / "kill"
        if (self.rank, n) == (VICTIM, DIES) and kill.exists():
            kill.unlink()
            (self._place / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        report = super().step(n)
        self._ends.write(f"{time.monotonic()}\n")
        return report


@dataclass(frozen=True)
class PeriodicallyKilled:
    """Makes trainers of which the last rank dies so many seconds after it was made."""

    after_s: float

    def __call__(self, config: JobConfig, plan: Plan, rank: int) -> Trainer:
        if rank == plan.mesh.size - 1:
            signal.setitimer(signal.ITIMER_REAL, self.after_s)  # nobody handles SIGALRM, so it ends the process
        return Trainer(config, plan, rank)
