"""Pages of a plan and of a simulated step: `raytrain3d plan --html` and `raytrain3d simulate --format html`."""

from collections.abc import Iterator, Sequence

from raytrain3d.metrics.page import page, preformatted, section
from raytrain3d.metrics.svg import Bar, Block, bar_chart, timeline_chart
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.schedule import Kind
from raytrain3d.plan.simulate import Timeline
from raytrain3d.plan.simulation import Simulation, critical_path, seconds
from raytrain3d.plan.state_memory import Memory
from raytrain3d.plan.table import amount, counted, schedule_name, size

KINDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.BACKWARD_INPUT: "input", Kind.BACKWARD_WEIGHT: "weight"}
"""Compute op -> class of its block in a timeline."""
SHOWN_STAGES = 16


def plan_report(name: str, simulation: Simulation) -> str:
    """The plan of job `name`, with a step as it simulates."""
    plan = simulation.plan
    return page(f"Plan of {name}", _subtitle(plan), _figures(plan), [
        *_charts(plan), _timeline(simulation),
        section("The plan", "As `raytrain3d plan` prints it.", preformatted(plan.table()), wide=True)])


def simulation_report(name: str, simulation: Simulation) -> str:
    """A simulated step of job `name`."""
    plan, longest = simulation.plan, max(simulation.timelines, key=lambda timeline: timeline.makespan)
    figures = [("step", seconds(longest.makespan)), ("speed of a rank", f"{simulation.tflops:g} TFLOP/s"),
               ("message", f"{simulation.hop_s * 1e3:g} ms"), *_figures(plan)]
    return page(f"Simulated step of {name}", _subtitle(plan), figures, [
        _timeline(simulation), *_charts(plan),
        section("As text", "As `raytrain3d simulate` prints it.", preformatted(simulation.table()), wide=True)])


def _subtitle(plan: Plan) -> str:
    mesh = plan.mesh
    return (f"{counted(mesh.size, 'rank')}: data {mesh.data} x pipeline {mesh.pipeline} x tensor {mesh.tensor} on "
            f"{plan.device}, {amount(plan.num_parameters)} parameters, {schedule_name(plan.schedule, plan.chunks)}, "
            f"{plan.tokens_per_step:,} tokens a step")


def _figures(plan: Plan) -> list[tuple[str, str]]:
    fullest = max(estimate.memory.total for estimate in plan.estimates)
    return [("idle of wall time", f"{plan.idle_share:.1%}"), ("idle of ideal time", f"{plan.idle_of_ideal:.1%}"),
            ("fullest rank", size(fullest)), ("micro-batches", str(sum(plan.shares))),
            ("split by", plan.split_by.partition(":")[0])]


def _charts(plan: Plan) -> Iterator[str]:
    work = [Bar(str(rank), (("forward", each.forward_flops / 1e9), ("backward", each.backward_flops / 1e9)), 0)
            for rank, each in enumerate(plan.estimates)]
    stages = split_text([end - first for first, end in plan.stages])
    yield section("Work by pipeline rank", "GFLOPs of one micro-batch, forward below and backward above it; stages of "
                  f"{stages} layers.", bar_chart(work, unit="GFLOP"))
    memory = [Bar(str(rank), [(kind, value / 2**20) for kind, value in _kinds_of(each.memory)], 2)
              for rank, each in enumerate(plan.estimates)]
    yield section("Memory by pipeline rank", "MiB of tensors, from below: weights; gradients and optimizer state; "
                  "activations and the rest.", bar_chart(memory, unit="MiB"))


def _kinds_of(memory: Memory) -> tuple[tuple[str, int], ...]:
    state = memory.gradients + memory.master + memory.moments
    return (("weights", memory.weights), ("gradients and optimizer", state),
            ("activations and the rest", memory.total - memory.weights - state))


def _timeline(simulation: Simulation) -> str:
    plan, timeline = simulation.plan, simulation.timelines[0]
    text = (f"Replica 0, {counted(plan.shares[0], 'micro-batch')}: {critical_path(plan, timeline)} are the critical path. "
            "Blank is idle.")
    return section("Simulated pipeline", text, timeline_chart(simulated_rows(timeline), seconds=timeline.makespan),
                   wide=True)


def simulated_rows(timeline: Timeline) -> list[tuple[str, list[Block]]]:
    """A row for each pipeline rank."""
    return [(f"rank {rank}", [Block(str(span.op), span.start, span.end, KINDS[span.op.kind]) for span in spans])
            for rank, spans in enumerate(timeline.spans)]


def split_text(counts: Sequence[int]) -> str:
    """`5, 5, 4, 2`; of many stages the first ones."""
    shown = ", ".join(map(str, counts[:SHOWN_STAGES]))
    return shown + (", ..." if len(counts) > SHOWN_STAGES else "")
