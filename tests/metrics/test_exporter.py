"""What Prometheus gets is what the run directory has."""

import io
import json
import math
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, MetricsConfig, ModelConfig, RunConfig, TrainConfig
from raytrain3d.errors import ConfigError
from raytrain3d.metrics.catalogue import CATALOGUE, reference
from raytrain3d.metrics.expected import Expected
from raytrain3d.metrics.exporter import Exporter
from raytrain3d.metrics.journal import Journal
from raytrain3d.metrics.progress import PlainProgress
from raytrain3d.metrics.records import Records
from raytrain3d.metrics.run_metrics import RunMetrics
from raytrain3d.metrics.summary import RebalanceSummary, StepSummary, summarize
from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.train.report import StepReport

ROOT = Path(__file__).parents[2]
CONFIG = JobConfig(run=RunConfig(name="seen"), data=DataConfig(path="d"), mesh=MeshConfig(data=2, pipeline=2),
                   model=ModelConfig(vocabulary=64, hidden=8, blocks=2, heads=2, feed_forward=8),
                   train=TrainConfig(steps=100, global_batch=8, sequence=8), metrics=MetricsConfig(peak_tflops=0.001))
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(CONFIG)


def summary(step: int, moves: int = 0) -> StepSummary:
    """A step in which every rank has its own figures."""
    reports = [StepReport(step=step, rank=rank, loss=6.0 / step, tokens=60 + step, gradient_norm=1.5, learning_rate=1e-3,
                          skipped=step == 2, seconds=1.0 + 0.1 * rank, compute_s=0.5 + 0.1 * rank, data_wait_s=0.01,
                          receive_wait_s=0.02 * rank, reduce_wait_s=0.03, commit_wait_s=0.04, optimizer_s=0.05,
                          memory_bytes=1000 + rank, layer_forward_s={rank % 2: 0.2}, layer_backward_s={rank % 2: 0.3})
               for rank in range(4)]
    return summarize(reports, Mesh(data=2, pipeline=2), RebalanceSummary(moves=moves, bytes=100 * moves))


class Run:
    """A journal whose lines go to a run directory and to an endpoint."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.directory, self._plan = directory, plan
        self.metrics = RunMetrics(CONFIG, plan)
        self.records = Records(directory)
        self.journal = Journal(PlainProgress(io.StringIO(), 100), self.records, (), (self.metrics,))
        self.exporter = Exporter(self.metrics, address="127.0.0.1", port=0, host="127.0.0.1", directory=directory)
        self._expected = Expected(CONFIG, plan)

    def step(self, number: int, moves: int = 0) -> None:
        each = summary(number, moves)
        self.journal.step(each, goodput=0.9, **self._expected.values(each, self._plan))

    def scrape(self) -> Series:
        with urllib.request.urlopen(self.exporter.url, timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        return {(sample.name, frozenset(sample.labels.items())): sample.value
                for family in families for sample in family.samples}

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path, plan: Plan) -> Iterator[Run]:
    run = Run(tmp_path, plan)
    yield run
    run.exporter.close()
    run.records.close()


def value(series: Series, name: str, **labels: str) -> float:
    return series[f"raytrain3d_{name}", frozenset({"run": "seen", **labels}.items())]


def test_exported_is_what_was_recorded(run: Run) -> None:
    for step in (1, 2, 3):
        run.step(step, moves=step - 1)
    run.journal.event("checkpoint", 3, "saved", state_time=123.5, pause_s=0.25, write_s=2.0, num_bytes=77)
    run.journal.event("validation", 3, "validated", loss=2.5)
    series, lines = run.scrape(), run.lines()
    last = lines[-1]
    assert value(series, "loss") == last["loss"] == 2.0
    assert value(series, "step_seconds") == last["seconds"] == pytest.approx(1.3)
    assert value(series, "idle_ratio") == last["idle_share"]
    assert value(series, "tokens_total") == sum(line["tokens"] for line in lines) == 61 + 62 + 63
    assert value(series, "tokens_per_second") == last["tokens_per_s"]
    assert value(series, "steps_total") == len(lines)
    assert value(series, "skipped_steps_total") == 1
    assert value(series, "rebalance_moves_total") == last["rebalance"]["moves"] == 2
    assert value(series, "rebalance_bytes_total") == 200
    assert math.isnan(value(series, "rebalance_achieved_gain_ratio"))
    for rank in range(2):
        recorded = [line["pipeline_ranks"][rank] for line in lines]
        for name in ("compute", "forward", "backward", "optimizer", "receive_wait", "reduce_wait", "commit_wait",
                     "data_wait"):
            total = sum(each[f"{name}_s"] for each in recorded)
            assert value(series, f"{name}_seconds_total", pipeline_rank=str(rank)) == pytest.approx(total), name
        assert value(series, "memory_bytes", pipeline_rank=str(rank)) == 1002 + rank
        for replica in range(2):
            assert value(series, "place_compute_seconds", replica=str(replica), pipeline_rank=str(rank)) == pytest.approx(
                0.5 + 0.1 * (2 * replica + rank))
    assert value(series, "last_checkpoint_timestamp_seconds") == 123.5
    assert value(series, "validation_loss") == 2.5 and value(series, "checkpoints_total") == 1


def test_figures_against_the_plan(run: Run, plan: Plan) -> None:
    run.step(1)
    series, line = run.scrape(), run.lines()[0]
    assert value(series, "mfu_ratio") == pytest.approx(value(series, "model_flops_per_second") / (4 * 1e9))
    compute = (0.5 + 0.6 + 0.7 + 0.8) / 4
    assert value(series, "predicted_step_seconds") == line["predicted_s"] == pytest.approx(
        compute / (1 - plan.idle_share) + 0.05)
    assert value(series, "predicted_idle_ratio") == plan.idle_share
    for stage, (first, end) in enumerate(plan.stages):
        assert value(series, "stage_layers", stage=str(stage)) == end - first
        assert value(series, "in_flight_micro_batches", pipeline_rank=str(stage)) == plan.estimates[stage].peak_in_flight
        assert value(series, "planned_memory_bytes", pipeline_rank=str(stage)) == plan.estimates[stage].memory.total
    assert value(series, "gangs") == value(series, "wanted_gangs") == 2 and value(series, "wanted_steps") == 100


def test_utilization_is_a_share_of_what_ranks_say_they_reach(plan: Plan) -> None:
    config = replace(CONFIG, metrics=MetricsConfig())
    known, unknown = (replace(summary(1), peak_flops=peak) for peak in (1e9, None))
    assert Expected(config, plan).values(known, plan)["mfu"] == Expected(CONFIG, plan).values(unknown, plan)["mfu"]
    assert "mfu" not in Expected(config, plan).values(unknown, plan)


def test_counters_do_not_go_back_with_the_run(run: Run) -> None:
    for step in (1, 2, 3, 4):
        run.step(step)
    before = run.scrape()
    assert value(before, "failures_total", cause="deaths") == 0
    run.journal.event("failure", 4, "rank 1 died", cause="deaths", ranks=[1])
    run.journal.rewind(2)
    run.journal.event("recovered", 2, "recovered", seconds=1.5, again=2)
    run.step(3)
    during = run.scrape()
    run.step(4)
    run.step(5)
    after = run.scrape()
    for first, second in ((before, during), (during, after)):
        assert {key for key in first if key[0].endswith("_total") and second[key] < first[key]} == set()
    assert value(during, "tokens_total") == value(before, "tokens_total")
    assert value(during, "step") == 3
    assert value(after, "tokens_total") == sum(line["tokens"] for line in run.lines()), "each step counts once"
    assert value(after, "steps_total") == 5 and value(after, "repeated_steps_total") == 2
    assert value(after, "failures_total", cause="deaths") == 1 == value(after, "recoveries_total")
    assert value(after, "recovery_seconds_total") == 1.5


def test_a_loss_that_is_not_finite_is_exported_as_such(run: Run) -> None:
    each = replace(summary(1), loss=float("nan"))
    run.journal.step(each)
    assert math.isnan(value(run.scrape(), "loss"))


def test_every_metric_has_a_value_before_it_is_needed_or_its_source_is_real(run: Run) -> None:
    """After one step and one event of each kind nothing in the catalogue is without a value."""
    run.step(1)
    for kind, more in (("failure", {"cause": "errors"}), ("recovered", {"seconds": 1.0, "again": 0}),
                       ("slow rank", {}), ("checkpoint failed", {}), ("checkpoint skipped", {}),
                       ("validation", {"loss": 1.0}),
                       ("checkpoint", {"state_time": 1.0, "pause_s": 1.0, "write_s": 1.0, "num_bytes": 1})):
        run.journal.event(kind, 1, kind, **more)
    exported = {name for name, _ in run.scrape()}
    assert exported == {metric.full_name for metric in CATALOGUE}


def test_target_is_found_as_long_as_the_run_lasts(tmp_path: Path, plan: Plan) -> None:
    metrics = RunMetrics(CONFIG, plan)
    exporter = Exporter(metrics, address="127.0.0.1", port=0, host="driver.example", directory=tmp_path)
    target = tmp_path / "seen.targets.json"
    assert json.loads(target.read_text()) == [{"targets": [f"driver.example:{exporter.port}"], "labels": {}}]
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    exporter.close()
    assert not target.exists()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", exporter.port), timeout=5)


def test_the_next_free_port_is_taken_and_no_other_address(plan: Plan) -> None:
    metrics = RunMetrics(CONFIG, plan)
    first = Exporter(metrics, address="127.0.0.1", port=0, host="127.0.0.1", directory=None)
    second = Exporter(metrics, address="127.0.0.1", port=first.port, host="127.0.0.1", directory=None)
    try:
        assert first.port < second.port < first.port + 100
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", first.port), timeout=5)
    finally:
        first.close()
        second.close()
    with pytest.raises(ConfigError, match=r"metrics.address is '192.0.2.1'"):
        Exporter(metrics, address="192.0.2.1", port=0, host="192.0.2.1", directory=None)


def test_reference_in_docs_is_up_to_date() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == reference(), "run: raytrain3d metrics > docs/metrics.md"
