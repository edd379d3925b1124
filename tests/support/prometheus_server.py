"""Dashboards and rules as tests read them, and a Prometheus of the test's own."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "dashboards"
RULES = MONITORING / "prometheus" / "rules.yml"


def dashboards() -> dict[str, dict[str, Any]]:
    """Committed dashboards by file name."""
    return {path.name: json.loads(path.read_text())
            for path in sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))}


def panel_expressions() -> list[tuple[str, str]]:
    """(where, PromQL) of every panel."""
    return [(f"{name}: {panel['title']}", target["expr"]) for name, dashboard in dashboards().items()
            for panel in dashboard["panels"] for target in panel["targets"]]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def rule_expressions() -> list[tuple[str, str]]:
    """(alert, PromQL), without the comparison that makes it empty while all is well."""
    return [(rule["alert"], re.split(" (?:>|!=) ", rule["expr"])[0]) for rule in rules()]


def metric_names(expression: str) -> set[str]:
    """Names of the project's metrics in PromQL."""
    return set(re.findall(r"raytrain3d_\w+", expression.replace("${prefix}", "raytrain3d")))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    """Runs a configuration file until it is left."""

    def __init__(self, config: Path, storage: Path) -> None:
        binary, self._port = shutil.which("prometheus"), free_port()
        assert binary is not None, "dashboards/check.sh installs Debian's prometheus"
        self._log = (storage.parent / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [binary, f"--config.file={config}", f"--storage.tsdb.path={storage}",
             f"--web.listen-address=127.0.0.1:{self._port}"],
            stdout=self._log, stderr=subprocess.STDOUT)

    def __enter__(self) -> "Prometheus":
        end = time.monotonic() + 60
        while not self._answers("/-/ready"):
            assert self._process.poll() is None and time.monotonic() < end, Path(self._log.name).read_text()
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Result vector of an instant query."""
        question = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/query?{question}", timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found

    def query_range(self, expression: str, seconds: float, step: float) -> list[dict[str, Any]]:
        """Result matrix of the last `seconds`."""
        now = time.time()
        question = urllib.parse.urlencode({"query": expression, "start": now - seconds, "end": now, "step": step})
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/query_range?{question}", timeout=20) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
