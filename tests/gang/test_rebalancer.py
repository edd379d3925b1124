"""Moves as the driver does them: order of copy, commit and adopt, and what is true when a rank dies in between."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from raytrain3d.config import (DataConfig, JobConfig, MeshConfig, ModelConfig, PipelineConfig, RebalanceConfig, RunConfig,
                               TrainConfig)
from raytrain3d.errors import PlanError
from raytrain3d.gang.fleet import FleetFailed
from raytrain3d.gang.rebalancer import Rebalancer, counts_of, parse_counts
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.plan import Plan, make_plan


def plan(pipeline: int = 3, schedule: Any = "1f1b") -> Plan:
    model = ModelConfig(vocabulary=16, hidden=8, blocks=6, heads=2, feed_forward=8)
    return make_plan(JobConfig(run=RunConfig(name="r"), model=model, mesh=MeshConfig(pipeline=pipeline),
                               pipeline=PipelineConfig(schedule=schedule, partition="uniform"),
                               data=DataConfig(path="d"), rebalance=RebalanceConfig(mode="off"),
                               train=TrainConfig(steps=1, global_batch=4, sequence=8)))


@dataclass
class FakeFleet:
    """Knows which pipeline rank holds which layers, and fails at the wanted request."""

    held: dict[int, set[int]]
    placement: tuple[int, ...]
    fail_at: int | None = None
    log: list[str] = field(default_factory=list)

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
        self._request(f"adopt {counts_of(stages)}")
        for rank in self.held:
            self.held[rank] = {layer for stage, (first, end) in enumerate(stages) for layer in range(first, end)
                               if self.placement[stage] == rank}


class FakeJournal:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, kind: str, step: int, text: str, **values: Any) -> None:
        self.events.append((kind, values))


def start(of: Plan, fail_at: int | None = None) -> tuple[Rebalancer, FakeFleet, FakeJournal, list[Plan]]:
    fleet = FakeFleet({rank: set(of.layers_of_rank(rank)) for rank in range(of.mesh.pipeline)}, of.placement, fail_at)
    journal, kept = FakeJournal(), []
    return Rebalancer(of, fleet, journal, kept.append), fleet, journal, kept  # type: ignore[arg-type]


def test_every_shift_is_copied_then_committed_then_adopted() -> None:
    rebalancer, fleet, journal, kept = start(plan())
    assert counts_of(rebalancer.plan.stages) == "3,3,2"
    rebalancer.request("1,4,3")
    rebalancer.act(7)
    copies = [entry for entry in fleet.log if entry.startswith("copy")]
    assert len(copies) == len(kept) == 3
    assert [entry.split()[0] for entry in fleet.log] == ["copy", "adopt"] * 3
    assert counts_of(kept[-1].stages) == counts_of(rebalancer.plan.stages) == "1,4,3"
    (kind, values), = journal.events
    assert kind == "rebalance"
    assert (values["shifts"], values["bytes"], values["stages"]) == (3, 300, [1, 4, 3])


@pytest.mark.parametrize("fail_at", range(6))
def test_wherever_a_move_breaks_off_the_plan_names_a_holder_of_every_layer(fail_at: int) -> None:
    rebalancer, fleet, _, kept = start(plan(), fail_at)
    rebalancer.request("1,4,3")
    with pytest.raises(FleetFailed):
        rebalancer.act(7)
    for layer in range(rebalancer.plan.num_layers):
        assert layer in fleet.held[rebalancer.plan.rank_of(rebalancer.plan.stage_of(layer))]
    assert not kept or kept[-1] == rebalancer.plan


def test_stages_of_one_rank_exchange_layers_without_a_copy() -> None:
    rebalancer, fleet, _, _ = start(plan(2, "zb_v"))
    assert counts_of(rebalancer.plan.stages) == "2,2,2,2"
    rebalancer.request("2,1,3,2")
    rebalancer.act(1)
    assert fleet.log == ["adopt 2,1,3,2"]


def test_a_wish_that_cannot_be_is_refused_and_the_job_goes_on() -> None:
    rebalancer, fleet, journal, _ = start(plan())
    for wish in ("4,4", "a,b,c", "8,0,0", "3,3,3"):
        rebalancer.request(wish)
    rebalancer.act(3)
    assert not fleet.log
    assert [kind for kind, _ in journal.events] == ["rebalance refused"] * 4


def test_counts_are_read_with_a_hint_of_what_is_valid() -> None:
    with pytest.raises(PlanError, match="2 numbers for 3 stages: write one for each, such as 3,3,2"):
        parse_counts("4,4", plan())
    assert parse_counts("1, 2, 5", plan()) == ((0, 1), (1, 3), (3, 8))
