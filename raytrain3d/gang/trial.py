"""A few steps of a job on made-up tokens: without data, run directory, checkpoints or moves of layers."""

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from raytrain3d.config import JobConfig, RebalanceConfig
from raytrain3d.gang.failure import diagnose
from raytrain3d.gang.fleet import DRAIN_S, POLL_S, Fleet, FleetFailed, Limits
from raytrain3d.gang.launchers import Launcher, Say
from raytrain3d.gang.run import device_of, rank_settings
from raytrain3d.gang.stop import StopFlag
from raytrain3d.gang.worker import TrainerFactory
from raytrain3d.metrics.summary import StepSummary, summarize
from raytrain3d.parallel.groups import serve_store
from raytrain3d.plan.plan import Plan, make_plan

if TYPE_CHECKING:
    from raytrain3d.train.trainer import Trainer

WARM_UP = 2
"""Steps that do not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What was measured."""

    plan: Plan
    steps: tuple[StepSummary, ...]
    """After WARM_UP others; all of a rank's seconds are in them."""
    links: tuple[dict[str, float], ...]
    """By rank, as `parallel.links.measure_links` gives them."""

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return median(step.seconds for step in self.steps)

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """By pipeline rank: most that was in use. 0 where it was not measured."""
        return tuple(rank.memory_bytes or 0 for rank in self.steps[-1].pipeline_ranks)


def make_trial_trainer(config: JobConfig, plan: Plan, rank: int) -> "Trainer":
    """Imported late, as the real one."""
    from raytrain3d.train.trial import TrialTrainer
    return TrialTrainer(config, plan, rank)


def run_trial(config: JobConfig, launcher: Launcher, *, num_steps: int, say: Say,
              trainer: TrainerFactory = make_trial_trainer) -> Trial:
    """Steps 1 to WARM_UP + `num_steps` of the job, of which the last ones count, on ranks of its own. Raises what ended it:
    RankFailed naming the culprit, StopRequested after a signal."""
    config = replace(config, rebalance=RebalanceConfig(mode="off"))
    plan, stop, host = make_plan(config, device=device_of(config, launcher)), StopFlag(), launcher.address
    last = WARM_UP + num_steps
    config = replace(config, train=replace(config.train, steps=max(config.train.steps, last)))
    settings = rank_settings(config, plan, launcher, logs=None, trainer=trainer)
    with stop.on_signals(), launcher.gangs(settings, stop, say) as gangs:
        fleet = Fleet(gangs, stop, Limits())
        try:
            fleet.facts()
            store = serve_store(host, config.network.store_port)
            fleet.join(host, store.port, 0)
            links: list[dict[str, float]] = fleet.measure_links() if plan.mesh.size > 1 else [{}]
            fleet.restore(None, 0)
            steps = _steps(fleet, plan, last, stop)
        except FleetFailed as failed:
            raise diagnose(failed.signs, plan, fleet.nodes) from None
        fleet.leave()
    return Trial(plan=plan, steps=tuple(steps[WARM_UP:]), links=tuple(links))


def _steps(fleet: Fleet, plan: Plan, last: int, stop: StopFlag) -> list[StepSummary]:
    lease = fleet.train(1, last)
    while fleet.wait(lease, POLL_S, plan) is None:
        if stop.reason is not None:
            fleet.request_stop()
    stop.check()
    return [summarize(reports, plan.mesh) for reports in fleet.reports(until=last, limit_s=DRAIN_S)]
