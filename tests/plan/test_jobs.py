"""Job files of known models: each loads, has the parameters that its name says, fits the devices that it is meant for."""

import json
from pathlib import Path

import pytest

from raytrain3d.cli import main
from raytrain3d.load import load
from raytrain3d.plan.calibration import Calibration
from raytrain3d.plan.catalogue import NODES
from raytrain3d.plan.device_memory import Allocation
from raytrain3d.plan.plan import make_plan
from raytrain3d.plan.search import Evaluator
from raytrain3d.plan.step_time import Cluster

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.mark.parametrize(("name", "billions", "node"), [
    ("gpt2_124m", 0.124, "a100"), ("llama32_1b", 1.236, "h100"), ("llama31_8b", 8.03, "h100"), ("qwen3_1_7b", 1.72, "h100"),
    ("llama31_70b", 70.55, "h100"), ("gpt3_175b", 174.6, "a100")])
def test_job_has_a_plan_and_fits(name: str, billions: float, node: str) -> None:
    config = load(str(JOBS / f"{name}.yaml"))
    plan = make_plan(config, device="gpu")
    assert plan.num_parameters / 1e9 == pytest.approx(billions, rel=0.005)
    evaluator = Evaluator(cluster=Cluster(node=NODES[node], calibration=Calibration()), allocation=Allocation())
    choice = evaluator.evaluate(config)
    assert choice.fits(), f"{choice.needed / 1e9:.1f} GB"


def test_search_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.yaml"
    command = ["plan", str(JOBS / "llama32_1b.yaml"), "--search", "--on", "a100", "--ranks", "8"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best, usual = found["best"], found["rules_of_thumb"]
    assert best["data"] * best["pipeline"] * best["tensor"] == 8
    assert best["memory_bytes"] <= best["memory_limit_bytes"]
    assert usual["step_s"] >= best["step_s"] and usual["tensor"] == 8
    page = tmp_path / "found.html"
    assert main([*command, "--output", str(file), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "limited   by" in text and "by rules of thumb" in text
    assert "Memory by pipeline rank" in page.read_text() and "<h2>Pipeline</h2>" in page.read_text()
    assert load(str(file)).mesh.data == best["data"]
    assert main([*command[:3], "--on", "abacus"]) == 2
    assert "no node type 'abacus': there are a100" in capsys.readouterr().err
