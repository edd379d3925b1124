"""The report of a run: `raytrain3d report`. From its directory alone, so while the run goes on and long after."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

from raytrain3d.errors import ConfigError
from raytrain3d.metrics.page import page, section, table
from raytrain3d.metrics.plan_report import KINDS, simulated_rows, split_text
from raytrain3d.metrics.records import Record
from raytrain3d.metrics.run_files import RunFiles, read_run
from raytrain3d.metrics.svg import Bar, Block, Curve, Mark, bar_chart, line_chart, number, timeline_chart
from raytrain3d.metrics.trace import RecordedStep, read_traces
from raytrain3d.plan.program import programs_for
from raytrain3d.plan.schedule import Kind, Op
from raytrain3d.plan.simulate import simulate
from raytrain3d.plan.table import amount, counted, schedule_name, size

MARKED = {"failure": "failure", "rebalance": "move", "checkpoint": "checkpoint"}
"""Kind of event -> class of its mark."""
SHOWN_EVENTS = ("failure", "recovered", "notice", "gang given up", "gang taken in", "rebalance", "rebalance outcome",
                "rebalance refused", "slow rank", "slow rank recovered", "slowdown on purpose", "skipped", "loss spike",
                "rewound", "checkpoint failed", "checkpoint given up", "damaged checkpoint", "resumed", "stopping", "failed")
WINDOW = 50
"""Steps that layer times are means of, at most: the last ones under a split."""


def run_report(directory: Path) -> str:
    """The page. ConfigError when there is nothing to report on."""
    run = read_run(directory)
    plan, last = run.plan, run.steps[-1]
    subtitle = (f"{counted(plan.mesh.size, 'rank')}: data {plan.mesh.data} x pipeline {plan.mesh.pipeline} x tensor "
                f"{plan.mesh.tensor} on {plan.device}, {amount(plan.num_parameters)} parameters, "
                f"{schedule_name(plan.schedule, plan.chunks)}; step {last['step']}, "
                f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(last['time']))}")
    return page(f"Run {directory.resolve().name}", subtitle, list(_figures(run)), list(_sections(run)))


def _figures(run: RunFiles) -> Iterator[tuple[str, str]]:
    last, validations = run.steps[-1], run.of_kind("validation")
    yield "loss", _number(last["loss"])
    if validations:
        yield "validation loss", _number(validations[-1]["loss"])
    yield "tokens/s, median", number(_typical(run.steps, "tokens_per_s"))
    yield "s/step, median", number(_typical(run.steps, "seconds"))
    if last.get("mfu") is not None:
        yield "MFU", f"{_typical(run.steps, 'mfu'):.1%}"
    if last.get("goodput") is not None:
        yield "goodput", f"{last['goodput']:.1%}"
    yield "idle, median", f"{_typical(run.steps, 'idle_share'):.1%}"
    yield "moves", str(len(run.of_kind("rebalance")))
    yield "failures", str(len(run.of_kind("failure", "failed")))
    yield "checkpoints", str(len(run.of_kind("checkpoint")))


def _sections(run: RunFiles) -> Iterator[str]:
    steps, marks = run.steps, list(_marks(run))
    legend = "Dotted lines: failures red, moves violet, checkpoints grey."
    yield section("Loss", f"Nats a token. {legend}", line_chart(
        [_curve(steps, "training", lambda step: step["loss"]),
         Curve("validation", [(event["step"], event["loss"]) for event in run.of_kind("validation")], dots=True)],
        unit="nats", marks=marks))
    yield section("Throughput", f"Loss tokens over the time of a step. {legend}", line_chart(
        [_curve(steps, "tokens/s", lambda step: step["tokens_per_s"])], unit="tokens/s", marks=marks, zero=True))
    yield section("Step time", "Measured, and as the plan's idle share would make it with the same compute.", line_chart(
        [_curve(steps, "measured", lambda step: step["seconds"]),
         _curve(steps, "as planned", lambda step: step["predicted_s"], dashed=True)], unit="s", marks=marks, zero=True))
    yield section("Idle share", "Share of a step without compute, by pipeline rank; dashed: the pipeline's, as planned.",
                  line_chart([*(_curve(steps, f"rank {rank}", _rank_idle(rank)) for rank in range(run.plan.mesh.pipeline)),
                              _curve(steps, "as planned", lambda step: run.plan.idle_share, dashed=True)],
                             unit="share", marks=marks, zero=True))
    yield section("Compute by pipeline rank", "Seconds a step; even lines are an even split.", line_chart(
        [_curve(steps, f"rank {rank}", _rank_compute(rank)) for rank in range(run.plan.mesh.pipeline)], unit="s",
        marks=marks, zero=True))
    yield section("Layers by stage", "How many layers each stage holds.", line_chart(
        [_curve(steps, f"stage {stage}", _layers_of(stage)) for stage in range(len(run.plan.stages))], unit="layers",
        marks=marks, zero=True))
    yield from _layer_times(run)
    yield _timeline(run)
    yield _planned_and_measured(run)
    yield _events(run)


def _marks(run: RunFiles) -> Iterator[Mark]:
    first, last = run.steps[0]["step"], run.steps[-1]["step"]
    for event in run.of_kind(*MARKED):
        if first <= event["step"] <= last:
            yield Mark(event["step"], MARKED[event["event"]], f"step {event['step']}: {event['text']}")


def _curve(steps: Sequence[Record], name: str, value: Callable[[Record], float | None], *, dashed: bool = False) -> Curve:
    return Curve(name, [(step["step"], value(step)) for step in steps], dashed=dashed)


def _rank_idle(rank: int) -> Callable[[Record], float | None]:
    return lambda step: float(step["pipeline_ranks"][rank]["idle_share"])


def _rank_compute(rank: int) -> Callable[[Record], float | None]:
    return lambda step: float(step["pipeline_ranks"][rank]["compute_s"])


def _layers_of(stage: int) -> Callable[[Record], float | None]:
    return lambda step: float(step["stages"][stage]) if stage < len(step["stages"]) else None


def _layer_times(run: RunFiles) -> Iterator[str]:
    """Before the first move and after the last one; once if there was none."""
    splits = run.splits()
    chosen = [("Layer times", splits[0])] if len(splits) == 1 else [
        ("Layer times before the first move", splits[0]), ("Layer times after the last move", splits[-1])]
    for name, (stages, steps) in chosen:
        seconds = run.layer_seconds(steps[-WINDOW:])
        stage_of = [stage for stage, count in enumerate(stages) for _ in range(count)]
        bars = [Bar(_layer_name(layer, len(seconds)), (("forward", times[0]), ("backward", times[1])), stage_of[layer])
                for layer, times in enumerate(seconds)]
        sums = [sum(sum(times) for times, stage in zip(seconds, stage_of, strict=True) if stage == each)
                for each in range(len(stages))]
        text = (f"Seconds a step, forward below and backward above it, coloured by stage; stages of {split_text(stages)} "
                f"layers take {', '.join(map(number, sums))} s.")
        yield section(name, text, bar_chart(bars, unit="s"))


def _layer_name(layer: int, num_layers: int) -> str:
    return "emb" if layer == 0 else "head" if layer == num_layers - 1 else str(layer - 1)


def _timeline(run: RunFiles) -> str:
    """Measured if the run has traces of its present split, else simulated with measured times of layers."""
    try:
        traces = read_traces(run.directory, run.plan)
    except ConfigError:
        return _simulated_timeline(run)
    plan, latest = run.plan, max(line.step for line in traces)
    lines = sorted((line for line in traces if line.step == latest and plan.mesh.coordinate(line.rank).data == 0
                    and plan.mesh.coordinate(line.rank).tensor == 0), key=lambda line: line.rank)
    begin = min(line.start for line in lines)
    rows = [(f"rank {line.rank}", _recorded_blocks(line, line.start - begin)) for line in lines]
    end = max(line.start - begin + line.seconds for line in lines)
    return section("Pipeline timeline", f"Replica 0 in step {latest}, as it was recorded. Blank is idle.",
                   timeline_chart(rows, seconds=end), wide=True)


def _recorded_blocks(line: RecordedStep, offset: float) -> list[Block]:
    return [Block(str(op), offset + start, offset + end, KINDS[op.kind])
            for op, start, end in line.spans if op.kind in KINDS]


def _simulated_timeline(run: RunFiles) -> str:
    plan, (_, steps) = run.plan, run.splits()[-1]
    share: int = max(steps[-1]["shares"])
    layers = run.layer_seconds(steps[-WINDOW:])

    def seconds(op: Op) -> float:
        """Of one micro-batch; the two halves of a split backward are taken as equal."""
        times = [layers[layer] for layer in plan.layers_of(op.stage)]
        forward, backward = sum(each[0] for each in times) / share, sum(each[1] for each in times) / share
        return forward if op.kind is Kind.FORWARD else backward if op.kind is Kind.BACKWARD else backward / 2

    simulated = simulate(programs_for(plan.schedule, plan.mesh.pipeline, share, plan.chunks), seconds)
    return section("Pipeline timeline", "The present split, simulated with measured times of layers, messages free. "
                   "run.trace_interval records real ones. Blank is idle.",
                   timeline_chart(simulated_rows(simulated), seconds=simulated.makespan), wide=True)


def _planned_and_measured(run: RunFiles) -> str:
    """A row for each pipeline rank, and one for all."""
    plan, (_, steps) = run.plan, run.splits()[-1]
    steps = steps[-WINDOW:]
    flops = [each.forward_flops + each.backward_flops for each in plan.estimates]
    compute = [fmean(step["pipeline_ranks"][rank]["compute_s"] for step in steps) for rank in range(plan.mesh.pipeline)]
    rows = []
    for rank, estimate in enumerate(plan.estimates):
        memory = steps[-1]["pipeline_ranks"][rank]["memory_bytes"]
        idle = fmean(step["pipeline_ranks"][rank]["idle_share"] for step in steps)
        rows.append([f"rank {rank}", f"{flops[rank] / sum(flops):.1%}", f"{compute[rank] / (sum(compute) or 1):.1%}",
                     size(estimate.memory.total), "" if memory is None else size(memory), "", f"{idle:.1%}", "",
                     number(compute[rank])])
    rows.append(["all", "", "", "", "", f"{plan.idle_share:.1%}", f"{fmean(step['idle_share'] for step in steps):.1%}",
                 number(_typical(steps, "predicted_s")), number(_typical(steps, "seconds"))])
    head = ["", "work planned", "measured", "memory planned", "in use", "idle planned", "measured", "s/step planned",
            "measured"]
    text = (f"Means of the last {counted(len(steps), 'step')}. Work is FLOPs in the plan and seconds measured (of a rank: "
            "its compute). The plan's memory is that of tensors: a process on a CPU holds its libraries too.")
    return section("Plan beside measured", text, table(head, rows), wide=True)


def _events(run: RunFiles) -> str:
    events = run.of_kind(*SHOWN_EVENTS)
    rows = [[str(event["step"]), time.strftime("%H:%M:%S", time.localtime(event["time"])), event["event"], event["text"]]
            for event in events]
    kinds = ["failure" if event["event"] in ("failure", "failed") else MARKED.get(event["event"], "") for event in events]
    inside = table(["step", "time", "event", "what happened"], rows, text_columns=(0, 2, 3), kinds=kinds) if rows else (
        "<p>None.</p>")
    return section("Failures and moves", "In the order of time; events.jsonl has all events.", inside, wide=True)


def _typical(steps: Sequence[Record], key: str) -> float:
    values = [step[key] for step in steps if step.get(key) is not None]
    return median(values) if values else float("nan")


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
