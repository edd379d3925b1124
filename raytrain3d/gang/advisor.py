"""From the reports of a running job to decisions about its split: the thinking half of rebalancing on the driver.

A decision may take seconds where there are many stages, and ranks must not wait for it. So it is made in a thread: what
is ready within a small share of the time between decisions is acted on at once, the rest at the next boundary.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace

from raytrain3d.config import JobConfig
from raytrain3d.plan.cost import layer_costs
from raytrain3d.plan.measured import Estimate, Measured, RankTimes
from raytrain3d.plan.memory import missing_memory
from raytrain3d.plan.params import model_spec
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.program import programs_for
from raytrain3d.plan.rebalance import Keep, Move, MoveCost, PastMove, Revert, Situation, decide
from raytrain3d.plan.recompute import repeats
from raytrain3d.plan.state_memory import moved_bytes
from raytrain3d.plan.workload import Workload
from raytrain3d.train.report import StepReport

WAIT_SHARE = 0.01
"""Longest wait of the ranks for a decision, as a share of the time since the last one."""
LINK_BYTES_PER_S, SHIFT_S = 1e9, 0.05
"""What a move is thought to take before one was measured."""


class Advisor:
    """Watches one job."""

    def __init__(self, config: JobConfig, plan: Plan) -> None:
        config = plan.decided(config)
        self._config, self._spec = config, model_spec(config.model, config.train, plan.mesh.tensor)
        self._measured = Measured(plan.mesh, layer_costs(config, self._spec))
        self._repeated = repeats(config, self._spec)
        self._senders = plan.mesh.data * plan.mesh.tensor
        self._history: list[PastMove] = []
        self._considered: Situation | None = None
        self._pending: Future[Keep | Move | Revert] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="advisor")
        self._cost = MoveCost(
            layer_bytes=tuple(moved_bytes(layer, config) for layer in self._spec.layers),
            bytes_per_s=LINK_BYTES_PER_S, shift_s=SHIFT_S)

    def watch(self, reports: Sequence[StepReport], plan: Plan) -> None:
        """One step, from all ranks, under the split of `plan`."""
        repeated = {layer: self._repeated(stage, layer) for stage in range(len(plan.stages))
                    for layer in plan.layers_of(stage)}
        times = [RankTimes(rank=report.rank, num_micro_batches=plan.shares[plan.mesh.coordinate(report.rank).data],
                           forward=report.layer_forward_s, backward=report.layer_backward_s, weight=report.layer_weight_s,
                           repeated=repeated)
                 for report in reports]
        self._measured.add(times, max(report.seconds for report in reports))

    def estimate(self) -> Estimate | None:
        """What is known of costs and speeds by now; None: too little."""
        return self._measured.estimate()

    def advise(self, step: int, plan: Plan, estimate: Estimate) -> Keep | Move | Revert | None:
        """A decision for after `step`, from what is known now; None while it is still being made."""
        if self._pending is None:
            self._note_outcome(estimate)
            self._considered = self._situation(step, plan, estimate)
            self._pending = self._thread.submit(decide, self._considered, list(self._history), self._cost,
                                                self._config.rebalance, fixed_shares=self._shares_are_fixed(plan))
        assert self._considered is not None
        try:
            decision = self._pending.result(WAIT_SHARE * self._config.rebalance.interval * self._considered.step_s)
        except NotYet:
            return None
        self._pending = None
        return decision if self._considered.split.stages == plan.stages else None

    def carried_out(self, decision: Move | Revert, *, num_bytes: int, seconds: float, shifts: int) -> None:
        """The latest advice was followed; it took so long."""
        assert self._considered is not None
        self._history.append(PastMove(before=self._considered, decision=decision))
        if num_bytes:
            # All replicas and tensor ranks send at once, each its part.
            sending_s = num_bytes / self._senders / self._cost.bytes_per_s
            self._cost = replace(self._cost, shift_s=max(0.0, seconds - sending_s) / shifts)

    @property
    def last_gain(self) -> tuple[float, float] | None:
        """(predicted, achieved) speed-up of the last move, once its outcome was measured."""
        past = self._history[-1] if self._history else None
        if past is None or past.gain is None or isinstance(past.decision, Revert):
            return None
        return past.decision.gain, past.gain

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _note_outcome(self, estimate: Estimate) -> None:
        if self._history and self._history[-1].after_s is None:
            self._history[-1] = replace(self._history[-1], after_s=estimate.step_s)

    def _situation(self, step: int, plan: Plan, estimate: Estimate) -> Situation:
        programs = programs_for(plan.schedule, plan.mesh.pipeline, max(plan.shares), plan.chunks)
        workload = Workload(schedule=plan.schedule, num_ranks=plan.mesh.pipeline, chunks=plan.chunks, shares=plan.shares,
                            costs=estimate.costs, slowdowns=estimate.slowdowns, repeated=self._repeated,
                            excess=missing_memory(self._config, self._spec, programs))
        return Situation(step=step, steps_left=self._config.train.steps - step, stages=plan.stages, workload=workload,
                         step_s=estimate.step_s, noise=estimate.noise)

    def _shares_are_fixed(self, plan: Plan) -> bool:
        return self._config.train.deterministic or plan.mesh.data == 1 or bool(plan.vacant)
