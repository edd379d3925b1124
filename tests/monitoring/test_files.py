"""Dashboards, rules and configurations agree with the catalogue of metrics and with each other."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from prometheus_server import MONITORING, dashboards, metric_names, panel_expressions, rule_expressions, rules

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, RunConfig, TrainConfig
from raytrain3d.metrics.catalogue import CATALOGUE
from raytrain3d.metrics.exporter import registry_of
from raytrain3d.metrics.run_metrics import RunMetrics
from raytrain3d.plan.plan import make_plan

KNOWN = {metric.full_name for metric in CATALOGUE}
PROMETHEUS = MONITORING / "prometheus"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_dashboards", MONITORING / "make_dashboards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dashboards_are_what_their_tables_make() -> None:
    module = generator()
    made = {f"{each.uid}.json": module.text_of(each) for each in module.DASHBOARDS}
    kept = {path.name: path.read_text() for path in (MONITORING / "grafana" / "dashboards").iterdir()}
    assert kept == made, "run: python dashboards/make_dashboards.py"


@pytest.mark.parametrize("where", [where for where, _ in panel_expressions() + rule_expressions()])
def test_expressions_name_metrics_of_the_catalogue(where: str) -> None:
    for place, expression in panel_expressions() + rule_expressions():
        if place == where:
            assert metric_names(expression) and metric_names(expression) <= KNOWN, expression


def test_every_metric_is_shown_or_alerted_on() -> None:
    shown = {name for _, expression in panel_expressions() for name in metric_names(expression)}
    assert shown == KNOWN


def test_dashboards_have_fixed_names_and_panels_do_not_overlap() -> None:
    assert {board["uid"] for board in dashboards().values()} == {"raytrain3d-training", "raytrain3d-pipeline",
                                                                 "raytrain3d-fleet"}
    for name, board in dashboards().items():
        assert board["schemaVersion"] == 39
        assert [each["name"] for each in board["templating"]["list"]] == ["datasource", "prefix", "run"]
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
            assert not cells & taken and at["x"] + at["w"] <= 24, f"{name}: {panel['title']}"
            taken |= cells
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_every_alert_is_tested_both_ways() -> None:
    cases = [case for test in yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
             for case in test["alert_rule_test"]]
    for rule in rules():
        fired = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == rule["alert"]]
        assert True in fired and False in fired, rule["alert"]


def check(promtool: str, *arguments: str, text: str | None = None) -> str:
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, input=text, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["laptop.yml", "ray_cluster.yml"])
def test_configurations_are_valid(promtool: str, name: str) -> None:
    assert "SUCCESS" in check(promtool, "check", "config", str(PROMETHEUS / name))


def test_rules_are_valid_and_fire_when_they_should(promtool: str) -> None:
    assert "SUCCESS" in check(promtool, "check", "rules", str(PROMETHEUS / "rules.yml"))
    assert "SUCCESS" in check(promtool, "test", "rules", str(PROMETHEUS / "rules_test.yml"))


def test_metrics_keep_to_conventions(promtool: str, tmp_path: Path) -> None:
    """promtool has nothing to say about names, types and helps."""
    from prometheus_client import generate_latest

    config = JobConfig(run=RunConfig(name="lint"), data=DataConfig(path="d"), mesh=MeshConfig(data=2, pipeline=2),
                       model=ModelConfig(vocabulary=64, hidden=8, blocks=2, heads=2, feed_forward=8),
                       train=TrainConfig(steps=9, global_batch=8, sequence=8))
    text = generate_latest(registry_of(RunMetrics(config, make_plan(config)))).decode()
    values = [f"# HELP {metric.full_name} {metric.help}\n# TYPE {metric.full_name} {metric.type}\n{metric.full_name} 1\n"
              for metric in CATALOGUE]
    assert check(promtool, "check", "metrics", text="".join(values)).strip() == ""
    assert check(promtool, "check", "metrics", text=text).strip() == ""
