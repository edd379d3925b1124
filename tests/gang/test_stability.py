"""Numbers that go bad: the step is left out, layer and rank are named, and the run ends, or goes back, as it should."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from chaos_jobs import Undisturbed, lines, make_job
from poison import Poison, PoisonedTrainer, plan_poisons

from raytrain3d.checkpoint.store import read_manifest, step_directory, steps
from raytrain3d.config import JobConfig, StabilityConfig
from raytrain3d.errors import NumbersFailed
from raytrain3d.gang.run import run_job
from raytrain3d.gang.stability import Stability, first_origin, median_plus
from raytrain3d.metrics.summary import StepSummary
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.train.report import Origin, StepReport


class Diary:
    """Keeps what a Journal would write down."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, str]] = []

    def event(self, kind: str, step: int, text: str, **values: Any) -> None:
        self.events.append((kind, step, text))


def summary(step: int, loss: float, *, skipped: bool = False) -> StepSummary:
    return StepSummary(step=step, loss=loss, tokens=1, gradient_norm=1.0, learning_rate=1.0, skipped=skipped, seconds=1.0,
                       idle_share=0.0, pipeline_ranks=(), places=(), layer_forward_s={}, layer_backward_s={},
                       layer_weight_s={})


def report(step: int, rank: int, origin: Origin | None) -> StepReport:
    return StepReport(step=step, rank=rank, loss=float("nan"), tokens=1, gradient_norm=1.0, learning_rate=1.0, skipped=True,
                      origin=origin, seconds=1.0, compute_s=1.0, data_wait_s=0.0, receive_wait_s=0.0, reduce_wait_s=0.0,
                      commit_wait_s=0.0, optimizer_s=0.0)


@pytest.fixture
def plan(undisturbed: Undisturbed) -> Plan:
    return make_plan(make_job(undisturbed.directory, "planned", (2, 2, 1)))


def watcher(**config: Any) -> tuple[Stability, Diary]:
    diary = Diary()
    journal: Any = diary
    return Stability(StabilityConfig(**config), journal), diary


def test_where_it_begins_is_the_first_place_of_a_step() -> None:
    order = ["embedding", "blocks.0", "blocks.1", "head"]

    def origin(layer: str, place: Any) -> Origin:
        return Origin(layer=layer, place=place, op=None)

    forwards = {3: origin("blocks.1", "forward"), 2: origin("blocks.0", "forward")}
    assert first_origin(forwards, order) == (2, forwards[2])
    assert first_origin(forwards | {5: origin("head", "weights")}, order) == (5, origin("head", "weights"))
    assert first_origin({0: origin("blocks.0", "backward"), 1: origin("blocks.1", "backward")}, order) == (
        1, origin("blocks.1", "backward"))
    assert first_origin({}, order) is None


def test_steps_that_are_not_finite_are_counted_within_the_window(plan: Plan) -> None:
    stability, diary = watcher(skipped=2, window=10)
    bad = Origin(layer="blocks.2", place="gradient", op="0B1")
    for step in (1, 9, 12):
        stability.watch(summary(step, float("nan"), skipped=True), [report(step, 2, bad), report(step, 1, None)], plan, {})
        assert stability.error is None
    assert stability.is_bad(9) and not stability.is_bad(10) and stability.skipped_steps(11) == (1, 9)
    assert diary.events[0][:2] == ("skipped", 1)
    assert diary.events[0][2].endswith("it begins in layer blocks.2 on rank 2 (replica 1, stage 0, tensor 0), op 0B1: the "
                                       "gradient of its weights is not finite, though what comes back to it is")
    stability.watch(summary(13, float("nan"), skipped=True), [report(13, 2, None)], plan, {})
    assert re.search(r"skipped is 2: 3 steps of the last 10 .*\(steps 9, 12-13\).*not known", str(stability.error))


def test_a_spike_is_one_against_the_last_steps_alone(plan: Plan) -> None:
    stability, diary = watcher(spike=6, window=10, on_spike="rewind", leave_out_before=1, rewinds=1)
    for step in range(1, 21):
        stability.watch(summary(step, 10 - step / 10 + step % 3 / 50), [], plan, {})
    assert diary.events == [] and stability.take_spike() is None, "a loss that falls is none"
    for step in (21, 22):
        stability.watch(summary(step, 12.0), [], plan, {})
    spike = stability.take_spike()
    assert [event[:2] for event in diary.events] == [("loss spike", 21), ("loss spike", 22)]
    assert spike is not None and (spike.first, spike.last) == (21, 22)
    stability.rewind(18)
    stability.leave_out(spike, 18)
    assert stability.left_out == {20, 21, 22} and stability.skipped_steps(18) == (20, 21, 22)
    stability.watch(summary(25, 12.0), [], plan, {})
    assert stability.take_spike() is None and not stability.alarm, "it goes back once"


def test_one_outlier_does_not_bend_the_limit() -> None:
    values = [4.0 + i % 5 / 100 for i in range(50)]
    assert median_plus([*values, 100.0], 6) == pytest.approx(median_plus(values, 6), abs=0.05)


def run(config: JobConfig, poisons: list[Poison]) -> str:
    plan_poisons(config, poisons)
    output = io.StringIO()
    assert run_job(config, launcher="local", output=output, trainer=PoisonedTrainer) == 0
    return output.getvalue()


@pytest.mark.dist
@pytest.mark.usefixtures("nothing_left")
def test_bad_numbers_are_left_out_and_traced_until_there_are_too_many(undisturbed: Undisturbed) -> None:
    calm = make_job(undisturbed.directory, "poisoned", (2, 2, 1), steps=16)
    config = replace(calm, stability=StabilityConfig(skipped=5))
    poisons = [Poison(rank=1, layer=4, step=3, kind="output"), Poison(rank=2, layer=2, step=5, kind="gradient"),
               Poison(rank=0, layer=1, step=8, kind="once"), Poison(rank=3, layer=5, step=10, kind="weights")]
    with pytest.raises(NumbersFailed, match=r"in step 12: it begins in layer head on rank 3 .*weights are not") as caught:
        run(config, poisons)
    assert "(steps 3, 5, 8, 10-12)" in str(caught.value)
    causes = {event["step"]: event["cause"] for event in lines(config, "events.jsonl") if event["event"] == "skipped"}
    assert causes[3].startswith("it begins in layer blocks.3 on rank 1 (replica 0, stage 1, tensor 0)")
    assert "op 1F0: its output is not finite" in causes[3]
    assert causes[5].startswith("it begins in layer blocks.1 on rank 2 ") and "the gradient of its input" in causes[5]
    assert causes[8] == "where is not known: computed again, all of it was finite"
    losses = {line["step"]: line["loss"] for line in lines(config, "metrics.jsonl")}
    assert [step for step, loss in losses.items() if loss is None] == [3, 8, 10, 11, 12], "step 5 went bad in its backward"
    place = f"{config.run.directory}/{config.run.name}"
    assert steps(place) == [6], "that of step 12 would not have been a good one"
    assert read_manifest(step_directory(place, 6)).skipped_steps == (3, 5)


@pytest.mark.dist
@pytest.mark.usefixtures("nothing_left")
def test_a_run_goes_back_before_a_spike_and_leaves_its_data_out(undisturbed: Undisturbed) -> None:
    calm = make_job(undisturbed.directory, "spiked", (1, 2, 1), steps=27)
    config = replace(calm, stability=StabilityConfig(spike=8, window=12, on_spike="rewind"))
    text = run(config, [Poison(rank=1, layer=5, step=21, kind="spike")])
    place = f"{config.run.directory}/{config.run.name}"
    events = [event for event in lines(config, "events.jsonl") if event["event"] == "rewound"]
    assert len(events) == 1 and events[0]["step"] == 18, text
    left_out = events[0]["left_out"]
    assert left_out[0] == 21
    metrics = lines(config, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 28))
    assert [line["step"] for line in metrics if line["skipped"]] == left_out
    assert read_manifest(step_directory(place, 27)).skipped_steps == tuple(left_out)
