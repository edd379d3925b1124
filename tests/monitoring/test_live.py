"""A real Prometheus scrapes a running job through the shipped configurations, and every panel and rule gets data."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from browser import chromium, render, with_measure
from dashboard_page import dashboard_page
from prometheus_server import MONITORING, ROOT, Prometheus, dashboards, free_port, panel_expressions, rule_expressions

from raytrain3d.metrics.run_report import run_report

RUN = "watched"
JOB = f"""
run: {{name: {RUN}}}
model: {{vocabulary: 4096, hidden: 64, blocks: 6, heads: 4, feed_forward: 128}}
mesh: {{data: 2, pipeline: 2}}
pipeline: {{partition: uniform}}
train: {{steps: 100000, global_batch: 8, micro_batch: 1, sequence: 64, lease: 10}}
data: {{path: data, text: ["{{stdlib}}/json/*.py"]}}
evaluate: {{interval: 40, samples: 4}}
checkpoint: {{interval: 40}}
placement: {{device: cpu, cpus_per_rank: 0.4}}
rebalance: {{interval: 10}}
metrics: {{peak_tflops: 0.05}}
debug: {{slowdown: [{{layer: 7, factor: 6}}], faults: [{{rank: 3, step: 100}}]}}
"""
"""A rank dies, checkpoints are written; the head is heavy, so that layers may move before they are asked to."""
LIMIT_S = 400

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(900)]


def expressions() -> dict[str, str]:
    """PromQL as Grafana and Prometheus evaluate it, for the run."""
    return {expression.replace("${prefix}", "raytrain3d").replace("$run", RUN).replace("$__rate_interval", "40s"): where
            for where, expression in panel_expressions() + rule_expressions()}


@contextmanager
def training(directory: Path, *arguments: str, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """The job in `directory` as a person starts it; stopped in order."""
    (directory / "job.yaml").write_text(JOB)
    command = [sys.executable, "-m", "raytrain3d"]
    inherited = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
    with (directory / "out").open("w") as output:
        process = subprocess.Popen([*command, "train", "job.yaml", *arguments], cwd=directory, env=inherited, text=True,
                                   stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_for_data(prometheus: Prometheus, job: subprocess.Popen[str], directory: Path) -> None:
    """Until every expression has had data."""
    waiting, end = expressions(), time.monotonic() + LIMIT_S
    while waiting:
        waiting = {expression: where for expression, where in waiting.items() if not prometheus.query(expression)}
        assert job.poll() is None, (directory / "out").read_text()
        assert time.monotonic() < end, f"without data: {waiting}\n{(directory / 'out').read_text()}"
        time.sleep(1)


def ask(directory: Path, *arguments: str) -> None:
    """A command for the run."""
    subprocess.run([sys.executable, "-m", "raytrain3d", *arguments], cwd=directory, check=True, timeout=60,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})


def until(true: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end
        time.sleep(1)


def value(prometheus: Prometheus, expression: str) -> float:
    """The one value; not a number if there is none."""
    found = prometheus.query(expression)
    return float(found[0]["value"][1]) if len(found) == 1 else math.nan


def test_the_endpoint_of_a_job_on_this_machine(promtool: str, tmp_path: Path) -> None:
    shutil.copytree(MONITORING / "prometheus", tmp_path / "dashboards" / "prometheus")
    (tmp_path / "runs").mkdir()
    config = tmp_path / "dashboards" / "prometheus" / "laptop.yml"
    with Prometheus(config, tmp_path / "storage") as prometheus:
        with training(tmp_path, "--launcher", "local") as job:
            wait_for_data(prometheus, job, tmp_path)
            selector = f'{{run="{RUN}"}}'
            until(lambda: value(prometheus, f"sum(raytrain3d_failures_total{selector})") == 1, LIMIT_S)
            until(lambda: value(prometheus, f"raytrain3d_recoveries_total{selector}") == 1, LIMIT_S)
            ask(tmp_path, "rebalance", RUN, "--layers", "5,3")
            until(lambda: value(prometheus, f"raytrain3d_rebalance_moves_total{selector}") >= 1, LIMIT_S)
            until(lambda: value(prometheus, f"raytrain3d_checkpoints_total{selector}") >= 1, LIMIT_S)
            tokens = prometheus.query_range(f"raytrain3d_tokens_total{selector}", 300, 5)[0]["values"]
            counts = [float(text) for _, text in tokens]
            assert counts == sorted(counts), "counters go on through the recovery"
            check_numbers(tmp_path / "runs")
            for name, board in dashboards().items():
                (tmp_path / name).with_suffix(".html").write_text(dashboard_page(board, prometheus, RUN, 90.0))
        until(lambda: not prometheus.query(f"raytrain3d_loss{selector}"), 60)
    lines = [json.loads(line) for line in (tmp_path / "runs" / RUN / "metrics.jsonl").read_text().splitlines()]
    assert counts[-1] <= sum(line["tokens"] for line in lines)
    assert not list((tmp_path / "runs").glob("*.targets.json"))
    (tmp_path / "report.html").write_text(run_report(tmp_path / "runs" / RUN))
    if chromium() is not None:
        look_at_pages(tmp_path)


def check_numbers(runs: Path) -> None:
    """What the endpoint says is what metrics.jsonl has up to the step that it says, recovery and moves included."""
    (target,) = json.loads((runs / f"{RUN}.targets.json").read_text())[0]["targets"]
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=20) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    seen = {sample.name.removeprefix("raytrain3d_"): sample.value for family in families for sample in family.samples
            if set(sample.labels) == {"run"}}
    lines = [json.loads(line) for line in (runs / RUN / "metrics.jsonl").read_text().splitlines()]
    done = [line for line in lines if line["step"] <= seen["step"]]
    last = done[-1]
    assert [line["step"] for line in done] == list(range(1, int(seen["step"]) + 1))
    assert seen["tokens_total"] == sum(line["tokens"] for line in done) and seen["steps_total"] == len(done)
    assert (seen["loss"], seen["step_seconds"], seen["idle_ratio"]) == (last["loss"], last["seconds"], last["idle_share"])
    assert seen["rebalance_moves_total"] == last["rebalance"]["moves"] >= 1
    assert seen["predicted_step_seconds"] == last["predicted_s"]


def look_at_pages(directory: Path) -> None:
    """Report and dashboards in a browser: everything is drawn, nothing overlaps, nothing is asked of the network. With
    PICTURES=DIRECTORY pictures of them are kept."""
    pictures = os.environ.get("PICTURES")
    for page in sorted(directory.glob("*.html")):
        picture = Path(pictures) / f"{page.stem}.png" if pictures else None
        size = (1500, 1500) if "raytrain3d" in page.name else (1240, 2050)
        assert render(page, picture=picture, width=size[0], height=size[1]).requests == []
        measured = directory / "measured"
        measured.mkdir(exist_ok=True)
        (measured / page.name).write_text(with_measure(page.read_text()))
        dom = render(measured / page.name).dom
        layout = re.search(r'<pre id="layout">(.*?)</pre>', dom, re.DOTALL)
        assert layout is not None and json.loads(layout[1]) == [], page.name
        board = dashboards().get(f"{page.stem}.json")
        if board is None:
            assert {"rank 0", "rank 1"} <= set(re.findall(r">(rank \d)</text>", dom)) and "polyline" in dom
            continue
        assert "no values yet" not in dom
        num_charts = sum(panel["type"] == "timeseries" for panel in board["panels"])
        assert dom.count("<polyline") + dom.count("<circle") >= num_charts


@pytest.mark.ray
def test_the_metrics_that_ray_exports(promtool: str, tmp_path: Path) -> None:
    temporary = Path(f"/tmp/r3d-{os.getpid()}")
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_DISABLE_IMPORT_WARNING": "1"}
    port = free_port()
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--temp-dir={temporary}",
               f"--port={port}", f"--metrics-export-port={free_port()}", f"--dashboard-port={free_port()}", "--num-cpus=2",
               "--include-dashboard=true", "--node-ip-address=127.0.0.1"]  # the dashboard writes the file of targets
    with (tmp_path / "head").open("w") as output:
        head = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT)
    try:
        found = temporary / "prom_metrics_service_discovery.json"
        until(found.exists, 90)
        (tmp_path / "rules.yml").write_text((MONITORING / "prometheus" / "rules.yml").read_text())
        shipped = (MONITORING / "prometheus" / "ray_cluster.yml").read_text()
        assert "/tmp/ray/" in shipped
        (tmp_path / "prometheus.yml").write_text(shipped.replace("/tmp/ray/", f"{temporary}/"))
        with (Prometheus(tmp_path / "prometheus.yml", tmp_path / "storage") as prometheus,
              training(tmp_path, "--address", f"127.0.0.1:{port}", "metrics.port=null", environment=environment) as job):
            wait_for_data(prometheus, job, tmp_path)
    finally:
        head.terminate()
        head.wait(60)
        shutil.rmtree(temporary, ignore_errors=True)
