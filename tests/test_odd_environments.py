"""Surroundings that are not as they should be: it works, or says what to do. Stray tokens, and directories with spaces and
umlauts on a cluster, are in gang/test_jobs.py."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "jobs" / "tiny.yaml")
SMALL = ("train.steps=3", "learning_rate.warmup=1", "evaluate.samples=4", "model.hidden=16", "model.heads=2",
         "model.feed_forward=32", "train.sequence=32")


def run(*command: str, cwd: Path | str = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(ROOT), **environment})


@pytest.fixture
def text(tmp_path: Path) -> str:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"text number {number} " * 100)
    return f"data.text=['{tmp_path}/*.txt']"


def test_another_python_is_told_which_one_to_take(tmp_path: Path) -> None:
    venv.create(tmp_path / "other", with_pip=False)
    done = run(str(tmp_path / "other" / "bin" / "python"), "-m", "raytrain3d", "plan", TINY)
    assert done.returncode == 1
    assert f"this Python ({tmp_path}/other/bin/python) lacks the package " in done.stderr
    assert "raytrain3d submit --python" in done.stderr and "Traceback" not in done.stderr


def test_an_old_python_is_told_too() -> None:
    code = "import runpy, sys; sys.version_info = (3, 9, 2); runpy.run_module('raytrain3d', run_name='__main__')"
    done = run(sys.executable, "-c", code)
    assert done.returncode == 1 and "raytrain3d needs Python 3.11 or newer" in done.stderr and "3.9" in done.stderr


def test_a_working_directory_that_cannot_be_written(tmp_path: Path, text: str) -> None:
    """/proc: not even root can."""
    job = (sys.executable, "-m", "raytrain3d", "train", TINY, "--launcher", "inline", text, *SMALL)
    done = run(*job, cwd="/proc")
    assert done.returncode == 2 and "error: data.path is 'data/stdlib-bytes': cannot be written" in done.stderr
    done = run(*job, f"data.path={tmp_path}/tokens", cwd="/proc")
    assert done.returncode == 1 and "directory /proc/runs/tiny is not usable" in done.stderr
    assert "Choose another run.directory" in done.stderr
    done = run(*job, f"data.path={tmp_path}/tokens", f"run.directory={tmp_path}/runs", cwd="/proc")
    assert done.returncode == 0, done.stderr


@pytest.mark.dist
def test_a_host_name_that_does_not_resolve(tmp_path: Path, text: str) -> None:
    if run("unshare", "--uts", "hostname", "nowhere.invalid").returncode != 0:
        pytest.skip("the host name cannot be changed here, not even for one process")
    command = (f"hostname nowhere.invalid && exec {sys.executable} -m raytrain3d train {TINY} --launcher local "
               f"mesh.pipeline=2 run.directory={tmp_path}/runs data.path={tmp_path}/tokens \"{text}\" {' '.join(SMALL)}")
    done = run("unshare", "--uts", "bash", "-c", command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on nowhere.invalid" in done.stdout
