"""Dashboards against the types that Grafana publishes for them."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_server import dashboards

PACKAGES = ("@grafana/schema@13.2.3", "typescript@5.9.3")
KINDS = {"timeseries": "timeseries", "stat": "stat", "gauge": "gauge", "heatmap": "heatmap",
         "state-timeline": "statetimeline"}
WITH_FIELDS = ("timeseries", "heatmap", "statetimeline")
HEAD = """import type { Dashboard, DataQuery, Panel } from '@grafana/schema';
type Plain<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
type Prometheus = DataQuery & { expr: string; legendFormat?: string; instant?: boolean; range?: boolean;
                                editorMode?: 'code' };
"""
"""Enumerations as the strings that stand in a file."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("npm") is None, reason="dashboards/check.sh installs npm")]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("types")
    (directory / "package.json").write_text('{"private": true}')
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES], cwd=directory,
                   check=True, timeout=300)
    return directory


def typescript(dashboard: dict[str, Any]) -> str:
    """Every part of a dashboard as a constant of its type."""
    kinds = sorted({KINDS[panel["type"]] for panel in dashboard["panels"]})
    lines = [HEAD, *(f"import type * as {kind} from './node_modules/@grafana/schema/dist/types/raw/composable/{kind}/"
                     "panelcfg/x/types.gen';" for kind in kinds)]
    top = {key: value for key, value in dashboard.items() if key != "panels"}
    lines.append(f"export const top: Plain<Omit<Dashboard, 'panels'>> = {json.dumps(top)};")
    for panel in dashboard["panels"]:
        kind, number = KINDS[panel["type"]], panel["id"]
        rest = {key: value for key, value in panel.items() if key not in ("options", "targets")}
        lines += [f"export const panel{number}: Plain<Panel> = {json.dumps(rest)};",
                  f"export const targets{number}: Prometheus[] = {json.dumps(panel['targets'])};",
                  f"export const options{number}: Plain<Partial<{kind}.Options>> = {json.dumps(panel['options'])};"]
        custom = panel["fieldConfig"]["defaults"]["custom"]
        if kind in WITH_FIELDS and custom:
            lines.append(f"export const custom{number}: Plain<Partial<{kind}.FieldConfig>> = {json.dumps(custom)};")
    return "\n".join(lines) + "\n"


def errors_of(project: Path, dashboard: dict[str, Any]) -> str:
    """What the compiler says; nothing if all is well."""
    (project / "dashboard.ts").write_text(typescript(dashboard))
    options = ("--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler", "--module", "esnext", "--target",
               "es2022")
    done = subprocess.run(["npx", "tsc", *options, "dashboard.ts"], cwd=project, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", list(dashboards()))
def test_types_of_dashboards(project: Path, name: str) -> None:
    assert errors_of(project, dashboards()[name]) == ""


def test_the_check_finds_what_is_wrong(project: Path) -> None:
    for spoil in (lambda board: board.update(schemaVersionn=39), lambda board: board["panels"][0]["gridPos"].update(h="8"),
                  lambda board: board["panels"][0]["targets"][0].pop("refId"),
                  lambda board: board["panels"][0]["options"].update(graphMode="areas")):
        board = dashboards()["raytrain3d-training.json"]
        spoil(board)
        assert "error TS" in errors_of(project, board)
