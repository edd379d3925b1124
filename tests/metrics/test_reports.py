"""Pages of runs, plans and simulated steps: what they show is what is recorded, and they need nothing but themselves."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from browser import chromium, render, with_measure

from raytrain3d.cli import main
from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, RunConfig, TrainConfig
from raytrain3d.errors import ConfigError
from raytrain3d.load import load
from raytrain3d.metrics.expected import Expected
from raytrain3d.metrics.found_report import found_report
from raytrain3d.metrics.records import Records
from raytrain3d.metrics.run_report import run_report
from raytrain3d.metrics.summary import RebalanceSummary, summarize
from raytrain3d.metrics.svg import Bar, Curve, bar_chart, line_chart, nice_ticks, number, thinned
from raytrain3d.plan.calibration import Calibration
from raytrain3d.plan.catalogue import NODES
from raytrain3d.plan.device_memory import Allocation
from raytrain3d.plan.partition import split_by_counts
from raytrain3d.plan.plan import make_plan
from raytrain3d.plan.search import Evaluator, Found
from raytrain3d.plan.step_time import Cluster
from raytrain3d.train.report import StepReport

ROOT = Path(__file__).parents[2]
STEPS, MOVED = 120, 60
BEFORE, AFTER = (4, 4), (5, 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 120 steps whose head is heavy, with a move, a failure and checkpoints."""
    directory = tmp_path_factory.mktemp("runs") / "shown"
    config = JobConfig(run=RunConfig(name="shown"), data=DataConfig(path="d"), mesh=MeshConfig(data=2, pipeline=2),
                       model=ModelConfig(vocabulary=64, hidden=8, blocks=6, heads=2, feed_forward=8),
                       train=TrainConfig(steps=STEPS, global_batch=8, sequence=8))
    plan, records = make_plan(config), Records(directory)
    expected = Expected(config, plan)
    for step in range(1, STEPS + 1):
        counts = BEFORE if step <= MOVED else AFTER
        now = replace(plan, stages=split_by_counts(counts, 8))
        reports = [report(step, rank, now.layers_of(now.mesh.coordinate(rank).pipeline)) for rank in range(4)]
        each = summarize(reports, plan.mesh, RebalanceSummary(moves=int(step > MOVED)))
        records.step(each, {"goodput": 0.97, **expected.values(each, now)})
        if step % 40 == 0:
            records.event("checkpoint", step, f"checkpoint {step}", {})
            records.event("validation", step, "validated", {"loss": 3.0 - step / 100})
    records.event("rebalance", MOVED, "moves a block <from> the slow stage", {"stages": list(AFTER)})
    records.event("failure", 90, "rank 3 died", {"cause": "deaths"})
    records.event("recovered", 90, "recovered in 1.0 s", {"seconds": 1.0, "again": 1})
    records.close()
    (directory / "plan.json").write_text(replace(plan, stages=split_by_counts(AFTER, 8)).to_json())
    return directory


def report(step: int, rank: int, layers: range) -> StepReport:
    seconds = {layer: 0.01 * (4 if layer == 7 else 0.1 if layer == 0 else 1) for layer in layers}
    compute = 3 * sum(seconds.values())
    return StepReport(step=step, rank=rank, loss=5 * math.exp(-step / 60) + 1, tokens=64, gradient_norm=1.0,
                      learning_rate=1e-3, seconds=0.3, compute_s=compute, data_wait_s=0, receive_wait_s=0.3 - compute,
                      reduce_wait_s=0, commit_wait_s=0, optimizer_s=0, memory_bytes=2**28, layer_forward_s=seconds,
                      layer_backward_s={layer: 2 * time for layer, time in seconds.items()})


class Elements(HTMLParser):
    """Tags with their attributes, and cells of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_cell = tag in ("td", "b")
        if self._in_cell:
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.cells[-1] += data

    def of_class(self, tag: str, name: str) -> list[dict[str, str | None]]:
        return [attributes for each, attributes in self.tags
                if each == tag and name in (attributes.get("class") or "").split()]


def test_the_report_shows_what_was_recorded(run: Path) -> None:
    text = run_report(run)
    elements = Elements(text)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert f"{lines[-1]['loss']:.4f}" in elements.cells and "1.8000" in elements.cells
    curves = elements.of_class("polyline", "curve")
    assert all(len((curve["points"] or "").split()) == STEPS for curve in curves) and len(curves) >= 10
    assert len(elements.of_class("circle", "dot")) == 3, "validation losses"
    for kind, count in (("failure", 1), ("move", 1), ("checkpoint", 3)):
        assert len(elements.of_class("line", kind)) % count == 0 and elements.of_class("line", kind), kind
    assert "rank 3 died" in elements.cells and "moves a block <from> the slow stage" in elements.cells
    assert "stages of 4, 4 layers take" in text and "stages of 5, 3 layers take" in text


def test_layer_times_are_those_before_and_after_the_move(run: Path) -> None:
    """Before: embedding, 3 blocks | 3 blocks and the head."""
    text = run_report(run)
    assert "stages of 4, 4 layers take 0.093, 0.21 s" in text
    assert "stages of 5, 3 layers take 0.123, 0.18 s" in text
    bars = Elements(text).of_class("rect", "bar")
    assert len(bars) == 2 * 8 * 2, "8 layers, forward and backward, before and after"


def test_every_stage_is_in_the_timeline_and_ops_do_not_overlap(run: Path) -> None:
    elements = Elements(run_report(run))
    rows: dict[str, list[tuple[float, float]]] = {}
    for block in elements.of_class("rect", "op"):
        start, width = float(block["x"] or 0), float(block["width"] or 0)
        rows.setdefault(block["y"] or "", []).append((start, start + width))
    assert len(rows) == 2
    for blocks in rows.values():
        assert len(blocks) == 2 * 4, "forward and backward of 4 micro-batches"
        ordered = sorted(blocks)
        assert all(end <= start + 0.02 for (_, end), (start, _) in pairwise(ordered))


def test_pages_need_nothing_but_themselves(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for page in pages(run, tmp_path, monkeypatch):
        text = page.read_text()
        elements = Elements(text)
        assert not {tag for tag, _ in elements.tags} & {"script", "link", "img", "iframe", "object", "image", "use"}
        assert not [attributes for _, attributes in elements.tags if "src" in attributes or "href" in attributes]
        assert "url(" not in text and "@import" not in text
        policy = next(a["content"] for tag, a in elements.tags if tag == "meta" and "http-equiv" in a)
        assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def pages(run: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One of each kind, made by the command line."""
    monkeypatch.chdir(place)
    shutil.copytree(run, place / "runs" / "shown")
    job = str(ROOT / "jobs" / "quickstart.yaml")
    assert main(["report", "shown"]) == 0
    assert main(["plan", job, "--html", "plan.html"]) == 0
    assert main(["simulate", job, "pipeline.schedule=zb_h1", "mesh.pipeline=4", "--format", "html", "--output",
                 "simulated.html"]) == 0
    assert main(["plan", job, "--search", "--on", "cpu", "--ranks", "4", "--html", "found.html"]) == 0
    yield from (place / "runs" / "shown" / "report.html", place / "plan.html", place / "simulated.html",
                place / "found.html")


def test_page_of_a_search_shows_the_pipeline_and_the_memory_of_what_it_found() -> None:
    """A pipeline of two ranks: every op of its timeline, and a bar of four parts for each rank."""
    config = load(str(ROOT / "jobs" / "quickstart.yaml"), ["mesh.data=1", "mesh.tensor=1"])
    evaluator = Evaluator(cluster=Cluster(node=NODES["cpu"], calibration=Calibration()), allocation=Allocation(base_gb=0.1))
    best = evaluator.evaluate(config)
    text = found_report("shown", Found(best=best, smaller=(), roomy=best, num_candidates=1, num_simulated=1), None)
    elements, shown = Elements(text), min(best.timer.num_micro_batches, 2 * 2)
    assert len(elements.of_class("rect", "op")) == 2 * 2 * shown, "forward and backward on two ranks"
    assert len(elements.of_class("rect", "bar")) == 2 * 4
    assert f"{best.needed / 1e9:.1f} GB" in text and f"{best.step.total:.3f} s" in text


def test_a_run_without_steps_says_so(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(run / "plan.json", tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl' has no step that a report can be made of"):
        run_report(tmp_path)
    assert main(["report", "nowhere", "--directory", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_ticks_are_round_and_contain_the_values() -> None:
    assert nice_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    for low, high in ((3.0, 3.0), (-1e-6, 2e-6), (0.7, 1234.0), (0.0, 1e12)):
        ticks = nice_ticks(low, high)
        assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 9


def test_the_unit_stands_above_the_top_tick() -> None:
    """Text is 11 high."""
    lines = line_chart([Curve("c", [(1, 1.0), (2, 2.0)])], unit="nats")
    for chart in (lines, bar_chart([Bar("0", [("f", 1.0)], 0)], unit="s")):
        ticks = [float(y) for y in re.findall(r'<text class="axis end" x="58" y="([\d.]+)">', chart)]
        (unit,) = re.findall(r'<text class="axis" x="2" y="(\d+)">', chart)
        assert len(ticks) > 2 and min(ticks) - float(unit) >= 12


def test_long_curves_are_thinned_to_means_and_gaps_are_left_out() -> None:
    thin = thinned([(step, float(step)) for step in range(1000)])
    assert len(thin) == 334 and thin[0] == (1.0, 1.0)
    assert 'points="' in line_chart([Curve("c", [(1, 1.0), (2, None), (3, float("nan")), (4, 2.0)])], unit="s")
    assert "no values yet" in line_chart([Curve("c", [(1, None)])], unit="s")
    shown = [number(each) for each in (1234567.0, 1234.5, 0.012345, float("inf"))]
    assert shown == ["1.235M", "1,234", "0.01235", "not finite"]


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="dashboards/check.sh installs chromium")
def test_a_request_of_a_page_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "asks.html"
    page.write_text("<!doctype html><img src='http://127.0.0.1:9/picture.png'>")
    assert render(page).requests == ["http://127.0.0.1:9/picture.png"]


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="dashboards/check.sh installs chromium")
def test_a_browser_shows_them_whole_and_asks_for_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for page in pages(run, tmp_path, monkeypatch):
        assert render(page).requests == []
        measured = tmp_path / f"measured-{page.name}"
        measured.write_text(with_measure(page.read_text()))
        found = re.search(r'<pre id="layout">(.*?)</pre>', render(measured).dom, re.DOTALL)
        assert found is not None and json.loads(found[1]) == [], page.name
