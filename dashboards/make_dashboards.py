"""Makes the Grafana dashboards beside this file: three tables of panels, and how a panel is written in Grafana's JSON.

    python dashboards/make_dashboards.py

Names of metrics are those of raytrain3d/metrics/catalogue.py, which a test compares. `$prefix` is `raytrain3d` for metrics
scraped from the driver and `ray_raytrain3d` for those that Ray exports; `$run` is the run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 39
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
DIRECTORY = Path(__file__).parent / "grafana" / "dashboards"
TIME = "timeseries"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: what it shows, and the width and height that it takes of a grid 24 wide."""

    title: str
    queries: Sequence[tuple[str, str]]
    """(PromQL, legend). `M(name)` stands for a metric of the run."""
    description: str
    unit: str = "short"
    kind: str = TIME
    width: int = 8
    height: int = 7
    minimum: float | None = None
    decimals: int | None = None


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    description: str
    panels: Sequence[Panel]


def each(name: str, label: str) -> str:
    return f"max by ({label}) (M({name}))"


def spent(name: str) -> str:
    """Share of time since the last scrapes, mean over pipeline ranks."""
    return f"avg(rate(M({name}_seconds_total)[$__rate_interval]))"


TRAINING = Dashboard("raytrain3d-training", "raytrain3d / Training", "Is it learning, and how fast.", [
    Panel("Step", [("max(M(step))", "step")], "Last step that all ranks did.", kind="stat", width=4, height=4),
    Panel("Of all steps", [("max(M(step)) / max(M(wanted_steps))", "done")], "Share of the run's steps that are done.",
          "percentunit", "gauge", width=4, height=4, minimum=0),
    Panel("Loss", [("max(M(loss))", "loss")], "Nats a token, of the last step.", kind="stat", width=4, height=4, decimals=4),
    Panel("Tokens a second", [("max(M(tokens_per_second))", "tokens/s")], "Of the last step.", kind="stat", width=4,
          height=4),
    Panel("MFU", [("max(M(mfu_ratio))", "MFU")], "Share of the devices' peak that goes into FLOPs the model needs. Empty "
          "for GPUs that neither metrics.peak_tflops nor a data sheet tells of.", "percentunit", "stat", width=4, height=4,
          decimals=1),
    Panel("Goodput", [("max(M(goodput_ratio))", "goodput")], "Share of time that went into steps which counted.",
          "percentunit", "stat", width=4, height=4, decimals=1),
    Panel("Loss", [("max(M(loss))", "training"), ("max(M(validation_loss))", "validation")], "Nats a token.", width=12,
          height=9, decimals=3),
    Panel("Tokens a second", [("max(M(tokens_per_second))", "last step"),
                              ("sum(rate(M(tokens_total)[$__rate_interval]))", "with pauses")],
          "Of the last step, and with what is between steps: evaluation, moves, recoveries.", width=12, height=9, minimum=0),
    Panel("Gradient norm", [("max(M(gradient_norm))", "before clipping")], "Global norm of the step's gradient.", minimum=0),
    Panel("Learning rate", [("max(M(learning_rate))", "learning rate")], "By the schedule.", minimum=0),
    Panel("Step time", [("max(M(step_seconds))", "measured"), ("max(M(predicted_step_seconds))", "as planned")],
          "On the slowest rank; and with the same compute in a pipeline as idle as the plan says.", "s", minimum=0),
    Panel("Model FLOPs", [("max(M(model_flops_per_second))", "all ranks")], "That the model needs, recompute not counted.",
          "flops", minimum=0),
    Panel("Tokens seen", [("sum(M(tokens_total))", "by this driver")], "Loss tokens; a step done again counts once.",
          minimum=0),
    Panel("Trouble", [("sum(M(skipped_steps_total))", "skipped steps"), ("sum(M(loss_spikes_total))", "loss spikes")],
          "Steps whose numbers were not finite, and spikes of the loss (stability.spike).", minimum=0),
])

PIPELINE = Dashboard("raytrain3d-pipeline", "raytrain3d / Pipeline", "What each stage does, waits for and holds.", [
    Panel("Idle share", [("max(M(idle_ratio))", "measured"), ("max(M(predicted_idle_ratio))", "as planned")],
          "Time without compute: all of a step, beside the pipeline's bubble that the plan predicts.", "percentunit", "stat",
          width=6, height=4, decimals=1),
    Panel("Imbalance", [("max(M(imbalance_ratio))", "busiest over mean")], "1 is even.", kind="stat", width=6, height=4,
          decimals=2),
    Panel("Moves", [("sum(M(rebalance_moves_total))", "moves"), ("sum(M(rebalance_layers_total))", "layers")],
          "Changes of the split, and layers moved.", kind="stat", width=6, height=4),
    Panel("Gain of the last move", [("max(M(rebalance_predicted_gain_ratio))", "predicted"),
                                    ("max(M(rebalance_achieved_gain_ratio))", "achieved")],
          "Step time before over after.", kind="stat", width=6, height=4, decimals=2),
    Panel("Idle share by pipeline rank", [(each("pipeline_rank_idle_ratio", "pipeline_rank"), "{{pipeline_rank}}")],
          "A row is a pipeline rank, a column a moment; bright is idle.", "percentunit", "heatmap", width=12, height=9),
    Panel("Layers by stage", [(each("stage_layers", "stage"), "stage {{stage}}")],
          "When layers moved, and where to.", kind="state-timeline", width=12, height=9),
    Panel("Compute by place", [(each("place_compute_seconds", "replica, pipeline_rank"), "{{replica}}.{{pipeline_rank}}")],
          "Replica and pipeline rank; the outlier is a slow rank.", "s", minimum=0),
    Panel("Idle share by place", [(each("place_idle_ratio", "replica, pipeline_rank"), "{{replica}}.{{pipeline_rank}}")],
          "Replica and pipeline rank.", "percentunit", minimum=0),
    Panel("Imbalance", [("max(M(imbalance_ratio))", "busiest over mean")], "Compute of the busiest pipeline rank over the "
          "mean.", decimals=2),
    Panel("Forward", [("max by (pipeline_rank) (rate(M(forward_seconds_total)[$__rate_interval]))", "{{pipeline_rank}}")],
          "Share of time in forwards of layers.", "percentunit", minimum=0),
    Panel("Backward", [("max by (pipeline_rank) (rate(M(backward_seconds_total)[$__rate_interval]))", "{{pipeline_rank}}")],
          "Share of time in backwards of layers.", "percentunit", minimum=0),
    Panel("Where time goes", [(spent("compute"), "compute"), (spent("optimizer"), "optimizer"),
                              (spent("receive_wait"), "waiting for stages"), (spent("reduce_wait"), "for reductions"),
                              (spent("commit_wait"), "for the commit"), (spent("data_wait"), "for data")],
          "Shares of time, mean over pipeline ranks.", "percentunit", minimum=0),
    Panel("Memory", [(each("memory_bytes", "pipeline_rank"), "{{pipeline_rank}}"),
                     (each("planned_memory_bytes", "pipeline_rank"), "{{pipeline_rank}} planned")],
          "Of the rank that has most, beside the plan's estimate of its tensors.", "bytes", minimum=0),
    Panel("Micro-batches in flight", [(each("in_flight_micro_batches", "pipeline_rank"), "{{pipeline_rank}}")],
          "Most that the schedule holds at a time.", minimum=0),
    Panel("Micro-batches by replica", [(each("replica_micro_batches", "replica"), "replica {{replica}}")],
          "Shares of a step; a slow replica gets fewer.", minimum=0),
])

FLEET = Dashboard("raytrain3d-fleet", "raytrain3d / Fleet", "Gangs, failures, goodput, checkpoints.", [
    Panel("Gangs", [("max(M(gangs))", "running"), ("max(M(wanted_gangs))", "wanted")], "Replicas of the job.", kind="stat",
          width=6, height=4),
    Panel("Goodput", [("max(M(goodput_ratio))", "goodput")], "Share of time that went into steps which counted.",
          "percentunit", "stat", width=6, height=4, decimals=1),
    Panel("Age of the checkpoint", [("time() - max(M(last_checkpoint_timestamp_seconds))", "age")],
          "What a loss of all ranks would cost; before the first, since the start.", "s", "stat", width=6, height=4),
    Panel("Since the last step", [("time() - max(M(last_step_timestamp_seconds))", "since")], "Long when it stands still.",
          "s", "stat", width=6, height=4),
    Panel("Gangs", [("max(M(gangs))", "running"), ("max(M(wanted_gangs))", "wanted"),
                    ("sum(M(gangs_given_up_total))", "given up"), ("sum(M(gangs_taken_in_total))", "taken in")],
          "Replicas of the job, and how often one left and came.", minimum=0),
    Panel("Failures", [("sum by (cause) (M(failures_total))", "{{cause}}"), ("sum(M(recoveries_total))", "recoveries")],
          "That the run outlived: processes that died, nodes taken away, errors of ranks.", minimum=0),
    Panel("Time lost to failures", [("sum(M(recovery_seconds_total))", "recovering")], "From failures to recoveries.", "s",
          minimum=0),
    Panel("Goodput", [("max(M(goodput_ratio))", "goodput")], "Share of time since the first lease.", "percentunit",
          minimum=0),
    Panel("Steps", [("sum(M(steps_total))", "done"), ("sum(M(repeated_steps_total))", "done again"),
                    ("sum(M(skipped_steps_total))", "skipped")], "By this driver.", minimum=0),
    Panel("Slow ranks", [("sum(M(slow_ranks_named_total))", "named")], "Times that a rank was found slower than others; "
          "events.jsonl has its node.", minimum=0),
    Panel("Checkpoints", [("sum(M(checkpoints_total))", "committed"), ("sum(M(checkpoint_failures_total))", "failed tries"),
                          ("sum(M(checkpoints_skipped_total))", "skipped")], "By this driver.", minimum=0),
    Panel("Pause and writing", [("max(M(checkpoint_pause_seconds))", "training stood still"),
                                ("max(M(checkpoint_write_seconds))", "writing behind it")], "Of the last checkpoint.", "s",
          minimum=0),
    Panel("Size of a checkpoint", [("max(M(checkpoint_bytes))", "bytes")], "Of the last one.", "bytes", minimum=0),
    Panel("Age of the checkpoint", [("time() - max(M(last_checkpoint_timestamp_seconds))", "age")],
          "Since the state of the newest one was copied.", "s", minimum=0),
    Panel("Steps kept", [("max(M(last_checkpoint_step))", "checkpoint"), ("max(M(step))", "done")],
          "What lies between is lost when all ranks are.", minimum=0),
    Panel("Rebalancing", [("sum(M(rebalance_decisions_total))", "decisions"), ("sum(M(rebalance_moves_total))", "moves"),
                          ("sum(M(rebalance_bytes_total)) / 2^20", "MiB sent"),
                          ("sum(M(rebalance_seconds_total))", "seconds stood still")], "What the driver did.", minimum=0),
])

DASHBOARDS = (TRAINING, PIPELINE, FLEET)


def expression(text: str) -> str:
    """PromQL with whole names: `M(loss)` is the run's `raytrain3d_loss`."""
    parts = text.split("M(")
    named = (f'${{prefix}}_{name}{{run="$run"}}{rest}' for name, _, rest in (part.partition(")") for part in parts[1:]))
    return "".join([parts[0], *named])


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """As Grafana reads it from a provisioned file."""
    return {
        "uid": dashboard.uid, "title": dashboard.title, "description": dashboard.description, "tags": ["raytrain3d"],
        "schemaVersion": SCHEMA_VERSION, "editable": True, "graphTooltip": 1, "refresh": "10s", "timezone": "",
        "time": {"from": "now-1h", "to": "now"}, "templating": {"list": variables()},
        "links": [{"type": "dashboards", "tags": ["raytrain3d"], "title": "raytrain3d", "asDropdown": False,
                   "icon": "dashboard", "includeVars": True, "keepTime": True, "targetBlank": False, "tooltip": "",
                   "url": ""}],
        "annotations": {"list": []}, "panels": list(panels_json(dashboard.panels))}


def variables() -> list[dict[str, Any]]:
    choices = [("driver", "raytrain3d"), ("Ray", "ray_raytrain3d")]
    runs = 'label_values({__name__=~"(ray_)?raytrain3d_step"}, run)'
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1, "hide": 0},
        {"name": "prefix", "label": "scraped from", "type": "custom", "hide": 0,
         "query": ",".join(f"{text} : {value}" for text, value in choices),
         "current": {"text": choices[0][0], "value": choices[0][1], "selected": True},
         "options": [{"text": text, "value": value, "selected": text == "driver"} for text, value in choices]},
        {"name": "run", "label": "run", "type": "query", "datasource": DATASOURCE, "refresh": 2, "sort": 1, "hide": 0,
         "query": {"query": runs, "refId": "run"}}]


def panels_json(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """From left to right, in rows as high as their first panel."""
    found, x, y, row_height = [], 0, 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > 24:
            x, y = 0, y + row_height
        row_height = panel.height if x == 0 else row_height
        found.append(panel_json(panel, number, x, y))
        x += panel.width
    return found


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": CUSTOM.get(panel.kind, {}),
                                "color": {"mode": "palette-classic"}}
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    if panel.kind == "gauge":
        defaults["max"] = 1
    return {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.description, "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height}, "options": OPTIONS[panel.kind],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [{"refId": chr(ord("A") + index), "expr": expression(text), "legendFormat": legend, "editorMode": "code",
                     "datasource": DATASOURCE, "range": True, "instant": False}
                    for index, (text, legend) in enumerate(panel.queries)]}


CUSTOM: dict[str, Any] = {
    TIME: {"drawStyle": "line", "lineWidth": 2, "fillOpacity": 8, "showPoints": "auto", "spanNulls": False},
    "state-timeline": {"fillOpacity": 80, "lineWidth": 1}}
LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}
OPTIONS: dict[str, Any] = {
    TIME: {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
           "tooltip": {"mode": "multi", "sort": "desc"}},
    "stat": {"reduceOptions": LAST, "graphMode": "area", "colorMode": "value", "justifyMode": "auto", "textMode": "auto",
             "orientation": "auto", "wideLayout": True, "showPercentChange": False, "percentChangeColorMode": "standard"},
    "gauge": {"reduceOptions": LAST, "showThresholdLabels": False, "showThresholdMarkers": True, "orientation": "auto",
              "sizing": "auto", "minVizHeight": 75, "minVizWidth": 75},
    "heatmap": {"calculate": False, "cellGap": 1, "color": {"mode": "scheme", "scheme": "Viridis", "fill": "dark-orange",
                "exponent": 0.5, "steps": 64, "reverse": False, "min": 0, "max": 1}, "exemplars": {"color": "red"},
                "filterValues": {}, "legend": {"show": True}, "rowsFrame": {"layout": "auto"}, "showValue": "never",
                "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": False},
                "yAxis": {"axisPlacement": "left", "reverse": False}},
    "state-timeline": {"mergeValues": True, "rowHeight": 0.9, "showValue": "auto", "alignValue": "left",
                       "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
                       "tooltip": {"mode": "single", "sort": "none"}}}


def text_of(dashboard: Dashboard) -> str:
    return json.dumps(dashboard_json(dashboard), indent=1) + "\n"


def main() -> None:
    for dashboard in DASHBOARDS:
        (DIRECTORY / f"{dashboard.uid}.json").write_text(text_of(dashboard))


if __name__ == "__main__":
    main()
