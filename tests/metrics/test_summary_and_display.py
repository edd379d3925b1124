"""Reports of ranks become one line for files and one for people."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from raytrain3d.config import DataConfig, JobConfig, ModelConfig, PipelineConfig, RunConfig, SlowdownConfig, TrainConfig
from raytrain3d.metrics.journal import Journal
from raytrain3d.metrics.logs import PACKAGE, close_log, log_to_file
from raytrain3d.metrics.progress import (SHOWN_RANKS, LiveProgress, PlainProgress, TimeLeft, duration, make_progress,
                                         rank_table)
from raytrain3d.metrics.records import Records, measured_costs
from raytrain3d.metrics.summary import RebalanceSummary, StepSummary, summarize
from raytrain3d.plan.mesh import Mesh
from raytrain3d.train.report import StepReport


def report(rank: int, *, step: int = 1, seconds: float = 2.0, compute: float = 1.0, loss: float = 3.0) -> StepReport:
    return StepReport(step=step, rank=rank, loss=loss, tokens=100, gradient_norm=1.5, learning_rate=0.1,
                      seconds=seconds, compute_s=compute, data_wait_s=0, receive_wait_s=0.1 * rank, reduce_wait_s=0,
                      commit_wait_s=0, optimizer_s=0, layer_forward_s={rank % 2: 0.5 + rank}, layer_backward_s={})


def summary(step: int = 1, loss: float = 3.0) -> StepSummary:
    return summarize([report(0, step=step, loss=loss)], Mesh())


def test_ranks_are_merged_by_pipeline_rank_and_layer() -> None:
    merged = summarize([report(0), report(1, compute=0.5), report(2, seconds=4.0), report(3)], Mesh(data=2, pipeline=2))
    assert merged.seconds == 4.0 and merged.tokens_per_s == 25
    assert [each.compute_s for each in merged.pipeline_ranks] == [1.0, 0.75]
    assert [each.idle_share for each in merged.pipeline_ranks] == pytest.approx([(0.5 + 0.75) / 2, (0.75 + 0.5) / 2])
    assert merged.idle_share == pytest.approx(0.625)
    assert merged.layer_forward_s == {0: 1.5, 1: 2.5}


def test_a_line_of_metrics_tells_how_even_the_work_is_and_what_was_moved() -> None:
    moved = RebalanceSummary(decisions=3, moves=1, layers=2, bytes=2**20, seconds=0.5, predicted_gain=1.3,
                             achieved_gain=1.25)
    record = summarize([report(0, compute=1.5), report(1, compute=0.5)], Mesh(pipeline=2), moved).to_record()
    assert record["imbalance"] == 1.5
    assert record["rebalance"] == {"decisions": 3, "moves": 1, "layers": 2, "bytes": 2**20, "seconds": 0.5,
                                   "predicted_gain": 1.3, "achieved_gain": 1.25}


def test_numbers_that_json_does_not_know_become_null() -> None:
    record = summary(loss=float("nan")).to_record()
    assert record["loss"] is None
    assert json.loads(json.dumps(record, allow_nan=False))["tokens"] == 100


def test_records_are_lines_and_a_resumed_run_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for step in range(1, 6):
        records.step(summary(step))
    records.event("checkpoint", 3, "saved", {"directory": "d"})
    records.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # the driver was killed while writing
    records = Records(tmp_path)
    records.rewind(3)
    records.step(summary(4))
    records.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["event"], event["step"], event["text"], event["directory"]) == ("checkpoint", 3, "saved", "d")


def test_plain_lines_come_once_a_second_and_at_the_end() -> None:
    output = io.StringIO()
    progress = make_progress(output, 100)
    assert isinstance(progress, PlainProgress)
    for step in range(1, 101):
        progress.step(summary(step))
    progress.say("checkpoint d")
    first, last, event = output.getvalue().splitlines()
    for words in ("step 1/100", "loss 3.0000", "tokens/s 50", "lr 0.1", "gradient norm 1.500",
                  "s/step 2.000", "idle 50%", "imbalance 1.00", "left 3:18"):
        assert words in first
    assert last.startswith("step 100/100") and event == "checkpoint d"


def test_utilization_is_shown_where_it_is_known() -> None:
    output = io.StringIO()
    make_progress(output, 2).step(summary(1), 0.4123)
    make_progress(output, 2).step(summary(1))
    known, unknown = output.getvalue().splitlines()
    assert "tokens/s 50  MFU 41.2%  lr" in known and "MFU" not in unknown


def test_the_peak_is_known_when_every_rank_knows_its_own() -> None:
    reports = [replace(report(rank), peak_flops=peak) for rank, peak in enumerate((1e9, 3e9))]
    assert summarize(reports, Mesh(pipeline=2)).peak_flops == 2e9
    assert summarize([*reports[:1], report(1)], Mesh(pipeline=2)).peak_flops is None


def test_the_live_display_shows_every_figure() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    output = Terminal()
    progress = make_progress(output, 10)
    assert isinstance(progress, LiveProgress)
    progress.step(summary(4))
    progress.say("validation [loss] 2.5")
    progress.close()
    for words in ("tokens/s", "gradient norm", "imbalance", "4/10", "3.0000", "left", "validation [loss] 2.5",
                  "1.000 s", "reduce", "50%"):
        assert words in output.getvalue()


def test_of_many_pipeline_ranks_the_idlest_and_the_busiest_are_shown() -> None:
    ranks = 64
    reports = [report(rank, compute=0.02 * (rank + 1)) for rank in range(ranks)]
    table = rank_table(summarize(reports, Mesh(pipeline=ranks)))
    assert list(table.columns[0].cells) == [*map(str, range(8)), *map(str, range(56, 64))]
    assert next(iter(table.columns[6].cells)) == "99%" and table.row_count == SHOWN_RANKS


def test_time_left_before_and_after_some_steps_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    left = TimeLeft(10)
    assert left.after(summary(1)) == 9 * 2.0
    assert left.after(summary(2)) == 8 * 5.0


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]


def test_log_lines_carry_rank_and_pipeline_rank(tmp_path: Path) -> None:
    handler = log_to_file(tmp_path / "logs", 12, 3, "info")
    try:
        PACKAGE.getChild("gang").info("joined")
        PACKAGE.getChild("gang").debug("not shown")
    finally:
        close_log(handler)
    assert (tmp_path / "logs" / "rank-0012.log").read_text().rstrip().endswith(
        "rank 12 pipeline 3 INFO raytrain3d.gang: joined")


def recorded(directory: Path, partition: Literal["flops", "measured"], steps: list[dict[int, float]],
             weight: float = 0.0) -> JobConfig:
    """A job of 1 block whose directory has steps on record, with these seconds of each layer forward."""
    config = JobConfig(run=RunConfig(name="r", directory=str(directory)), data=DataConfig(path="d"),
                       model=ModelConfig(vocabulary=64, hidden=8, blocks=1, heads=2, feed_forward=8),
                       train=TrainConfig(steps=100, global_batch=2, sequence=8),
                       pipeline=PipelineConfig(partition=partition))
    records = Records(directory / "r")
    for step, seconds in enumerate(steps, start=1):
        each = replace(report(0, step=step), layer_forward_s=seconds,
                       layer_backward_s={layer: 2 * time for layer, time in seconds.items()},
                       layer_weight_s=dict.fromkeys(seconds, weight) if weight else {})
        records.step(summarize([each], Mesh()))
    records.close()
    return config


def test_costs_of_layers_are_medians_of_the_last_recorded_steps(tmp_path: Path) -> None:
    early, usual, outlier = ({0: scale, 1: 2 * scale, 2: 4 * scale} for scale in (9.0, 1.0, 50.0))
    costs = measured_costs(recorded(tmp_path, "measured", [early] * 30 + [usual] * 19 + [outlier]))
    assert costs is not None
    assert [cost.forward for cost in costs] == [1.0, 2.0, 4.0]
    assert [cost.backward for cost in costs] == [2.0, 4.0, 8.0]
    assert costs[0].backward_weight == 0, "looking up has no weight gradient"
    assert costs[1].backward_weight == costs[1].backward_input == 2.0, "a whole backward is divided as FLOPs are"


def test_costs_of_split_backwards_are_taken_as_they_are(tmp_path: Path) -> None:
    costs = measured_costs(recorded(tmp_path, "measured", [{0: 1.0, 1: 1.0, 2: 1.0}], weight=0.5))
    assert costs is not None and [(cost.backward_input, cost.backward_weight) for cost in costs] == [(2.0, 0.5)] * 3


def test_no_costs_without_a_record_of_every_layer_or_when_not_asked_for(tmp_path: Path) -> None:
    assert measured_costs(recorded(tmp_path / "none", "measured", [])) is None
    assert measured_costs(recorded(tmp_path / "some", "measured", [{0: 1.0, 2: 1.0}])) is None
    config = recorded(tmp_path / "cut", "measured", [])
    (tmp_path / "cut" / "r" / "metrics.jsonl").write_text('{"step": 1}\n[]\n{"st')
    assert measured_costs(config) is None
    assert measured_costs(recorded(tmp_path / "flops", "flops", [{0: 1.0, 1: 1.0, 2: 1.0}])) is None


def test_slowdowns_on_purpose_are_named_as_such(tmp_path: Path) -> None:
    output, records = io.StringIO(), Records(tmp_path)
    journal = Journal(PlainProgress(output, 9), records,
                      [SlowdownConfig(rank=2, factor=1.5, first=3, last=4), SlowdownConfig(layer=0, factor=2)])
    for step in range(2, 7):
        journal.step(summary(step))
    records.close()
    said = [line for line in output.getvalue().splitlines() if line.startswith("debug")]
    assert said == ["debug.slowdown: from step 2 on layer 0 takes 2 times as long, on purpose",
                    "debug.slowdown: from step 3 on rank 2 takes 1.5 times as long, on purpose",
                    "debug.slowdown: from step 5 on rank 2 is left in peace"]
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 3
