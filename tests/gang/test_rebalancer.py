"""Moves as the driver does them: order of copy, commit and adopt, and what is true when a rank dies in between."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from raytrain3d.config import (DataConfig, JobConfig, MeshConfig, ModelConfig, PipelineConfig, RebalanceConfig, RunConfig,
                               TrainConfig)
from raytrain3d.errors import PlanError
from raytrain3d.gang.fleet import FleetFailed
from raytrain3d.gang.rebalancer import Rebalancer, parse_counts
from raytrain3d.metrics.summary import RebalanceSummary
from raytrain3d.plan.partition import Stages, counts_of, counts_text, split_evenly
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.train.report import StepReport


def job(pipeline: int = 3, schedule: Any = "1f1b", mode: Any = "off", data: int = 1,
        deterministic: bool = False) -> JobConfig:
    stages = pipeline * (2 if schedule == "zb_v" else 1)
    return JobConfig(run=RunConfig(name="r"), data=DataConfig(path="d"), mesh=MeshConfig(data=data, pipeline=pipeline),
                     model=ModelConfig(vocabulary=16, hidden=8, blocks=6, heads=2, feed_forward=8),
                     pipeline=PipelineConfig(schedule=schedule, layers=counts_of(split_evenly(8, stages))),
                     rebalance=RebalanceConfig(mode=mode, interval=10),
                     train=TrainConfig(steps=1000, global_batch=4, sequence=8, deterministic=deterministic))


def plan() -> Plan:
    return make_plan(job())


@dataclass
class FakeFleet:
    """Knows which pipeline rank holds which layers, and fails at the wanted request."""

    held: dict[int, set[int]]
    placement: tuple[int, ...]
    fail_at: int | None = None
    log: list[str] = field(default_factory=list)
    nodes: dict[int, str] = field(default_factory=lambda: {rank: f"node{rank}" for rank in range(8)})

    def _request(self, text: str) -> None:
        self.log.append(text)
        if len(self.log) - 1 == self.fail_at:
            raise FleetFailed([])

    def copy_layer(self, layer: int, source: int, target: int) -> int:
        assert layer in self.held[source]
        self._request(f"copy {layer} {source}->{target}")
        self.held[target].add(layer)
        return 100

    def adopt(self, stages: Stages, shares: tuple[int, ...]) -> None:
        for rank in self.held:
            layers = {layer for stage, (first, end) in enumerate(stages) for layer in range(first, end)
                      if self.placement[stage] == rank}
            assert layers <= self.held[rank], "a rank is told to compute what it does not hold"
        self._request(f"adopt {counts_text(stages)}")
        for rank in self.held:
            self.held[rank] = {layer for stage, (first, end) in enumerate(stages) for layer in range(first, end)
                               if self.placement[stage] == rank}


class FakeJournal:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, kind: str, step: int, text: str, **values: Any) -> None:
        self.events.append((kind, values))

    note = event


def start(config: JobConfig, fail_at: int | None = None) -> tuple[Rebalancer, FakeFleet, FakeJournal, list[Plan]]:
    of = make_plan(config)
    fleet = FakeFleet({rank: set(of.layers_of_rank(rank)) for rank in range(of.mesh.pipeline)}, of.placement, fail_at)
    journal, kept = FakeJournal(), []
    return Rebalancer(config, of, fleet, journal, kept.append), fleet, journal, kept  # type: ignore[arg-type]


def test_every_shift_is_copied_then_committed_then_adopted() -> None:
    rebalancer, fleet, journal, kept = start(job())
    assert counts_text(rebalancer.plan.stages) == "3,3,2"
    rebalancer.request("1,4,3")
    rebalancer.act(7)
    copies = [entry for entry in fleet.log if entry.startswith("copy")]
    assert len(copies) == len(kept) == 3
    assert [entry.split()[0] for entry in fleet.log] == ["copy", "adopt"] * 3
    assert counts_text(kept[-1].stages) == counts_text(rebalancer.plan.stages) == "1,4,3"
    (kind, values), = journal.events
    assert kind == "rebalance"
    assert (values["shifts"], values["bytes"], values["stages"]) == (3, 300, [1, 4, 3])


@pytest.mark.parametrize("fail_at", range(6))
def test_wherever_a_move_breaks_off_the_plan_names_a_holder_of_every_layer(fail_at: int) -> None:
    rebalancer, fleet, _, kept = start(job(), fail_at)
    rebalancer.request("1,4,3")
    with pytest.raises(FleetFailed):
        rebalancer.act(7)
    for layer in range(rebalancer.plan.num_layers):
        assert layer in fleet.held[rebalancer.plan.rank_of(rebalancer.plan.stage_of(layer))]
    assert not kept or kept[-1] == rebalancer.plan


def test_stages_of_one_rank_exchange_layers_without_a_copy() -> None:
    rebalancer, fleet, _, _ = start(job(2, "zb_v"))
    assert counts_text(rebalancer.plan.stages) == "2,2,2,2"
    rebalancer.request("2,1,3,2")
    rebalancer.act(1)
    assert fleet.log == ["adopt 2,1,3,2"]


def test_a_wish_that_cannot_be_is_refused_and_the_job_goes_on() -> None:
    rebalancer, fleet, journal, _ = start(job())
    for wish in ("4,4", "a,b,c", "8,0,0", "3,3,3"):
        rebalancer.request(wish)
    rebalancer.act(3)
    assert not fleet.log
    assert [kind for kind, _ in journal.events] == ["rebalance refused"] * 4


def test_counts_are_read_with_a_hint_of_what_is_valid() -> None:
    with pytest.raises(PlanError, match="2 numbers for 3 stages: write one for each, such as 3,3,2"):
        parse_counts("4,4", plan())
    assert parse_counts("1, 2, 5", plan()) == ((0, 1), (1, 3), (3, 8))


def reports(of: Plan, step: int, slowdowns: dict[int, float]) -> list[StepReport]:
    """A block takes 30 ms a micro-batch, the head as much as three; a step half again as long as the slowest rank needs."""
    def layer(index: int, rank: int) -> float:
        weight = {0: 0.0, of.num_layers - 1: 3.0}.get(index, 1.0)
        return 0.01 * weight * slowdowns.get(rank, 1.0)

    def report(rank: int, seconds: float) -> StepReport:
        at = of.mesh.coordinate(rank)
        layers = of.layers_of_rank(at.pipeline) if of.shares[at.data] else ()
        forward = {index: of.shares[at.data] * layer(index, rank) for index in layers}
        return StepReport(step=step, rank=rank, loss=1.0, tokens=1, gradient_norm=1.0, learning_rate=1.0, seconds=seconds,
                          compute_s=seconds, data_wait_s=0.0, receive_wait_s=0.0, reduce_wait_s=0.0, commit_wait_s=0.0,
                          optimizer_s=0.0, layer_forward_s=forward,
                          layer_backward_s={index: 2 * time for index, time in forward.items()})

    work = [sum(3 * layer(index, rank) for index in of.layers_of_rank(at.pipeline)) * of.shares[at.data]
            for rank, at in enumerate(of.mesh)]
    return [report(rank, 1.5 * max(work)) for rank in range(of.mesh.size)]


def train(rebalancer: Rebalancer, steps: range, slowdowns: dict[int, float]) -> None:
    for step in steps:
        rebalancer.watch(reports(rebalancer.plan, step, slowdowns))
        if rebalancer.is_due(step):
            time.sleep(0.2)  # for the thread that thinks; the ranks wait for a hundredth of it only
            rebalancer.act(step)


def test_layers_leave_a_heavy_head_and_come_back_from_a_slow_rank() -> None:
    rebalancer, _, journal, _ = start(job(mode="on"))
    train(rebalancer, range(1, 41), {})
    assert counts_text(rebalancer.plan.stages) == "4,3,1"
    train(rebalancer, range(41, 101), {0: 2.0})
    assert rebalancer.plan.stages[0][1] < 4
    train(rebalancer, range(101, 121), {})
    kinds = [kind for kind, _ in journal.events]
    assert kinds.count("slow rank recovered") == 1
    (slow,) = [values for kind, values in journal.events if kind == "slow rank"]
    assert (slow["rank"], slow["node"], round(slow["slowdown"])) == (0, "node0", 2)


def test_advice_is_said_and_not_followed() -> None:
    rebalancer, fleet, journal, _ = start(job(mode="advise"))
    train(rebalancer, range(1, 41), {})
    assert not fleet.log
    assert "rebalance advice" in [kind for kind, _ in journal.events]


def test_what_was_done_is_summed_up_for_the_metrics() -> None:
    rebalancer, _, journal, _ = start(job(mode="on"))
    assert rebalancer.summary == RebalanceSummary()
    train(rebalancer, range(1, 11), {})
    moved = rebalancer.summary
    ((_, event),) = [each for each in journal.events if each[0] == "rebalance"]
    assert (moved.decisions, moved.moves, moved.layers, moved.bytes) == (1, 1, event["shifts"], 100 * event["shifts"])
    assert moved.seconds == event["seconds"] > 0
    assert moved.predicted_gain > 1.1 and moved.achieved_gain is None
    train(rebalancer, range(11, 21), {})
    ((_, outcome),) = [each for each in journal.events if each[0] == "rebalance outcome"]
    assert rebalancer.summary == replace(moved, decisions=2, achieved_gain=outcome["achieved"])
    assert outcome["predicted"] == moved.predicted_gain and outcome["achieved"] > 1.1
    rebalancer.request("3,3,2")
    rebalancer.act(25)
    assert (rebalancer.summary.decisions, rebalancer.summary.moves) == (2, 2)


def test_a_trial_of_a_slow_replica_ends_soon() -> None:
    """Its outcome is looked at after four steps, not only after the interval of ten."""
    rebalancer, *_ = start(job(1, mode="on", data=2))
    train(rebalancer, range(1, 11), {1: 20.0})
    assert rebalancer.plan.shares == (4, 0)
    train(rebalancer, range(11, 91), {1: 20.0})
    assert rebalancer.plan.shares == (3, 1)
    assert [rebalancer.next_decision(step) for step in (91, 94, 95, 101)] == [94, 94, 100, 110]
    train(rebalancer, range(91, 95), {1: 20.0})
    assert rebalancer.plan.shares == (4, 0)


def test_a_job_without_decisions_has_no_next_one() -> None:
    assert start(job(mode="off"))[0].next_decision(1) is None


@pytest.mark.parametrize(("deterministic", "shares"), [(False, (3, 1)), (True, (2, 2))])
def test_a_deterministic_job_keeps_its_shares(deterministic: bool, shares: tuple[int, ...]) -> None:
    rebalancer, *_ = start(job(1, mode="on", data=2, deterministic=deterministic))
    train(rebalancer, range(1, 41), {1: 2.0})
    assert rebalancer.plan.shares == shares


def test_noise_makes_no_slow_rank() -> None:
    """Rank 0 takes 1.3 times as long on average, but half as much more or less from step to step."""
    rebalancer, _, journal, _ = start(job(mode="on"))
    for step in range(1, 41):
        train(rebalancer, range(step, step + 1), {0: 1.3 * (1.5 if step % 2 else 0.5)})
    assert "slow rank" not in [kind for kind, _ in journal.events]
