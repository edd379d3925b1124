"""bf16 follows FP32 within 1 %.

The normal run takes every step of a small model on tokens that are half predictable; `pytest -m slow
tests/train/test_precision.py` takes 200 steps of the quickstart, on its own data.
"""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from jobs import JobRunner, SyntheticLoader, small_job

from raytrain3d.config import JobConfig
from raytrain3d.plan.plan import Plan
from raytrain3d.train.trainer import Trainer

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
LIMIT = 0.01
STEPS = 60


class HalfPredictable(SyntheticLoader):
    """Every other token, on average, follows from the one before it, so that there is something to learn."""

    def sample(self, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw, vocabulary = random.Random(f"{step}/{index}"), self._config.model.vocabulary
        tokens = [draw.randrange(vocabulary)]
        for _ in range(self._config.train.sequence):
            tokens.append((3 * tokens[-1] + 1) % vocabulary if draw.random() < 0.5 else draw.randrange(vocabulary))
        return torch.tensor(tokens[:-1]), torch.tensor(tokens[1:])


def train(config: JobConfig, plan: Plan, rank: int, port: int, generation: int) -> list[float]:
    """Loss of every step on one rank."""
    trainer = Trainer(config, plan, rank,
                      loader=HalfPredictable(config, plan, plan.mesh.coordinate(rank).data))  # type: ignore[arg-type]
    try:
        trainer.connect("127.0.0.1", port, generation)
        trainer.initialize()
        return [trainer.step(n).loss for n in range(1, config.train.steps + 1)]
    finally:
        trainer.close()


def furthest(found: list[float], expected: list[float]) -> float:
    """Largest relative difference of a step's losses."""
    return max(abs(own / other - 1) for own, other in zip(found, expected, strict=True))


def test_bf16_follows_fp32(run_job: JobRunner) -> None:
    def losses(dtype: str) -> list[float]:
        config = small_job(train={"dtype": dtype, "steps": STEPS, "global_batch": 16, "micro_batch": 8, "sequence": 32},
                           model={"blocks": 2, "initial_std": 0.02})
        config = replace(config, learning_rate=replace(config.learning_rate, peak=3e-3))
        return run_job.call(train, config)[0]  # type: ignore[no-any-return]

    fp32, bf16 = losses("fp32"), losses("bf16")
    assert fp32[-1] < 0.8 * fp32[0], "nothing was learned"
    assert fp32 != bf16
    assert furthest(bf16, fp32) <= LIMIT


QUICKSTART = ROOT / "jobs" / "quickstart.yaml"


def quickstart_losses(directory: Path, dtype: str, *more: str) -> list[float]:
    """Of 200 steps."""
    command = [sys.executable, "-m", "raytrain3d", "train", str(QUICKSTART), "--launcher", "local", f"run.name={dtype}",
               f"train.dtype={dtype}", "train.steps=200", "rebalance.mode=off", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (directory / "runs" / dtype / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_bf16_follows_fp32_over_200_steps_of_the_quickstart(tmp_path: Path) -> None:
    """Means of 50 steps: at its learning rate a change of 0.1 % in the initial weights alone moves losses of single steps
    by up to 3 %, means of 50 by 0.3 %. At a peak of 1e-3 bf16 kept within 0.91 % at every step."""
    fp32, bf16 = ([mean(losses[i : i + 50]) for i in range(0, 200, 50)]
                  for losses in (quickstart_losses(tmp_path, dtype) for dtype in ("fp32", "bf16")))
    assert fp32[-1] < 0.6 * fp32[0]
    assert furthest(bf16, fp32) <= LIMIT
