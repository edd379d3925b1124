"""Runs with failures: the simulation against the expected goodput, and that against closed forms."""

import json
from math import sqrt
from pathlib import Path

import pytest

from raytrain3d.cli import main
from raytrain3d.plan.failures import Failures, shown_intervals, simulate_run

JOBS = Path(__file__).parents[2] / "jobs"
OFTEN = Failures(step_s=2.0, mttf_s=3600.0, recovery_s=600.0, save_s=5.0)
SECONDS = 3e7
"""Of a simulated run: long enough that no cost of a failure hides in the noise."""


@pytest.mark.parametrize("interval", [10, 50, 200, 1000])
def test_simulation_agrees_with_what_is_expected(interval: int) -> None:
    """Within four standard errors of the number of failures."""
    found = simulate_run(OFTEN, interval, seconds=SECONDS, seed=1)
    assert found.useful + found.saving + found.repeated + found.recovering == pytest.approx(1)
    assert found.useful == pytest.approx(OFTEN.expected_goodput(interval), rel=4 / sqrt(found.num_failures))
    assert found.num_failures == pytest.approx(SECONDS / 3600, rel=0.05)


def test_more_failures_than_steps_leave_nothing() -> None:
    hopeless = Failures(step_s=100.0, mttf_s=10.0, recovery_s=1.0, save_s=1.0)
    assert hopeless.expected_goodput(1) < 1e-3
    assert hopeless.expected_goodput(1000) == 0


def test_without_failures_only_saving_costs() -> None:
    never = Failures(step_s=1.0, mttf_s=1e12, recovery_s=60.0, save_s=1.0)
    assert never.expected_goodput(9) == pytest.approx(0.9)
    found = simulate_run(never, 9, seconds=1e4, seed=0)
    assert (found.num_failures, found.useful) == (0, pytest.approx(0.9))


@pytest.mark.parametrize(("mttf_s", "save_s"), [(3600.0, 1.0), (3600.0, 20.0), (86_400.0, 60.0), (600.0, 10.0)])
def test_best_interval_is_that_of_young_and_daly(mttf_s: float, save_s: float) -> None:
    """Both are approximations for saves that are short beside the time between failures; Daly's is the closer one."""
    failures = Failures(step_s=0.5, mttf_s=mttf_s, recovery_s=60.0, save_s=save_s)
    best = failures.best_interval()
    assert failures.expected_goodput(best) >= max(failures.expected_goodput(n) for n in (best - 1, best + 1, 2 * best))
    assert failures.young_s == sqrt(2 * save_s * mttf_s)
    assert best * 0.5 == pytest.approx(failures.daly_s, rel=0.02)
    assert abs(best * 0.5 - failures.daly_s) <= abs(best * 0.5 - failures.young_s)


def test_same_seed_same_failures() -> None:
    assert simulate_run(OFTEN, 50, seconds=1e5, seed=3) == simulate_run(OFTEN, 50, seconds=1e5, seed=3)
    assert simulate_run(OFTEN, 50, seconds=1e5, seed=3) != simulate_run(OFTEN, 50, seconds=1e5, seed=4)


def test_shown_intervals_hold_the_best_and_the_jobs_own() -> None:
    shown = shown_intervals(OFTEN, 12345)
    assert OFTEN.best_interval() in shown and 12345 in shown
    assert list(shown) == sorted(set(shown))


def test_32768_gpus_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", str(JOBS / "gpt3_175b.yaml"), "mesh.data=512", "--failures", "--on", "h100"]
    assert main([*command, "--format", "json", "--days", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 32_768
    assert found["mttf_s"] == pytest.approx(50_000 * 3600 / 32_768)
    assert found["own_interval"] in [run["interval"] for run in found["runs"]]
    assert max(found["runs"], key=lambda run: run["expected"])["interval"] == found["best_interval"]
    assert main([*command, "--recovery-s", "600", "--save-s", "30", "--days", "3"]) == 0
    text = capsys.readouterr().out
    assert "failures  one every 91.6 min, 600 s until the next step" in text
    assert "save      holds training up for 30.000 s" in text
    assert main([*command, "--mttf-hours", "0"]) == 2
    assert "--mttf-hours is 0: must be above 0" in capsys.readouterr().err
    assert main([*command, "--format", "html"]) == 2
    assert "with --failures valid are table and json" in capsys.readouterr().err
