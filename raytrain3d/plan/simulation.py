"""A job's pipeline simulated: what `raytrain3d simulate` shows. Costs are FLOPs, at one speed on every rank."""

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from raytrain3d.config import JobConfig
from raytrain3d.plan.cost import op_cost
from raytrain3d.plan.grid import timeline_grid
from raytrain3d.plan.layout import rank_costs
from raytrain3d.plan.params import model_spec
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.program import SENDS, programs_for
from raytrain3d.plan.schedule import Kind
from raytrain3d.plan.simulate import Span, Timeline, simulate
from raytrain3d.plan.table import aligned, counted, schedule_name, size


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """One step of every replica, in seconds."""

    plan: Plan
    tflops: float
    """Speed of a rank, in 10^12 FLOPs a second."""
    hop_s: float
    """From the end of an op to the arrival of its message."""
    timelines: tuple[Timeline, ...]
    """By replica."""

    def table(self) -> str:
        """Grid, idle shares, held activations and critical path of the replica with the most micro-batches."""
        plan, timeline, share = self.plan, self.timelines[0], self.plan.shares[0]
        cell_s = _mean_forward(timeline)
        kinds = "stage, kind (F forward, B backward, I input gradient, W weight gradient), micro-batch"
        hop = f"a message takes {self.hop_s * 1e3:g} ms" if self.hop_s else "messages are free"
        lines = [
            f"schedule  {schedule_name(plan.schedule, plan.chunks)}, {counted(plan.mesh.pipeline, 'pipeline rank')}, "
            f"{counted(share, 'micro-batch')}" + (" (replica 0, which has most)" if share > min(plan.shares) else ""),
            f"step      {seconds(timeline.makespan)} at {self.tflops:g} TFLOP/s a rank; {hop}",
            f"critical  {critical_path(plan, timeline)}",
            f"grid      a cell is {seconds(cell_s)}; {kinds}"]
        return "\n".join([*lines, "", timeline_grid(timeline, cell_s), "", *aligned(self._rows())])

    def _rows(self) -> list[list[str]]:
        timeline = self.timelines[0]
        rows = [["rank", "stages", "idle of wall time", "idle of ideal time", "peak activations", "their memory"]]
        for rank, e in enumerate(self.plan.estimates):
            rows.append([str(rank), ", ".join(map(str, e.stages)), f"{timeline.idle_of_wall[rank]:.1%}",
                         f"{timeline.idle_of_ideal[rank]:.1%}", str(timeline.peak_in_flight[rank]),
                         size(e.memory.activations + e.memory.logits)])
        return rows

    def to_json(self) -> str:
        """Times in seconds; a span is [op, start, end]."""
        plan = self.plan
        replicas = [{"replica": replica, "micro_batches": share, "step_s": timeline.makespan,
                     "critical_path": list(map(_span, timeline.critical_path)),
                     "ranks": [self._rank(timeline, rank) for rank in range(plan.mesh.pipeline)]}
                    for replica, (share, timeline) in enumerate(zip(plan.shares, self.timelines, strict=True))]
        return json.dumps({"schedule": plan.schedule, "chunks": plan.chunks, "placement": plan.placement,
                           "stages": plan.stages, "tflops": self.tflops, "hop_s": self.hop_s, "replicas": replicas}) + "\n"

    def _rank(self, timeline: Timeline, rank: int) -> dict[str, Any]:
        return {"pipeline_rank": rank, "idle_of_wall": timeline.idle_of_wall[rank],
                "idle_of_ideal": timeline.idle_of_ideal[rank], "peak_in_flight": timeline.peak_in_flight[rank],
                "spans": list(map(_span, timeline.spans[rank]))}


def simulate_job(config: JobConfig, plan: Plan, *, tflops: float, hop_s: float) -> Simulation:
    """Simulate a step of the job under its plan."""
    spec = model_spec(config.model, config.train, config.mesh.tensor)
    costs = tuple(cost * (1 / (tflops * 1e12)) for cost in rank_costs(config, spec, plan.stages))

    def timeline(share: int) -> Timeline:
        programs = programs_for(plan.schedule, plan.mesh.pipeline, share, plan.chunks)
        return simulate(programs, lambda op: op_cost(op, costs), hop_s=hop_s)

    by_share = {share: timeline(share) for share in set(plan.shares)}
    return Simulation(plan=plan, tflops=tflops, hop_s=hop_s, timelines=tuple(by_share[share] for share in plan.shares))


def critical_path(plan: Plan, timeline: Timeline) -> str:
    """`33 ops from 0F0 to 0B7: rank 0 40.0%, rank 1 60.0%`: how much of the step each rank's ops and messages are."""
    path, parts = timeline.critical_path, defaultdict[str, float](float)
    for rank in range(plan.mesh.pipeline):
        parts[f"rank {rank}"] = 0.0
    for span in path:
        parts["messages" if span.op.kind in SENDS else f"rank {plan.rank_of(span.op.stage)}"] += span.end - span.start
    ops = [span.op for span in path if span.op.kind not in SENDS]
    shares = ", ".join(f"{name} {part / timeline.makespan:.1%}" for name, part in parts.items())
    return f"{counted(len(ops), 'op')} from {ops[0]} to {ops[-1]}: {shares}"


def seconds(value: float) -> str:
    """`1.234 s`, `12.340 ms`, `0.120 us`."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= unit:
            return f"{value / unit:.3f} {name}"
    return f"{value / 1e-6:.3f} us"


def _mean_forward(timeline: Timeline) -> float:
    lengths = [span.end - span.start for spans in timeline.spans for span in spans if span.op.kind is Kind.FORWARD]
    return sum(lengths) / len(lengths)


def _span(span: Span) -> tuple[str, float, float]:
    return str(span.op), span.start, span.end
