"""Recorded timelines: written by made-up ranks that run a simulated step, read back, merged and compared."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, PipelineConfig, RunConfig, TrainConfig
from raytrain3d.errors import ConfigError
from raytrain3d.metrics.trace import idle_table, measured_idle, merged_trace, read_plan, read_traces, simulated_trace
from raytrain3d.metrics.trace_file import append_trace
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.plan.program import programs_for
from raytrain3d.plan.schedule import Kind, Op
from raytrain3d.plan.simulate import Timeline, simulate
from raytrain3d.train import report
from raytrain3d.train.report import StepReport

START = 1_700_000_000.0


def seconds(op: Op) -> float:
    """Stages and kinds differ, micro-batches do not."""
    return (op.stage + 1) * {Kind.FORWARD: 1.0, Kind.BACKWARD_INPUT: 1.25, Kind.BACKWARD_WEIGHT: 0.75}.get(op.kind, 2.0)


@pytest.fixture(params=["1f1b", "zb_v"])
def plan(request: pytest.FixtureRequest) -> Plan:
    """Replicas of 4 and 3 micro-batches, 2 pipeline ranks, tensor 2."""
    return make_plan(JobConfig(
        run=RunConfig(name="test"), data=DataConfig(path="tokens"), mesh=MeshConfig(data=2, pipeline=2, tensor=2),
        model=ModelConfig(vocabulary=256, hidden=64, blocks=4, heads=4, feed_forward=192),
        pipeline=PipelineConfig(schedule=request.param), train=TrainConfig(steps=10, global_batch=7, sequence=32)))


@pytest.fixture
def run(plan: Plan, tmp_path: Path) -> Path:
    """A run directory with plan.json and, of steps 10 and 20, what every rank would write down."""
    (tmp_path / "plan.json").write_text(plan.to_json())
    for step in (10, 20):
        for rank in range(plan.mesh.size):
            write(tmp_path, plan, rank, step)
    return tmp_path


def timeline(plan: Plan, rank: int) -> Timeline:
    share = plan.shares[plan.mesh.coordinate(rank).data]
    return simulate(programs_for(plan.schedule, 2, share, plan.chunks), seconds)


def write(run: Path, plan: Plan, rank: int, step: int, factor: float = 1.0) -> None:
    """A rank's line; `factor` stretches the step. A rank's pipeline part ends with its own last op."""
    own = timeline(plan, rank).spans[plan.mesh.coordinate(rank).pipeline]
    spans = [(str(span.op), span.start * factor, span.end * factor) for span in own]
    waited = ("0RB0" if plan.mesh.coordinate(rank).pipeline == 0 else "1RF0", 0.0, own[0].start)
    recorded = report.Timeline(start=START + step, seconds=own[-1].end * factor, spans=(waited, *spans))
    append_trace(run, StepReport(
        step=step, rank=rank, loss=0, tokens=1, gradient_norm=0, learning_rate=0, seconds=1, compute_s=1, data_wait_s=0,
        receive_wait_s=0, reduce_wait_s=0, commit_wait_s=0, optimizer_s=0, timeline=recorded))


def test_measured_idle_share_is_that_of_the_timeline(run: Path, plan: Plan) -> None:
    """Waiting is no compute, and a rank that is done early waits for the slowest of its replica."""
    measured = measured_idle(plan, read_traces(run, plan))
    assert list(measured) == list(range(8))
    for rank, idle in measured.items():
        assert idle == pytest.approx(timeline(plan, rank).idle_of_wall[plan.mesh.coordinate(rank).pipeline])


def test_simulation_with_measured_times_agrees_with_what_was_measured(run: Path, plan: Plan) -> None:
    lines = [line.split() for line in idle_table(plan, read_traces(run, plan)).splitlines()]
    assert lines[0] == ["rank", "place", "idle", "measured", "idle", "simulated"]
    assert len(lines) == 1 + 8 + 1 + 1 + 3
    for line in lines[1:10]:
        assert line[-1] == line[-2] != "0.0%"
    assert lines[6][:7] == ["5", "replica", "1,", "pipeline", "0,", "tensor", "1"]
    measured, expected = (word for word in lines[-3] if word[0].isdigit())
    assert measured == expected == f"{(timeline(plan, 0).makespan + timeline(plan, 4).makespan) / 2:.4g}"
    assert lines[-1][-4:] == ["Recorded", "steps:", "10,", "20"]


def test_table_shows_what_the_schedule_does_not_explain(run: Path, plan: Plan) -> None:
    """A step whose waits are twice as long measures more idle time than its op times make."""
    for path in (run / "traces").iterdir():
        path.write_text("".join(stretched(line) for line in path.read_text().splitlines()))
    for line in idle_table(plan, read_traces(run, plan)).splitlines()[1:10]:
        measured, expected = (float(cell.rstrip("%")) for cell in line.split()[-2:])
        assert measured > expected + 5


def stretched(text: str) -> str:
    line = json.loads(text)
    line["seconds"] *= 1.5
    return json.dumps(line) + "\n"


def test_step_that_was_done_again_counts_once(run: Path, plan: Plan) -> None:
    before = read_traces(run, plan)
    write(run, plan, 3, 20, factor=2.0)
    again = {(line.rank, line.step): line for line in read_traces(run, plan)}
    assert len(again) == len(before) == 16
    assert again[3, 20].seconds == 2 * again[3, 10].seconds


def test_merged_trace_has_every_op_of_every_rank(run: Path, plan: Plan) -> None:
    events = json.loads(merged_trace(plan, read_traces(run, plan)))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    num_ops = sum(len(spans) + 1 for rank in range(8)
                  for spans in [timeline(plan, rank).spans[plan.mesh.coordinate(rank).pipeline]])
    assert len(spans) == 2 * num_ops
    assert all(event["pid"] == plan.mesh.coordinate(event["tid"]).data for event in spans)
    first = next(event for event in spans if event["tid"] == 0 and event["name"] == "0F1")
    assert (first["ts"], first["dur"], first["cat"]) == (1e6, 1e6, "forward")
    later = [event["ts"] for event in spans if event["tid"] == 0 and event["name"] == "0F1"]
    assert later == [1e6, 11e6]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[6] == "rank 6: pipeline 1, tensor 0"
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"replica 0", "replica 1"}


def test_simulated_trace_has_a_thread_for_each_pipeline_rank(plan: Plan) -> None:
    timelines = [timeline(plan, plan.mesh.gang(replica)[0]) for replica in range(2)]
    events = json.loads(simulated_trace(plan, timelines))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in spans} == {(0, 0), (0, 2), (1, 4), (1, 6)}
    assert len(spans) == sum(len(spans) for each in timelines for spans in each.spans)
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(timelines[0].makespan * 1e6)


def test_line_that_was_cut_off_is_left_out(run: Path, plan: Plan) -> None:
    with (run / "traces" / "rank-0001.jsonl").open("a") as file:
        file.write('{"step": 30, "ra')
    assert len(read_traces(run, plan)) == 16


def test_replica_without_micro_batches_is_shown(run: Path, plan: Plan) -> None:
    """It recorded steps without an op, which took no time."""
    plan = replace(plan, shares=(4, 0))
    for rank in range(4, 8):
        path = run / "traces" / f"rank-000{rank}.jsonl"
        path.write_text(json.dumps({"step": 10, "rank": rank, "start": START, "seconds": 0.0, "spans": []}) + "\n")
    lines = idle_table(plan, read_traces(run, plan)).splitlines()
    assert [line.split()[-2:] for line in lines[5:9]] == [["0.0%", "0.0%"]] * 4
    assert len(json.loads(merged_trace(plan, read_traces(run, plan)))["traceEvents"]) > 0


def other_layout(run: Path, plan: Plan) -> None:
    (run / "traces" / "rank-0008.jsonl").write_text(
        json.dumps({"step": 1, "rank": 8, "start": 0, "seconds": 1, "spans": []}) + "\n")


def other_stage(run: Path, plan: Plan) -> None:
    (run / "traces" / "rank-0000.jsonl").write_text(
        json.dumps({"step": 1, "rank": 0, "start": 0, "seconds": 1, "spans": [["1F0", 0, 1]]}) + "\n")


def no_record(run: Path, plan: Plan) -> None:
    (run / "traces" / "rank-0002.jsonl").write_text('{"step": 1}\n')


def no_op(run: Path, plan: Plan) -> None:
    text = (run / "traces" / "rank-0002.jsonl").read_text()
    (run / "traces" / "rank-0002.jsonl").write_text(text.replace('"1RF0"', '"what"'))


def no_steps(run: Path, plan: Plan) -> None:
    for path in (run / "traces").iterdir():
        path.write_text("")


def no_traces(run: Path, plan: Plan) -> None:
    for path in (run / "traces").iterdir():
        path.unlink()


@pytest.mark.parametrize(("damage", "message"), [
    (other_layout, r"rank-0008.jsonl line 1 has rank 8, plan.json has 8 ranks: remove traces of an earlier layout"),
    (other_stage, r"rank-0000.jsonl line 1 has 1F0, rank 0 has stage 0"),
    (no_record, r"rank-0002.jsonl line 1 is no recorded step: KeyError: 'spans'"),
    (no_op, r"rank-0002.jsonl line 1 is no recorded step: PlanError: 'what' is no op"),
    (no_steps, r"traces' has no recorded step yet: a rank writes one every run.trace_interval steps"),
    (no_traces, r"traces' has no traces: run.trace_interval must be set when the run trains"),
])
def test_traces_that_cannot_be_read(run: Path, plan: Plan, damage: Callable[[Path, Plan], None], message: str) -> None:
    damage(run, plan)
    with pytest.raises(ConfigError, match=message):
        read_traces(run, plan)


def test_stage_without_a_trace_is_named(run: Path, plan: Plan) -> None:
    for rank in (2, 3, 6, 7):
        (run / "traces" / f"rank-000{rank}.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"no trace has an op of stage 1.*copy the files in traces/ of every node"):
        idle_table(plan, read_traces(run, plan))


def test_directory_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run directory: plan.json cannot be read \(No such file"):
        read_plan(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"plan.json' is not a plan: KeyError"):
        read_plan(tmp_path)


def test_plan_is_read_back(run: Path, plan: Plan) -> None:
    assert read_plan(run) == plan
