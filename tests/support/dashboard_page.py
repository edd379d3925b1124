"""A dashboard as a page, with what a Prometheus has for each panel: laid out on Grafana's grid, drawn by the project's own
charts. It shows whether the queries say what the panels promise; Grafana itself draws them otherwise."""

from html import escape
from typing import Any

from prometheus_server import Prometheus

from raytrain3d.metrics.page import page
from raytrain3d.metrics.svg import Curve, Scale, legend, line_chart, number

GRID = """<style>
body { max-width: 1500px; } .charts { grid-template-columns: repeat(24, 1fr); grid-auto-rows: 32px; gap: 8px; }
.charts section { padding: 8px 12px; overflow: hidden; } .value { font-size: 24px; } section > p.soft { display: none; }
h2 { font-size: 14px; } svg.heat rect { stroke: none; }
</style>"""
STEP_S = 5.0
Series = list[dict[str, Any]]


def dashboard_page(dashboard: dict[str, Any], prometheus: Prometheus, run: str, seconds: float) -> str:
    """The last `seconds` of the run."""
    cards = "".join(_panel(panel, prometheus, run, seconds) for panel in dashboard["panels"])
    text = page(dashboard["title"], f"{dashboard['description']} Run {run}.", [], [cards])
    return text.replace("</head>", GRID + "</head>").replace('<div class="figures"></div>', "")


def _panel(panel: dict[str, Any], prometheus: Prometheus, run: str, seconds: float) -> str:
    at, found = panel["gridPos"], [(target, _ask(target["expr"], prometheus, run, seconds)) for target in panel["targets"]]
    curves = [Curve(_name(target["legendFormat"], series["metric"]), _points(series["values"], seconds))
              for target, result in found for series in result]
    unit = panel["fieldConfig"]["defaults"]["unit"]
    match panel["type"]:
        case "stat" | "gauge":
            inside = "".join(f'<p><span class="soft">{escape(curve.name)}</span> <b class="value">'
                             f'{escape(_shown(curve.points[-1][1], unit))}</b></p>' for curve in curves)
        case "heatmap":
            inside = heat_map(curves, seconds)
        case _:
            inside = line_chart(curves, unit=unit, zero="min" in panel["fieldConfig"]["defaults"], label="s")
    style = f"grid-column: {at['x'] + 1} / span {at['w']}; grid-row: {at['y'] + 1} / span {at['h']}"
    return f'<section style="{style}"><h2>{escape(panel["title"])}</h2><div>{inside}</div></section>\n'


def _ask(expression: str, prometheus: Prometheus, run: str, seconds: float) -> Series:
    text = expression.replace("${prefix}", "raytrain3d").replace("$run", run).replace("$__rate_interval", "40s")
    return prometheus.query_range(text, seconds, STEP_S)


def _name(template: str, labels: dict[str, str]) -> str:
    for key, value in labels.items():
        template = template.replace("{{" + key + "}}", value)
    return template


def _points(values: list[tuple[float, str]], seconds: float) -> list[tuple[float, float | None]]:
    end = values[-1][0]
    return [(time - end, float(text)) for time, text in values if time >= end - seconds]


def _shown(value: float | None, unit: str) -> str:
    if value is None or value != value:
        return "none yet"
    return f"{value:.1%}" if unit == "percentunit" else f"{number(value)} s" if unit == "s" else number(value)


def heat_map(curves: list[Curve], seconds: float) -> str:
    """A row for each curve, brighter the nearer its value is to 1."""
    across, height = Scale(-seconds, 0.0, 40, 700), 30 * len(curves) + 10
    cells = "".join(
        f'<rect class="heat" x="{across(time):.1f}" y="{30 * row + 5}" width="{across(STEP_S) - across(0.0):.1f}" '
        f'height="28" fill="hsl({260 - 210 * value:.0f} 70% {22 + 45 * value:.0f}%)"><title>{value:.3f}</title></rect>'
        for row, curve in enumerate(curves) for time, value in curve.points if value is not None and time < 0)
    names = "".join(f'<text class="axis end" x="34" y="{30 * row + 24}">{escape(curve.name)}</text>'
                    for row, curve in enumerate(curves))
    return f'<svg class="heat" viewBox="0 0 720 {height}">{cells}{names}</svg>' + legend([])
