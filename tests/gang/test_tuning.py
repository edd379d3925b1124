"""`profile` and `tune` on ranks of this machine: what is measured, and what happens when a layout fails."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_jobs import fake_job
from fake_trainer import FakeTrainer, set_fault

from raytrain3d.cli import main
from raytrain3d.errors import PlanError
from raytrain3d.gang.launchers import InlineLauncher
from raytrain3d.gang.trial import run_trial
from raytrain3d.gang.tuning import tune_job
from raytrain3d.load import load
from raytrain3d.plan.catalogue import NODES
from raytrain3d.plan.profile import Profile
from raytrain3d.plan.search import Evaluator
from raytrain3d.plan.step_time import Cluster

pytestmark = pytest.mark.dist
JOBS = Path(__file__).parents[2] / "jobs"
SMALL = ["train.global_batch=4", "train.sequence=64", "data.path=nowhere"]


def evaluator() -> Evaluator:
    profile = Profile()
    cluster = Cluster(node=NODES["cpu"], calibration=profile.calibration)
    return Evaluator(cluster=cluster, allocation=profile.allocation)


def say(text: str) -> None:
    pass


def test_trial_of_one_rank_needs_no_data() -> None:
    config = load(str(JOBS / "tiny.yaml"), SMALL)
    trial = run_trial(config, InlineLauncher(), num_steps=2, say=say)
    assert [step.step for step in trial.steps] == [3, 4]
    assert trial.step_s == sum(step.seconds for step in trial.steps) / 2 > 0
    assert trial.memory_bytes[0] > 50_000_000, "a process with torch"
    assert trial.steps[-1].loss < trial.steps[0].loss, "it learns the same tokens by heart"
    assert set(trial.steps[0].layer_forward_s) == {0, 1, 2, 3}


def test_profile_is_used_by_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that is predicted from it is of the right order (how near is measured by benchmarks/planner_local.py)."""
    file, job = tmp_path / "profile.json", str(JOBS / "tiny.yaml")
    assert main(["profile", job, *SMALL, "--launcher", "inline", "--on", "cpu", "--output", str(file)]) == 0
    assert "block_forward" in capsys.readouterr().out
    assert Profile.read(str(file)).about.startswith("cpu: tiny, hidden 64, tensor 1")
    search = ["plan", job, *SMALL, "--search", "--on", "cpu", "--ranks", "1", "--json"]
    assert main([*search, "--calibration", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)["best"]
    config = load(job, [*SMALL, f"train.micro_batch={found['micro_batch']}", f"train.recompute={found['recompute']}"])
    measured = run_trial(config, InlineLauncher(), num_steps=3, say=say)
    assert 0.3 < found["step_s"] / measured.step_s < 3
    assert 0.7 < found["memory_bytes"] / measured.memory_bytes[0] < 1.5


def test_tune_runs_the_best_and_passes_over_what_fails(tmp_path: Path) -> None:
    config = fake_job(tmp_path)
    Path(config.run.directory).mkdir()
    set_fault(config, 0, 1, "raise")
    told: list[str] = []
    tuned = tune_job(config, 2, evaluator(), top=2, num_steps=2, launcher="local", address=None, say=told.append,
                     trainer=FakeTrainer)
    failed, ran = tuned.tried
    assert failed.choice.step.total <= ran.choice.step.total
    assert failed.trial is None and "no room for activations" in failed.error
    assert ran.trial is not None and ran.trial.step_s >= 0.02
    assert tuned.winner == ran.choice.config
    header, first, second = tuned.table().splitlines()
    assert header.split() == ["layout", "predicted", "measured", "error", "memory", "measured"]
    assert "no room for activations" in first and second.endswith("fastest")
    assert [text.startswith("running data") for text in told] == [True, True]


def test_tune_when_nothing_runs_or_nothing_fits(tmp_path: Path) -> None:
    config = fake_job(tmp_path)
    Path(config.run.directory).mkdir()
    set_fault(config, 0, 1, "raise")
    with pytest.raises(PlanError, match=r"none of 1 layout ran; the first: .*no room for activations"):
        tune_job(config, 2, evaluator(), top=1, num_steps=1, launcher="local", address=None, say=say, trainer=FakeTrainer)
    small = replace(evaluator(), cluster=replace(evaluator().cluster, node=replace(NODES["cpu"], memory_gib=0.001)))
    with pytest.raises(PlanError, match="no layout of this job fits 2 devices of cpu: `raytrain3d plan --search` says"):
        tune_job(config, 2, small, top=1, num_steps=1, launcher="local", address=None, say=say)


def test_tune_writes_the_winner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "winner.yaml"
    assert main(["tune", str(JOBS / "tiny.yaml"), *SMALL, "--on", "cpu", "--ranks", "1", "--top", "2", "--steps", "1",
                 "--launcher", "inline", "--output", str(file)]) == 0
    assert "fastest" in capsys.readouterr().out
    winner = load(str(file))
    assert winner.mesh.replicas * winner.mesh.pipeline * winner.mesh.tensor == 1
    assert winner.pipeline.layers is not None
