"""The driver is killed at a random step: its ranks end with it, nothing is left, and the same job started again ends
bit-equal."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from chaos import plan_kills
from chaos_jobs import STEPS, Undisturbed, make_job, outcome, run

from raytrain3d.checkpoint.store import newest
from raytrain3d.load import dump

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("nothing_left")]

DRIVER = """
import sys
from chaos import ChaosTrainer
from raytrain3d.gang.run import run_job
from raytrain3d.load import load
run_job(load(sys.argv[1]), launcher="local", trainer=ChaosTrainer)
"""


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed else []) for seed in range(5)])
def test_a_killed_driver_costs_what_was_done_since_the_checkpoint(seed: int, undisturbed: Undisturbed) -> None:
    mesh, step = (2, 2, 1), random.Random(seed).randrange(8, STEPS)
    config = make_job(undisturbed.directory, f"driver-{seed}", mesh)
    plan_kills(config, [])
    file, begun = Path(config.run.directory) / "job.yaml", Path(config.run.directory) / "begun-0.txt"
    file.write_text(dump(config))
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(file)], stdout=subprocess.DEVNULL,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as driver:
        while not begun.exists() or f"{step}\n" not in begun.read_text():
            assert driver.poll() is None
            time.sleep(0.005)
        ranks = psutil.Process(driver.pid).children()
        driver.send_signal(signal.SIGKILL)
        _, left = psutil.wait_procs(ranks, timeout=10)
        assert len(ranks) == 4 and not left
    saved = newest(f"{config.run.directory}/{config.run.name}")
    text = run(config, move=False)
    assert saved is None or f"/checkpoints/step-{saved}" in text
    assert outcome(config) == undisturbed[mesh]
